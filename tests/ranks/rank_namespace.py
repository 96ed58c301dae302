"""The namespace of the scripts of `harness`: rank, world size, and functions that report to the test.

Imported by a rank, never by a test.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["attempt", "children", "gate", "outcome", "rank", "say", "size"]

rank = int(os.environ["RANKNO"])
size = int(os.environ["RANKS"])

# A gate that never opens is a rank that died; the harness's own deadline is longer.
_GATE_S = 50.0


def say(**what: Any) -> None:
    """Tell the test; every line carries the wall clock, so that ranks can be compared."""
    # One write, so that lines of threads do not mix.
    sys.stdout.write(json.dumps({"at": time.time(), **what}, default=str) + "\n")
    sys.stdout.flush()


def gate(name: str, everyone: int = size) -> None:
    """Wait until every rank is here. Uses files, so that the code under test is not involved."""
    folder = Path(os.environ["GATES"])
    (folder / f"{name}.{rank}").touch()
    deadline = time.monotonic() + _GATE_S
    # Not by pathlib: the call site of a waiting rank must be in this file.
    while sum(each.startswith(f"{name}.") for each in os.listdir(folder)) < everyone:  # noqa: PTH208  # see above
        if time.monotonic() > deadline:
            raise SystemExit(f"gate {name} stayed shut")
        time.sleep(0.005)


def outcome(problem: BaseException) -> dict[str, Any]:
    """Return the attributes of an exception that tests compare."""
    found: dict[str, Any] = {
        "kind": type(problem).__name__,
        "bases": [base.__name__ for base in type(problem).__mro__],
        "text": str(problem),
    }
    for name in ("slug", "ranks", "hosts"):
        if hasattr(problem, name):
            found[name] = getattr(problem, name)
    diagnosis = getattr(problem, "diagnosis", None)
    if diagnosis is not None:
        found["certain"] = diagnosis.certain
        found["fix"] = diagnosis.fix
        found["traceback"] = diagnosis.traceback
    return found


def attempt(call: Callable[..., Any], *args: Any, **kw: Any) -> dict[str, Any]:
    """Call, and report the outcome, the duration and the end (wall clock)."""
    started = time.monotonic()
    found: dict[str, Any] = {"kind": ""}
    try:
        call(*args, **kw)
    except Exception as problem:  # noqa: BLE001  # returned to the test
        found = outcome(problem)
    return {**found, "seconds": time.monotonic() - started, "over": time.time()}


def children() -> list[int]:
    """Return the pids of this process's living children."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        # A thread that has ended meanwhile, or a child.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(pid))
    return found
