"""Who else belongs to the job: everything that descends from the agent, or carries the job's mark. Read from /proc.

Imports nothing that is slow: the guard, which needs it, is forked before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

__all__ = ["command", "descendants", "holding", "kill", "marked", "running", "variable"]


def _pids() -> Iterator[int]:
    """Yield every process that there is."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield int(entry.name)


def _read(pid: int, what: str) -> bytes:
    """Return a file of the process's folder; raise OSError where it ended, or is another user's."""
    with open(f"/proc/{pid}/{what}", "rb") as file:  # noqa: PTH123  # pathlib is not imported for this
        return file.read()


def _stat(pid: int) -> list[str]:
    """Return the fields after its name, which may itself hold blanks and brackets: state, parent, ..."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def descendants(root: int, but: Iterable[int] = ()) -> list[int]:
    """Return the living processes below ``root``, without those in ``but`` and what is below them.

    A process whose parent ends while this looks may be missed: ask twice before nobody is taken to be there.
    """
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError):  # it ended while we looked
            state, parent, *_ = _stat(pid)
            children.setdefault(int(parent), []).append(pid)
            if state not in {"Z", "X"}:
                alive.add(pid)
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
        environment = _read(pid, "environ").split(b"\0")
    except OSError:
        return ""
    begin = f"{name}=".encode()
    return next((each[len(begin) :].decode(errors="replace") for each in environment if each.startswith(begin)), "")


def marked(name: str, value: str) -> list[int]:
    """Return the processes whose environment says ``name=value``, this one excepted."""
    return [pid for pid in _pids() if pid != os.getpid() and variable(pid, name) == value]


def holding(name: str) -> list[int]:
    """Return the processes that have the memfd ``name`` open, this one excepted: whoever was forked from its holder."""
    target, found = f"/memfd:{name} (deleted)", []
    for pid in _pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # ended, or another user's
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) == target:  # noqa: PTH115
                        found.append(pid)
                        break
    return found


def running(pid: int) -> bool:
    """Tell whether ``pid`` is there, and not only its remains."""
    try:
        return _stat(pid)[0] not in {"Z", "X"}
    except OSError:
        return False


def command(pid: int) -> str:
    """Return the command line of ``pid``, for people."""
    try:
        return _read(pid, "cmdline").decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def kill(pids: Iterable[int], number: int) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
