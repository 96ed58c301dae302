"""Checks of the launch environment: contradictions, loopback addresses of several machines, debugging variables."""

from __future__ import annotations

from collections.abc import Iterator

from ..control.bind import is_loopback
from ..diagnosis import join
from .finding import Finding, Section
from .request import Request

__all__ = ["check"]

_ENVIRONMENT = Section("environment")


# Variables for debugging that slow a job down, with the value that does so and its effect.
_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of one machine do not reach each other directly"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of one machine communicate over the network"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another"),
}


def check(request: Request) -> Iterator[Finding]:
    """Report the result of `allhands whoami`, and variables that cannot work or slow the job down."""
    if request.world_error is not None:
        yield _ENVIRONMENT.of("whoami", "red", request.world_error.diagnosis, commands=("allhands whoami",))
    world = request.world
    if world is None:
        return
    who = f"rank {world.rank} of {world.world_size} ({world.source})" if world.source != "alone" else "started alone"
    place = f", coordinator at {world.coordinator}" if world.coordinator is not None else ""
    yield _ENVIRONMENT.green("whoami", f"{who}{place}", source=world.source)
    if world.coordinator is not None and request.nodes:
        local = is_loopback(world.coordinator.host)
        places = [each for _, each in request.places] if request.target == world.coordinator else []
        if local or (places and all(is_loopback(each) for each in places)):
            resolves = "" if local else f" resolves to {join(places)}, which"
            yield _ENVIRONMENT.red(
                "master-address",
                "loopback-advertised",
                f"the coordinator's address {world.coordinator}{resolves} is loopback, but there are several machines",
                why=f"{request.nodes}; {world.reasons.get('coordinator', '')}",
                fix="set MASTER_ADDR on every machine to a name or address of rank 0's machine that the others can "
                "reach",
                commands=("export MASTER_ADDR=$(hostname -I | cut -d' ' -f1)   # as printed on rank 0's machine",),
            )
    left = {
        name: f"{name}={request.env[name]} ({effect})"
        for name, (value, effect) in _DEBUGGING.items()
        if request.env.get(name, "").strip().upper() == value
    }
    if left:
        yield _ENVIRONMENT.yellow(
            "debugging",
            "debugging-left",
            f"set for debugging: {join(list(left.values()))}",
            why="these are in the environment that a job started here would inherit",
            fix="unset them, unless you debug with them",
            commands=(f"unset {' '.join(left)}",),
        )
