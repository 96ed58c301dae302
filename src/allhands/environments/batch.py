"""A scheduler's allocation for several processes in which nothing was launched: sbatch without srun and its like."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import AllhandsError, fail
from . import slurm
from .base import Detection, integer, lines, me, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "batch"
MARK = "an allocation for several processes in which nothing was launched"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Raise `not-launched` where this is the one process of a batch script that asked for more."""
    tasks = integer(env, "SLURM_NTASKS")
    if tasks is not None and tasks > 1 and not slurm.in_step(env):
        raise _not_launched(f"SLURM_NTASKS={tasks}", "SLURM_STEP_NODELIST is not set", "srun", "sbatch -n 1")
    for job, hosts, skip, launcher in (
        ("PBS_JOBID", "PBS_NODEFILE", 0, "mpiexec"),
        # LSF's first line is the launch node.
        ("LSB_JOBID", "LSB_DJOB_RANKFILE", 1, "jsrun"),
    ):
        count = _hosts(env, hosts, skip) if text(env, job) else 0
        if count > 1:
            raise _not_launched(
                f"{hosts} names {count} hosts",
                "no launcher gave this process a rank",
                launcher,
                "one host",
            )
    return None


def _hosts(env: Mapping[str, str], name: str, skip: int) -> int:
    """Return how many hosts a file names; 0 where there is none, since it is evidence only where it can be read."""
    try:
        return len(set(lines(env, name, "")[skip:]))
    except AllhandsError:
        return 0


def _not_launched(asked: str, lacks: str, launcher: str, instead: str) -> AllhandsError:
    return fail(
        "not-launched",
        f"this process was not started by {launcher}, but the job asks for several ({asked})",
        who=me(),
        why=f"{lacks}: the batch script runs once, on the first node, and the other ranks would never start",
        fix=f"start it with {launcher}: `{launcher} python your_script.py` in the batch script\n"
        f"for a single process ask for {instead}, or pass rank=0 and world_size=1",
    )
