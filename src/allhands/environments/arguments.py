"""Explicit arguments: what the caller gives goes before everything that the environment says."""

from __future__ import annotations

from ..errors import fail
from .address import parse
from .base import Detection, me
from .world import Address

__all__ = ["NAME", "address", "apply"]

NAME = "arguments"
_LOCAL = ("local_rank", "local_world_size", "node_rank")


def address(given: Address | str) -> Address:
    """Return the coordinator's address that the caller gave, also as "HOST:PORT"."""
    return parse(given, f"coordinator={given!r}") if isinstance(given, str) else given


def apply(
    found: Detection,
    rank: int | None,
    world_size: int | None,
    coordinator: Address | None,
) -> Detection:
    """Lay the caller's arguments over what was ``found``, and return it."""
    changed = False
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is None:
            continue
        changed |= getattr(found, name) not in (None, _whole(name, value))
        found.say(name, value, f"the argument {name}={value}")
    if changed:
        # What the environment says about this node speaks of its own processes, which are other ones.
        for name in _LOCAL:
            if getattr(found, name) is not None:
                found.say(name, None, f"{found.source} numbers other processes than the arguments")
        if found.coordinator is None:
            found.reasons.pop("coordinator", None)
    if rank is not None and world_size is not None:
        found.source = NAME
    if coordinator is not None:
        found.say("coordinator", coordinator, f"the argument coordinator={coordinator}")
        found.agent_store, found.hosted, found.socket = False, False, ""
        found.reasons.pop("socket", None)
    return found


def _whole(name: str, value: object) -> int:
    # bool is an int to Python, but rank=True is a slip of the pen.
    if isinstance(value, bool) or not isinstance(value, int):
        raise fail(
            "invalid-argument",
            f"{name}={value!r} is not a whole number",
            who=me(),
            fix=f"give {name} as an int",
        )
    return value
