"""allhands' own launcher: `ALLHANDS_RANK` and its companions (`settings.TABLE` lists them)."""

from __future__ import annotations

from collections.abc import Mapping

from .. import settings
from ..errors import fail
from .base import Detection, me, parse_address, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "allhands"
MARK = "ALLHANDS_RANK, ALLHANDS_WORLD_SIZE"
_MARKS = ("ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE", "ALLHANDS_COORDINATOR")


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that allhands' launcher started."""
    there = [name for name in _MARKS if text(env, name)]
    if not there:
        return None
    found = Detection(NAME, f"{there[0]} is set by allhands' launcher", env, innermost=True)
    found.remedy = "start the script with allhands' launcher, which sets both; or unset every ALLHANDS_ variable"
    found.take("rank", "ALLHANDS_RANK").take("world_size", "ALLHANDS_WORLD_SIZE")
    found.take("local_rank", "ALLHANDS_LOCAL_RANK").take("local_world_size", "ALLHANDS_LOCAL_WORLD_SIZE")
    found.take("node_rank", "ALLHANDS_NODE_RANK")
    read = settings.read(env)
    if read.job:
        found.call(f"{read.job}-{read.attempt}", "ALLHANDS_JOB and ALLHANDS_ATTEMPT")
    return _coordinator(found, text(env, "ALLHANDS_COORDINATOR"))


def _coordinator(found: Detection, where: str) -> Detection:
    why = f"ALLHANDS_COORDINATOR={where}"
    if not where:
        return found.meet()
    if where.startswith("unix:") and where != "unix:":
        found.reasons["coordinator"] = "none needed: the launcher's coordinator has a socket on this host"
        return found.say("socket", where.removeprefix("unix:"), why)
    if where.startswith("tcp://"):
        return found.say("coordinator", parse_address(where, why), why).say("hosted", True, why)
    raise fail(
        "invalid-argument",
        f"{why} is not an address",
        who=me(),
        why="it must be tcp://HOST:PORT or unix:NAME",
        fix="leave this variable to allhands' launcher",
    )
