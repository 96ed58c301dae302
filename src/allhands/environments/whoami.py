"""`allhands whoami`: rank, world size and address of this process with their sources, as data and as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, title
from ..errors import AllhandsError
from .identify import Finding, identify, survey
from .world import World

__all__ = ["render", "report"]

_VALUES = (
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "node_rank",
    "coordinator",
    "job",
    "late_names",
    "agent_store",
    "hosted",
    "socket",
)
_NOT_GIVEN = "not given"


def report(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return each value with its source, and the result of every environment; never raises.

    The result is plain data for JSON. `exit_code` is 1 if the world cannot be determined, and `error` is the diagnosis.
    """
    source = os.environ if env is None else env
    try:
        world = identify(source)
    except AllhandsError as error:
        return {"exit_code": 1, "source": None, "world": {}, "error": _error(error), "survey": _survey(source, "")}
    reasons = {name: {"value": _plain(world, name), "reason": world.reasons.get(name, _NOT_GIVEN)} for name in _VALUES}
    return {
        "exit_code": 0,
        "source": world.source,
        "world": reasons,
        "error": None,
        "survey": _survey(source, world.source),
    }


def render(report: Mapping[str, Any]) -> str:
    """Return a report as aligned lines of text."""
    error = report["error"]
    if error is not None:
        lines = [msgspec.convert(error, Diagnosis).render(title(error["slug"]))]
    else:
        lines = _table([("source", str(report["source"]), ""), *_rows(report["world"])])
    lines += ["", "environments, in order of precedence:"]
    states = [
        (found["name"], "believed" if found["believed"] else "yes" if found["recognised"] else "no", found["reason"])
        for found in report["survey"]
    ]
    return "\n".join([*lines, *(f"  {line}" for line in _table(states))])


def _rows(world: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    # Values without value and reason are left out.
    return [
        (name, "-" if told["value"] is None else str(told["value"]), told["reason"])
        for name, told in world.items()
        if told["reason"] != _NOT_GIVEN
    ]


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:{first}}  {value:{second}}  {reason}".rstrip() for name, value, reason in rows]


def _plain(world: World, name: str) -> str | int | bool | None:
    value = getattr(world, name)
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _error(error: AllhandsError) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(error.diagnosis)
    return made


def _survey(env: Mapping[str, str], source: str) -> list[dict[str, Any]]:
    return [_finding(found, believed=found.name == source) for found in survey(env)]


def _finding(found: Finding, *, believed: bool) -> dict[str, Any]:
    return {
        "name": found.name,
        "recognised": found.recognised,
        "believed": believed,
        "reason": found.reason,
        "error": None if found.error is None else _error(found.error),
    }
