"""Who else belongs to the job: everything that descends from the agent, or carries the job's mark. Read from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["command", "descendants", "holding", "kill", "marked", "running", "variable"]

_PROC = Path("/proc")


def descendants(root: int, but: Iterable[int] = ()) -> list[int]:
    """Return the living processes below ``root``, without those in ``but`` and what is below them.

    A process whose parent ends while this looks may be missed: ask twice before nobody is taken to be there.
    """
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError):  # it ended while we looked
            # The command name before the fields may hold blanks and brackets.
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            state, parent, *_ = text.split()
            children.setdefault(int(parent), []).append(int(folder.name))
            if state not in {"Z", "X"}:
                alive.add(int(folder.name))
    found: list[int] = []
    left, skipped = [root], set(but)
    while left:
        below = [pid for pid in children.get(left.pop(), []) if pid not in skipped]
        found += below
        left += below
    return [pid for pid in found if pid in alive]


def variable(pid: int, name: str) -> str:
    """Return what ``name`` was in the environment that ``pid`` was started with; "" where that cannot be read."""
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    begin = f"{name}=".encode()
    return next((each[len(begin) :].decode(errors="replace") for each in environment if each.startswith(begin)), "")


def marked(name: str, value: str) -> list[int]:
    """Return the processes whose environment says ``name=value``, this one excepted."""
    numbers = [int(folder.name) for folder in _PROC.iterdir() if folder.name.isdecimal()]
    return [pid for pid in numbers if pid != os.getpid() and variable(pid, name) == value]


def holding(name: str) -> list[int]:
    """Return the processes that have the memfd ``name`` open, this one excepted: whoever was forked from its holder."""
    target, found = f"/memfd:{name} (deleted)", []
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked, or is another user's
            for entry in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()) == target:
                        found.append(int(folder.name))
                        break
    return found


def running(pid: int) -> bool:
    """Tell whether ``pid`` is there, and not only its remains."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in {"Z", "X"}


def command(pid: int) -> str:
    """Return the command line of ``pid``, for people."""
    try:
        return (_PROC / str(pid) / "cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def kill(pids: Iterable[int], number: int) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
