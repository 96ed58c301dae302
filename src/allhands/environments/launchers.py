"""allhands' own launcher, and those that set torch's variables (RANK, …): torchrun, Ray Train, any other (plain)."""

from __future__ import annotations

from collections.abc import Mapping

from .. import settings
from ..errors import fail
from .base import Detection, check_one_process, me, parse_address, text

__all__ = ["detect_allhands", "detect_plain", "detect_ray", "detect_torchrun", "read_ranks"]


def detect_allhands(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that allhands' launcher started."""
    marks = ("ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE", "ALLHANDS_COORDINATOR")
    mark = next((name for name in marks if text(env, name)), "")
    if not mark:
        return None
    found = Detection("allhands", f"{mark} is set by allhands' launcher", env, innermost=True)
    found.remedy = "start the script with allhands' launcher, which sets both; or unset every ALLHANDS_ variable"
    values = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
    found.read(**{value: f"ALLHANDS_{value.upper()}" for value in values})
    read = settings.read(env)
    if read.job:
        found.set("ALLHANDS_JOB and ALLHANDS_ATTEMPT", job=f"{read.job}-{read.attempt}")
    where = text(env, "ALLHANDS_COORDINATOR")
    why = f"ALLHANDS_COORDINATOR={where}"
    if not where:
        return found.locate()
    if where.startswith("unix:") and where != "unix:":
        found.reasons["coordinator"] = "none needed: the launcher's coordinator has a socket on this host"
        return found.set(why, socket=where.removeprefix("unix:"))
    if where.startswith("tcp://"):
        return found.set(why, coordinator=parse_address(where, why), hosted=True)
    raise fail(
        "invalid-argument",
        f"{why} is not an address",
        who=me(),
        why="it must be tcp://HOST:PORT or unix:NAME",
        fix="leave this variable to allhands' launcher",
    )


def read_ranks(found: Detection, *node_rank: str) -> Detection:
    """Read rank and sizes from torch's variables, and the node's number from the first of ``node_rank`` that is set."""
    found.read(rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK", local_world_size="LOCAL_WORLD_SIZE")
    return found.read(node_rank=node_rank)


def detect_torchrun(env: Mapping[str, str]) -> Detection | None:
    """Recognise a worker of torchrun or another launcher built on torch elastic, also inside Slurm or MPI."""
    run = text(env, "TORCHELASTIC_RUN_ID")
    if not run:
        return None
    found = Detection("torchrun", f"TORCHELASTIC_RUN_ID={run} is set by torchrun's agent", env, innermost=True)
    found.remedy = "torchrun sets both: start the script with torchrun, or unset TORCHELASTIC_RUN_ID"
    read_ranks(found, "GROUP_RANK")
    if run == "none":
        # torchrun's default id: every such job has it, so the address must distinguish them.
        run = f"none-{text(env, 'MASTER_ADDR')}:{text(env, 'MASTER_PORT')}"
    attempt = text(env, "TORCHELASTIC_RESTART_COUNT") or "0"
    why = f"TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT={attempt}"
    found.set(why, job=f"torchrun-{run}-{attempt}").locate()
    shared = text(env, "TORCHELASTIC_USE_AGENT_STORE")
    if shared.lower() in {"true", "1"} and found.coordinator is not None:
        found.set(f"TORCHELASTIC_USE_AGENT_STORE={shared}", agent_store=True)
    return found


def detect_ray(env: Mapping[str, str]) -> Detection | None:
    """Recognise a worker of Ray Train. A Ray task or actor that is not one has no RANK."""
    mark = next((name for name in ("RAY_JOB_ID", "RAY_RAYLET_PID") if text(env, name)), "")
    if not mark or not text(env, "RANK") or not text(env, "NODE_RANK"):
        return None
    found = read_ranks(Detection("ray", f"{mark} is set by Ray, RANK and NODE_RANK by Ray Train", env), "NODE_RANK")
    # One Ray job may run several trainings, so the job's id alone is no name; rank 0's address is.
    address = f"{text(env, 'MASTER_ADDR')}:{text(env, 'MASTER_PORT')}"
    if address != ":":
        found.set("RAY_JOB_ID, MASTER_ADDR and MASTER_PORT", job=f"ray-{text(env, 'RAY_JOB_ID')}-{address}")
    return found.locate()


def detect_plain(env: Mapping[str, str]) -> Detection | None:
    """Recognise torch's variables, also if only some of them are set, which is then an error."""
    there = [name for name in ("RANK", "WORLD_SIZE") if text(env, name)]
    if not there:
        return None
    if "RANK" in there and not text(env, "LOCAL_RANK"):
        where = "without LOCAL_RANK or torchrun, RANK is usually the node's number (Vertex AI, PyTorchJob, PAI)"
        check_one_process(env, f"RANK={text(env, 'RANK')}", where)
    found = Detection("plain", f"{' and '.join(there)} {'are' if len(there) > 1 else 'is'} set", env)
    return read_ranks(found, "GROUP_RANK", "NODE_RANK").locate()
