"""How a script or a function ended, written by the process itself for whoever reads it after its death.

Imports nothing that is slow: it stands in every worker before the script.
"""

from __future__ import annotations

import os

# Not from typing, which is not imported before the script (see `worker`); type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

__all__ = ["exited", "raised", "write"]

# The longest message and traceback that a record holds: beyond that it is data, not words.
_MOST_TEXT = 64 * 1024


def raised(problem: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Return the record of an exception that nobody caught, with its traceback from ``trace`` on."""
    import traceback

    text = "".join(traceback.format_exception(type(problem), problem, trace))
    found: dict[str, Any] = {
        "end": "raised",
        "kind": type(problem).__name__,
        "message": _words(problem)[:_MOST_TEXT],
        "traceback": text[-_MOST_TEXT:],
        "bases": [base.__name__ for base in type(problem).__mro__],
        # What a pool or a DataLoader passes on carries the traceback of the process that it came from.
        "remote": any(type(each).__name__.endswith("RemoteTraceback") for each in _chain(problem)),
    }
    if hasattr(problem, "diagnosis"):
        found |= {"slug": problem.slug, "ranks": list(problem.ranks)}  # type: ignore[attr-defined]  # an AllhandsError
    return found


def _words(problem: BaseException) -> str:
    try:
        return str(problem)
    except Exception:  # noqa: BLE001  # a __str__ that fails is the script's; the interpreter bears it too
        return "<exception str() failed>"


def _chain(problem: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while problem is not None and problem not in found:
        found.append(problem)
        problem = problem.__cause__ or problem.__context__
    return found


def exited(problem: SystemExit) -> dict[str, Any]:
    """Return the record of a call of sys.exit."""
    if problem.code is None or problem.code == 0:
        return {"end": "done"}
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    site = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    # Of `python -m` itself, which found no such module: no line of the user's.
    site = "" if site.startswith("<frozen runpy>") else site
    return {"end": "exit", "message": str(problem.code)[:_MOST_TEXT], "site": site}


def write(record: int, what: dict[str, Any], *, final: bool = True) -> None:
    """Put ``what`` into the descriptor ``record``; ``final`` adds the time, which is that of the end.

    What is not final must be short: it is written over, and nothing is cut off, because the number may by now be
    another file of a script that closed every descriptor.
    """
    import json
    import time

    said = {**what, "at_s": time.monotonic()} if final else what
    try:
        os.pwrite(record, json.dumps(said).encode(errors="replace"), 0)
    except OSError:
        # A script that closed every descriptor has taken its record with it; that is told as having left none.
        return
