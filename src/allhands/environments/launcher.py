"""allhands' own launcher: `ALLHANDS_RANK` and its companions (`settings.TABLE` lists them)."""

from __future__ import annotations

from collections.abc import Mapping

from .. import settings
from ..errors import fail
from .base import Detection, me, parse_address, text

__all__ = ["NAME", "detect_launcher"]

NAME = "allhands"


def detect_launcher(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that allhands' launcher started."""
    marks = ("ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE", "ALLHANDS_COORDINATOR")
    mark = next((name for name in marks if text(env, name)), "")
    if not mark:
        return None
    found = Detection(NAME, f"{mark} is set by allhands' launcher", env, innermost=True)
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
