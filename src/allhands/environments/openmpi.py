"""Open MPI's mpirun."""

from __future__ import annotations

from collections.abc import Mapping

from . import slurm
from .base import Detection, text

__all__ = ["MARK", "NAME", "call", "detect", "number"]

NAME = "openmpi"
MARK = "OMPI_COMM_WORLD_RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that Open MPI's mpirun started."""
    if not text(env, MARK):
        return None
    found = Detection(NAME, f"{MARK} is set by Open MPI's mpirun", env)
    call(number(found))
    # Inside a Slurm allocation, mpirun puts rank 0 on the first node.
    return found.meet(lambda: slurm.head(env))


def number(found: Detection) -> Detection:
    """Read rank and sizes. The node's number is not given: OMPI_COMM_WORLD_NODE_RANK is one more local rank."""
    found.take("rank", MARK).take("world_size", "OMPI_COMM_WORLD_SIZE")
    return found.take("local_rank", "OMPI_COMM_WORLD_LOCAL_RANK").take("local_world_size", "OMPI_COMM_WORLD_LOCAL_SIZE")


def call(found: Detection) -> Detection:
    """Name the job after Open MPI's own name for this mpirun (version 5, then 4)."""
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        job = text(found.env, name)
        if job:
            return found.call(f"openmpi-{job}", f"{name}={job}")
    return found
