"""The launch environment: who this process would be, what contradicts it, and what cannot work on several machines."""

from __future__ import annotations

from ..control.bind import is_loopback
from ..diagnosis import join
from .finding import Finding, green, of, red, yellow
from .request import Case

__all__ = ["check"]

_SECTION = "environment"


def check(case: Case) -> list[Finding]:
    """Say what `whoami` says, and more of what is wrong with it."""
    if case.trouble is not None:
        return [of(_SECTION, "whoami", "red", case.trouble.diagnosis, commands=("allhands whoami",))]
    world = case.world
    if world is None:
        return []
    who = f"rank {world.rank} of {world.world_size} ({world.source})" if world.source != "alone" else "started alone"
    place = f", coordinator at {world.coordinator}" if world.coordinator is not None else ""
    found = [green(_SECTION, "whoami", f"{who}{place}", source=world.source)]
    found += _loopback(case)
    found += _debug(case)
    return found


def _loopback(case: Case) -> list[Finding]:
    world = case.world
    if world is None or world.coordinator is None or not case.nodes:
        return []
    host = world.coordinator.host
    places = [each for _, each in case.places] if case.target == world.coordinator else []
    if not is_loopback(host) and not (places and all(is_loopback(each) for each in places)):
        return []
    leads = "" if is_loopback(host) else f" leads to {join(places)}, which"
    return [
        red(
            _SECTION,
            "master-address",
            "loopback-advertised",
            f"the coordinator's address {world.coordinator}{leads} is loopback on each machine, but there are several",
            why=f"{case.nodes}; {world.reasons.get('coordinator', '')}",
            fix="set MASTER_ADDR on every machine to a name or address of rank 0's machine that the others can reach",
            commands=("export MASTER_ADDR=$(hostname -I | cut -d' ' -f1)   # as printed on rank 0's machine",),
        )
    ]


# What makes runs slow or short and is easily forgotten. Value "" is any.
_FORGOTTEN = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of one machine do not reach each other directly"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of one machine talk over the network"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another"),
}


def _debug(case: Case) -> list[Finding]:
    left = [
        f"{name}={case.env[name]} ({what})"
        for name, (value, what) in _FORGOTTEN.items()
        if case.env.get(name, "").strip().upper() == value
    ]
    if not left:
        return []
    names = " ".join(part.partition("=")[0] for part in left)
    return [
        yellow(
            _SECTION,
            "debugging",
            "debugging-left",
            f"set for debugging: {join(left)}",
            why="these are in the environment that a job started here would inherit",
            fix="unset them, unless you are looking for a fault with them",
            commands=(f"unset {names}",),
        )
    ]
