from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allhands.environments.identify import identify
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

SBATCH = {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_sbatch_without_srun(refuse: Refuse) -> None:
    """The one process of a batch script looks like rank 0 of n and would wait for ever: the fix is srun."""
    told = refuse("not-launched", SBATCH).diagnosis
    assert "SLURM_NTASKS=8" in told.what
    assert "start it with srun" in told.fix


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_interactive_shell(refuse: Refuse, step: str) -> None:
    """The shell of an interactive job is a step, but not one that srun filled with tasks."""
    refuse("not-launched", {**SBATCH, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": step})


def test_one_task_needs_no_srun() -> None:
    """A batch job for one task is a world of one."""
    assert identify({**SBATCH, "SLURM_NTASKS": "1"}).source == "alone"


def test_another_launcher_in_the_batch_script() -> None:
    """Mpirun or torch's variables in a batch script are launchers too."""
    assert identify({**SBATCH, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}).rank == 3
    assert identify({**SBATCH, "RANK": "3", "WORLD_SIZE": "8"}).rank == 3


@pytest.mark.parametrize(
    ("job", "file", "launcher"),
    [("PBS_JOBID", "PBS_NODEFILE", "mpiexec"), ("LSB_JOBID", "LSB_DJOB_RANKFILE", "jsrun")],
)
def test_other_schedulers(refuse: Refuse, tmp_path: Path, job: str, file: str, launcher: str) -> None:
    """Several hosts and no launcher: the scheduler's own launcher is named."""
    text = "launch\na\nb\n" if launcher == "jsrun" else "a\na\nb\n"
    path = tmp_path / "hosts"
    path.write_text(text)
    env = {job: "1", file: str(path)}
    assert launcher in refuse("not-launched", env).diagnosis.fix
    path.write_text(text.replace("b\n", "a\n"))
    assert identify(env).source == "alone"
    assert identify({**env, file: "/nowhere"}).source == "alone"
