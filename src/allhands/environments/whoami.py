"""`allhands whoami`: rank, world size and address of this process with their sources, as data and as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, title
from ..errors import AllhandsError
from .identify import identify, survey
from .world import World

__all__ = ["render", "report"]

_VALUES = [name for name in World._fields if name not in {"source", "reasons"}]
_NOT_GIVEN = "not given"


def report(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return each value with its source, and the result of every environment; never raises.

    The result is plain data for JSON. `exit_code` is 1 if the world cannot be determined, and `error` is the diagnosis.
    """
    source = os.environ if env is None else env
    made: dict[str, Any] = {"exit_code": 0, "source": None, "world": {}, "error": None}
    try:
        world = identify(source)
    except AllhandsError as error:
        made |= {"exit_code": 1, "error": msgspec.to_builtins(error.diagnosis)}
    else:
        values = {**world._asdict(), "coordinator": world.coordinator and str(world.coordinator)}
        made["source"] = world.source
        made["world"] = {
            name: {"value": values[name], "reason": world.reasons.get(name, _NOT_GIVEN)} for name in _VALUES
        }
    made["survey"] = [
        {
            "name": found.name,
            "recognised": found.recognised,
            "believed": found.name == made["source"],
            "reason": found.reason,
            "error": None if found.error is None else msgspec.to_builtins(found.error.diagnosis),
        }
        for found in survey(source)
    ]
    return made


def render(report: Mapping[str, Any]) -> str:
    """Return a report as aligned lines of text."""
    error = report["error"]
    if error is not None:
        lines = [msgspec.convert(error, Diagnosis).render(title(error["slug"]))]
    else:
        # Values without value and reason are left out.
        rows = [
            (name, "-" if found["value"] is None else str(found["value"]), found["reason"])
            for name, found in report["world"].items()
            if found["reason"] != _NOT_GIVEN
        ]
        lines = _table([("source", str(report["source"]), ""), *rows])
    lines += ["", "environments, in order of precedence:"]
    states = [
        (found["name"], "believed" if found["believed"] else "yes" if found["recognised"] else "no", found["reason"])
        for found in report["survey"]
    ]
    return "\n".join([*lines, *(f"  {line}" for line in _table(states))])


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:{first}}  {value:{second}}  {reason}".rstrip() for name, value, reason in rows]
