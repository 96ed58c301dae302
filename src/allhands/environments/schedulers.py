"""LSF, Flux and PBS, and an allocation of a scheduler in which nothing was launched. Slurm is in `slurm`."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import AllhandsError, fail
from . import mpi, slurm
from .base import Detection, integer, lines, me, text

__all__ = ["detect_batch", "detect_flux", "detect_lsf", "detect_pbs"]


def detect_lsf(env: Mapping[str, str]) -> Detection | None:
    """Recognise a task that LSF's jsrun started."""
    if not text(env, "LSB_JOBID") or not text(env, "JSM_NAMESPACE_RANK"):
        return None
    found = Detection("lsf", "LSB_JOBID and JSM_NAMESPACE_RANK are set by jsrun", env)
    found.read(
        rank="JSM_NAMESPACE_RANK",
        world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_world_size="JSM_NAMESPACE_LOCAL_SIZE",
    )
    # Several jsruns may share a job; PMIx, if present, names each of them.
    _set_job(found, "LSB_JOBID", text(env, "PMIX_NAMESPACE"))
    return found.locate(lambda: _lsf_host(env)) if text(env, "LSB_DJOB_RANKFILE") else found.locate()


def _lsf_host(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the second line: the first is the launch node, where no rank runs."""
    hosts = lines(env, "LSB_DJOB_RANKFILE", "set MASTER_ADDR to the host of rank 0")
    return (hosts[1] if len(hosts) > 1 else ""), "the second line of LSB_DJOB_RANKFILE"


def detect_flux(env: Mapping[str, str]) -> Detection | None:
    """Recognise a task that Flux started."""
    if not text(env, "FLUX_TASK_RANK"):
        return None
    found = Detection("flux", "FLUX_TASK_RANK is set by Flux", env)
    found.read(rank="FLUX_TASK_RANK", world_size="FLUX_JOB_SIZE", local_rank="FLUX_TASK_LOCAL_ID")
    if text(env, "FLUX_JOB_NNODES") == "1":
        found.set("FLUX_JOB_NNODES=1", local_world_size=found.world_size)
    # Flux writes it in a base of its own (ƒ2Xk9), so it is used as a name only.
    if text(env, "FLUX_JOB_ID"):
        _set_job(found, "FLUX_JOB_ID")
    # Only the `flux` command knows the hosts, and starting it here would be too slow.
    found.reasons["coordinator"] = "flux gives no address; set MASTER_ADDR=$(flux hostlist -n 0 local)"
    return found.locate()


def detect_pbs(env: Mapping[str, str]) -> Detection | None:
    """Recognise an MPI process inside a PBS job, with or without PALS: MPI gives the ranks, PBS the hosts."""
    rank = next((name for name in (mpi.OPENMPI, mpi.MVAPICH, mpi.HYDRA, "PALS_RANKID") if text(env, name)), "")
    if not (text(env, "PBS_JOBID") and text(env, "PBS_NODEFILE") and rank):
        return None
    found = Detection("pbs", f"PBS_JOBID and PBS_NODEFILE are set by PBS, {rank} by its MPI", env)
    if rank in {mpi.OPENMPI, mpi.MVAPICH}:
        mpi.read_ranks(found, rank)
    else:
        # PALS gives no size; Cray's PMI does.
        mpi.read_ranks(found, mpi.HYDRA).read(rank=("PALS_RANKID", mpi.HYDRA))
        found.remedy = "load the MPI module that sets PMI_SIZE, or pass world_size="
    found.read(local_rank="PALS_LOCAL_RANKID", local_world_size="PALS_LOCAL_SIZE", node_rank="PALS_NODEID")
    # One PBS job may run several mpiexecs: PALS and Open MPI identify this one.
    _set_job(found, "PBS_JOBID", text(env, "PALS_APID") or text(env, "PMIX_NAMESPACE"))
    return found.locate(lambda: _pbs_host(env))


def _pbs_host(env: Mapping[str, str]) -> tuple[str, str]:
    hosts = lines(env, "PBS_NODEFILE", "in the job script: export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)")
    return next(iter(hosts), ""), "the first line of PBS_NODEFILE"


def _set_job(found: Detection, variable: str, part: str = "") -> None:
    """Name the job after the scheduler's name in ``variable``, and the ``part`` of it to which the process belongs."""
    job = text(found.env, variable)
    why, name = f"{variable}={job}", f"{found.source}-{job}"
    found.set(f"{why} and {part}" if part else why, job=f"{name}-{part}" if part else name)


def detect_batch(env: Mapping[str, str]) -> Detection | None:
    """Raise not-launched in the one process of a batch script whose allocation is for several."""
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
            lacks = "no launcher gave this process a rank"
            raise _not_launched(f"{hosts} names {count} hosts", lacks, launcher, "one host")
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
