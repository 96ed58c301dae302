"""A task that srun started (a Slurm step)."""

from __future__ import annotations

from collections.abc import Mapping

from . import hostlist
from .base import Detection, lines, port, text

__all__ = ["MARK", "NAME", "detect", "head", "in_step"]

NAME = "slurm"
MARK = "SLURM_STEP_NODELIST and SLURM_PROCID, as srun sets them"

# The batch script and the shell of an interactive job are steps too, but not ones that srun's tasks are in.
# SLURM_BATCH_SCRIPT and SLURM_INTERACTIVE_STEP of Slurm's headers, unsigned and signed.
_NOT_LAUNCHED = {"4294967291", "4294967290", "-5", "-6"}


def _first(env: Mapping[str, str], *names: str) -> str:
    return next((text(env, name) for name in names if text(env, name)), "")


def in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than sbatch, salloc or nobody."""
    step = _first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return bool(text(env, "SLURM_STEP_NODELIST") and text(env, "SLURM_PROCID")) and step not in _NOT_LAUNCHED


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a task of a Slurm step."""
    if not in_step(env):
        return None
    found = Detection(NAME, "SLURM_STEP_NODELIST and SLURM_PROCID are set by srun", env)
    found.take("rank", "SLURM_PROCID").take("world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    found.take("local_rank", "SLURM_LOCALID").take("node_rank", "SLURM_NODEID")
    _local_size(found)
    job, step = _first(env, "SLURM_JOB_ID", "SLURM_JOBID"), _first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    if job:
        found.call(f"slurm-{job}.{step or '0'}", f"SLURM_JOB_ID={job} and SLURM_STEP_ID={step or '0'}")
    reserved = text(env, "SLURM_STEP_RESV_PORTS")
    if reserved:
        first = hostlist.expand(f"[{reserved}]")[0]
        why = f"SLURM_STEP_RESV_PORTS={reserved}"
        return found.meet(lambda: _host(env), port(int(first), why), why)
    return found.meet(lambda: _host(env))


def head(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the first host of the allocation (not of a step), "" where there is none."""
    hosts = hostlist.expand(text(env, "SLURM_JOB_NODELIST"))
    return next(iter(hosts), ""), "the first host of SLURM_JOB_NODELIST"


def _local_size(found: Detection) -> None:
    tasks, node = text(found.env, "SLURM_STEP_TASKS_PER_NODE"), found.node_rank
    if tasks and node is not None:
        per_node = hostlist.counts(tasks)
        if 0 <= node < len(per_node):
            found.say("local_world_size", per_node[node], f"SLURM_STEP_TASKS_PER_NODE={tasks}, node {node}")
    elif text(found.env, "SLURM_STEP_NUM_NODES") == "1":
        found.say("local_world_size", found.world_size, "SLURM_STEP_NUM_NODES=1")


def _host(env: Mapping[str, str]) -> tuple[str, str]:
    """Return where rank 0 is. Not SLURM_LAUNCH_NODE_IPADDR: that is where srun was typed."""
    if text(env, "SLURM_DISTRIBUTION").startswith("arbitrary"):
        # The node list is sorted then; the tasks follow the order that the user wrote.
        listed = text(env, "SLURM_ARBITRARY_NODELIST")
        if text(env, "SLURM_HOSTFILE"):
            fix = "put the file where every node can read it, or set MASTER_ADDR to its first host"
            listed = " ".join(lines(env, "SLURM_HOSTFILE", fix))
            return next(iter(hostlist.expand(listed)), ""), "the first host of SLURM_HOSTFILE"
        if listed:
            return hostlist.expand(listed)[0], "the first host of SLURM_ARBITRARY_NODELIST"
        # srun -m arbitrary -w n2,n1 sets neither: where rank 0 is, the task is not told.
        return "", ""
    hosts = hostlist.expand(text(env, "SLURM_STEP_NODELIST"))
    return next(iter(hosts), ""), "the first host of SLURM_STEP_NODELIST"
