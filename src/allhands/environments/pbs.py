"""PBS, with or without PALS: MPI numbers the processes, PBS gives the hosts."""

from __future__ import annotations

from collections.abc import Mapping

from . import mpich, mvapich, openmpi
from .base import Detection, lines, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "pbs"
MARK = "PBS_JOBID, PBS_NODEFILE and a rank from MPI"
_RANKS = (openmpi.MARK, mvapich.MARK, mpich.MARK, "PALS_RANKID")


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise an MPI process inside a PBS job."""
    job = text(env, "PBS_JOBID")
    rank = next((name for name in _RANKS if text(env, name)), "")
    if not (job and text(env, "PBS_NODEFILE") and rank):
        return None
    found = Detection(NAME, f"PBS_JOBID and PBS_NODEFILE are set by PBS, {rank} by its MPI", env)
    if rank == openmpi.MARK:
        openmpi.number(found)
    elif rank == mvapich.MARK:
        mvapich.number(found)
    else:
        # PALS gives no size; Cray's PMI does.
        mpich.number(found)
        found.take("rank", "PALS_RANKID", mpich.MARK)
        found.remedy = "load the MPI module that sets PMI_SIZE, or pass world_size="
    found.take("local_rank", "PALS_LOCAL_RANKID").take("local_world_size", "PALS_LOCAL_SIZE")
    found.take("node_rank", "PALS_NODEID")
    # One PBS job may run several mpiexecs: PALS and Open MPI identify this one.
    part = text(env, "PALS_APID") or text(env, "PMIX_NAMESPACE")
    found.call(f"pbs-{job}-{part}" if part else f"pbs-{job}", f"PBS_JOBID={job}" + (f" and {part}" if part else ""))
    return found.meet(lambda: _host(env))


def _host(env: Mapping[str, str]) -> tuple[str, str]:
    hosts = lines(env, "PBS_NODEFILE", "in the job script: export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)")
    return next(iter(hosts), ""), "the first line of PBS_NODEFILE"
