"""MPI launchers: Open MPI, MVAPICH2, and Hydra (MPICH, Intel MPI and other PMI launchers outside a known scheduler)."""

from __future__ import annotations

from collections.abc import Mapping

from . import slurm
from .base import Detection, text

__all__ = ["HYDRA", "MVAPICH", "OPENMPI", "detect_hydra", "detect_mvapich", "detect_openmpi", "read_ranks"]

# The variable of the rank identifies each MPI.
OPENMPI, MVAPICH, HYDRA = "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"

_OTHERS: dict[str, dict[str, str | tuple[str, ...]]] = {
    # The node's number is not given: OMPI_COMM_WORLD_NODE_RANK is one more local rank.
    OPENMPI: {
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    MVAPICH: {
        "world_size": "MV2_COMM_WORLD_SIZE",
        "local_rank": "MV2_COMM_WORLD_LOCAL_RANK",
        "local_world_size": "MV2_COMM_WORLD_LOCAL_SIZE",
    },
    # The PMI_LOCAL pair is Cray's.
    HYDRA: {
        "world_size": "PMI_SIZE",
        "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        "local_world_size": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    },
}


def read_ranks(found: Detection, rank: str) -> Detection:
    """Read rank and sizes of the MPI whose rank is in the variable ``rank``."""
    return found.read(rank=rank, **_OTHERS[rank])


def detect_openmpi(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that Open MPI's mpirun started."""
    if not text(env, OPENMPI):
        return None
    found = read_ranks(Detection("openmpi", f"{OPENMPI} is set by Open MPI's mpirun", env), OPENMPI)
    # Open MPI's own name for this mpirun (version 5, then 4).
    name = next((name for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") if text(env, name)), "")
    if name:
        found.set(f"{name}={text(env, name)}", job=f"openmpi-{text(env, name)}")
    # Inside a Slurm allocation, mpirun puts rank 0 on the first node.
    return found.locate(lambda: slurm.head(env))


def detect_mvapich(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that MVAPICH2's launcher started."""
    if not text(env, MVAPICH):
        return None
    return read_ranks(Detection("mvapich", f"{MVAPICH} is set by MVAPICH2", env), MVAPICH).locate()


def detect_hydra(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that Hydra started.

    Slurm's pmi2 and Flux set PMI_RANK too; they are recognised first, by their own variables.
    """
    if not text(env, HYDRA):
        return None
    return read_ranks(Detection("hydra", f"{HYDRA} is set by MPICH's or Intel MPI's mpiexec", env), HYDRA).locate()
