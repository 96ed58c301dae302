"""MPICH and Intel MPI (the Hydra launcher), and any other PMI launcher outside a known scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, text

__all__ = ["MARK", "NAME", "detect", "number"]

NAME = "hydra"
MARK = "PMI_RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that Hydra started.

    Slurm's pmi2 and Flux set PMI_RANK too; they are recognised first, by their own variables.
    """
    if not text(env, MARK):
        return None
    return number(Detection(NAME, f"{MARK} is set by MPICH's or Intel MPI's mpiexec", env)).meet()


def number(found: Detection) -> Detection:
    """Read rank and sizes (the PMI_LOCAL pair is Cray's)."""
    found.take("rank", MARK).take("world_size", "PMI_SIZE")
    found.take("local_rank", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    return found.take("local_world_size", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
