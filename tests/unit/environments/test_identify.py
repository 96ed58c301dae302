from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest

from allhands.environments.identify import ENVIRONMENTS, identify, survey
from allhands.environments.world import Address
from allhands.errors import AllhandsError, ArgumentError

Refuse = Callable[..., AllhandsError]

PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29501"}
STEP = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
# One task per node: each can be the agent of a launcher inside it.
AGENTS = {
    **STEP,
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
LAUNCHER = {"ALLHANDS_RANK": "6", "ALLHANDS_WORLD_SIZE": "7"}
TORCHRUN = {**PLAIN, "TORCHELASTIC_RUN_ID": "run7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
LSF = {"LSB_JOBID": "5", "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4"}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4"}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2","algo-3","algo-4"]', "SM_CURRENT_HOST": "algo-4"}
THIRD = {"RANK": "3", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("env", "source"),
    [
        ({**LAUNCHER, **TORCHRUN, **STEP}, "allhands"),
        ({**TORCHRUN, **STEP}, "torchrun"),
        ({**STEP, **LSF, **FLUX, **OPENMPI, **THIRD}, "slurm"),
        ({**LSF, **FLUX, **OPENMPI, **THIRD}, "lsf"),
        ({**FLUX, **OPENMPI, **THIRD}, "flux"),
        ({**OPENMPI, **HYDRA, **SAGEMAKER, **THIRD}, "openmpi"),
        ({**HYDRA, **SAGEMAKER, **THIRD}, "hydra"),
        ({**SAGEMAKER, **THIRD}, "sagemaker"),
        (THIRD, "plain"),
    ],
)
def test_precedence(env: Mapping[str, str], source: str) -> None:
    """Launchers precede schedulers, those MPI, MPI clouds, and torch's own variables are last."""
    assert identify(env).source == source


@pytest.mark.parametrize("outer", [STEP, LSF, FLUX, OPENMPI, HYDRA, SAGEMAKER])
@pytest.mark.parametrize(("rank", "size", "says"), [("0", "4", "RANK=0"), ("3", "8", "WORLD_SIZE=8")])
def test_disagreement_is_an_error(refuse: Refuse, outer: Mapping[str, str], rank: str, size: str, says: str) -> None:
    """RANK and WORLD_SIZE against any scheduler, MPI or cloud: the error names both with their values."""
    told = refuse("launcher-mismatch", {**outer, "RANK": rank, "WORLD_SIZE": size}).diagnosis
    assert says in told.what
    believed = identify(outer)
    assert believed.reasons["rank" if rank == "0" else "world_size"] in told.what
    assert "unset RANK WORLD_SIZE" in told.fix


def test_disagreement_of_rank_alone(refuse: Refuse) -> None:
    """RANK=0 against SLURM_PROCID=3 is a disagreement even where WORLD_SIZE is not set."""
    told = refuse("launcher-mismatch", {**STEP, "RANK": "0"}).diagnosis
    assert "SLURM_PROCID=3 against RANK=0" in told.what
    assert "unset RANK\n" in told.fix


def test_two_mpis_that_disagree(refuse: Refuse) -> None:
    """Open MPI and PMI cannot both have started the process."""
    told = refuse("launcher-mismatch", {**OPENMPI, "PMI_RANK": "0", "PMI_SIZE": "4"}).diagnosis
    assert "OMPI_COMM_WORLD_RANK=3 against PMI_RANK=0" in told.what


def test_several_tasks_per_node_are_no_agents(refuse: Refuse) -> None:
    """Open MPI that differs from a Slurm step with two tasks per node is a disagreement."""
    refuse("launcher-mismatch", {**STEP, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.parametrize("inside", [OPENMPI, HYDRA, FLUX])
def test_mpi_inside_an_allocation(inside: Mapping[str, str]) -> None:
    """Mpirun starts one daemon per node as Slurm tasks: its own numbers are the ranks then."""
    world = identify({**AGENTS, **inside})
    assert (world.rank, world.world_size) == (3, 4)
    assert world.source != "slurm"


def test_node_launcher_inside_a_step() -> None:
    """A launcher that each Slurm task runs on its node sets RANK, WORLD_SIZE and LOCAL_RANK in step with the tasks."""
    world = identify({**AGENTS, "RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"})
    assert (world.rank, world.world_size, world.local_rank, world.source) == (6, 8, 2, "plain")


@pytest.mark.parametrize(
    "left_over",
    [
        {"RANK": "6", "WORLD_SIZE": "8"},
        {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
        {"RANK": "6", "WORLD_SIZE": "7", "LOCAL_RANK": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "8", "LOCAL_RANK": "2"},
    ],
)
def test_left_over_variables_in_agents(refuse: Refuse, left_over: Mapping[str, str]) -> None:
    """Variables that do not fit the tasks are not of a launcher inside them, even at one task per node."""
    refuse("launcher-mismatch", {**AGENTS, **left_over})


def test_shell_inside_a_step_of_one() -> None:
    """In `srun --pty bash` RANK and WORLD_SIZE of the user are used: a step of one task is no job of several."""
    one = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    world = identify({**one, "SLURM_NODEID": "0", "SLURM_LOCALID": "0", **PLAIN})
    assert (world.rank, world.world_size, world.source) == (1, 4, "plain")


def test_agreeing_sources_keep_the_first() -> None:
    """RANK that repeats SLURM_PROCID, as many job scripts export it, is no disagreement."""
    world = identify({**STEP, **THIRD})
    assert (world.rank, world.source, world.local_rank) == (3, "slurm", 1)


def test_alone() -> None:
    """Without any variable that indicates other processes the world has one rank, with that reason."""
    world = identify({"PATH": "/bin", "SLURM_NTASKS": "1", "HOSTNAME": "notebook-0", "RANK": " "})
    assert (world.rank, world.world_size, world.source, world.coordinator) == (0, 1, "alone", None)
    assert "nothing" in world.reasons["rank"]
    assert world.one_host


@pytest.mark.parametrize("hint", ["MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"])
def test_not_alone_with_a_hint(refuse: Refuse, hint: str) -> None:
    """A variable that indicates other processes, without rank and size, is an error."""
    assert f"{hint}=1" in refuse("incomplete-environment", {hint: "1"}).diagnosis.why


def test_never_writes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own environment is read where none is given, and left as it is."""
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    world = identify(coordinator="elsewhere:1234")
    assert (world.rank, world.world_size) == (1, 4)
    assert dict(os.environ) == before


def test_job_name_of_the_user() -> None:
    """ALLHANDS_JOB, with the attempt, replaces the scheduler's name."""
    assert identify(STEP).job == "slurm-77.0"
    assert identify({**STEP, "ALLHANDS_JOB": "mine", "ALLHANDS_ATTEMPT": "2"}).job == "mine-2"


def test_survey_names_every_environment_with_a_reason() -> None:
    """Each environment is considered once, in order, with its reason; errors are returned, not raised."""
    found = survey({**STEP, "RANK": "0"})
    assert [finding.name for finding in found] == [environment.name for environment in ENVIRONMENTS]
    assert all(finding.reason for finding in found)
    by_name = {finding.name: finding for finding in found}
    assert {name for name, finding in by_name.items() if finding.recognised} == {"slurm", "plain"}
    slurm, plain = by_name["slurm"], by_name["plain"]
    assert slurm.world is not None
    assert slurm.world.rank == 3
    assert plain.error is not None
    assert plain.error.slug == "incomplete-environment"
    assert "TORCHELASTIC_RUN_ID" in by_name["torchrun"].reason


def test_names_are_distinct() -> None:
    """A source names one environment only."""
    assert len({environment.name for environment in ENVIRONMENTS}) == len(ENVIRONMENTS)


def test_arguments_are_checked_even_when_the_environment_is_fine() -> None:
    """A rank that is no number is refused as an argument."""
    with pytest.raises(ArgumentError):
        identify(PLAIN, rank="1")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ArgumentError):
        identify(PLAIN, world_size=True)


def test_coordinator_of_the_environment() -> None:
    """MASTER_ADDR and MASTER_PORT become the coordinator's address."""
    assert identify(PLAIN).coordinator == Address("node-a", 29501)
