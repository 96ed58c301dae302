"""Ending every process of a job: when which signal is due, which processes belong to the job, and the watchdog.

Imports nothing slow: the watchdog is forked before the workers start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator

__all__ = [
    "EXPLAIN_S",
    "LEFTOVER_S",
    "Termination",
    "Watchdog",
    "command_line",
    "descendants",
    "environment_variable",
    "holders_of_memfd",
    "send_signal",
    "with_variable",
]

# Time for the other ranks to exit by themselves after the first failure. The failed group reaches them in about 0.1 s;
# then they raise, print, and finalize an interpreter that has torch loaded, on a machine that may be busy.
EXPLAIN_S = 2.0

# Time for processes that outlive the workers, which may still be writing a file.
LEFTOVER_S = 1.0

# How long the watchdog continues to search after it has found nothing (a process may have been starting when the agent
# died), and the longest that it searches in all, should processes be started faster than it kills them.
_QUIET_S, _SWEEP_S = 0.5, 5.0
_POLL_S = 0.05


class Termination:
    """Which signal is due at which time as a job ends. Pure: the caller passes the time and sends the signal."""

    def __init__(self, grace_s: float, *, first_signal: int = signal.SIGTERM) -> None:
        """``grace_s`` is the time from ``first_signal`` to SIGKILL."""
        self._grace_s = grace_s
        self._first_signal = first_signal
        # When each is due; None before it is scheduled, and once the first one was returned.
        self._first_s: float | None = None
        self.kill_s: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the job is ending."""
        return self._first_s is not None or self.kill_s is not None

    def begin(self, now: float, wait_s: float = EXPLAIN_S) -> None:
        """Schedule the first signal in ``wait_s``, unless the job is ending already."""
        if not self.begun:
            self._first_s = now + wait_s

    def request(self, now: float, number: int) -> None:
        """Forward the signal ``number`` of a user or scheduler now; a second request makes SIGKILL due."""
        if self.kill_s is not None:
            self.kill_s = now
            return
        self._first_signal, self._first_s = number, now

    def due(self, now: float) -> int:
        """Return the signal to send now, 0 for none: the first signal once, later SIGKILL at every call."""
        if self._first_s is not None and now >= self._first_s:
            self._first_s, self.kill_s = None, now + self._grace_s
            return int(self._first_signal)
        if self.kill_s is not None and now >= self.kill_s:
            return int(signal.SIGKILL)
        return 0


# Processes in /proc -----------------------------------------------------------------------------------------------


def descendants(root: int, excluded: Iterable[int] = ()) -> list[int]:
    """Return the living processes below ``root``, without those in ``excluded`` and their descendants.

    A process whose parent exits during the scan may be missed: call it twice before concluding that none is left.
    """
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError):  # it ended during the scan
            state, parent, *_ = _stat(pid)
            children.setdefault(int(parent), []).append(pid)
            if state not in {"Z", "X"}:
                alive.add(pid)
    found: list[int] = []
    left, skipped = [root], set(excluded)
    while left:
        below = [pid for pid in children.get(left.pop(), []) if pid not in skipped]
        found += below
        left += below
    return [pid for pid in found if pid in alive]


def environment_variable(pid: int, name: str) -> str:
    """Return ``name`` in the environment that ``pid`` was started with; "" where that cannot be read."""
    try:
        environment = _read(pid, "environ").split(b"\0")
    except OSError:
        return ""
    begin = f"{name}=".encode()
    return next((each[len(begin) :].decode(errors="replace") for each in environment if each.startswith(begin)), "")


def with_variable(name: str, value: str) -> list[int]:
    """Return the processes, this one excepted, that were started with ``name=value`` in their environment."""
    return [pid for pid in _pids() if pid != os.getpid() and environment_variable(pid, name) == value]


def holders_of_memfd(name: str) -> list[int]:
    """Return the processes, this one excepted, that have the memfd ``name`` open: forks of its owner inherit it."""
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


def command_line(pid: int) -> str:
    """Return the command line of ``pid``; "" where it ended."""
    try:
        return _read(pid, "cmdline").decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _pids() -> Iterator[int]:
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield int(entry.name)


def _read(pid: int, name: str) -> bytes:
    """Return /proc/``pid``/``name``; raise OSError where the process ended or is another user's."""
    with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123  # pathlib is slow to import
        return file.read()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may itself hold spaces and brackets: state, parent."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


# The watchdog -----------------------------------------------------------------------------------------------------


class Watchdog:
    """A small process that kills the job's processes after an agent that was killed itself.

    Workers die with their agent (PR_SET_PDEATHSIG); what they started does not. The watchdog finds those processes by
    a variable that they inherited. Create it before any thread: it is a fork of the agent.
    """

    def __init__(self, name: str, value: str) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # Nothing may leave this branch: the frames below belong to the agent.
            try:
                _watch(reader, self._writer, name, value)
            finally:
                os._exit(0)
        os.close(reader)

    def dismiss(self) -> None:
        """End it: no process is left to kill."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writer, b".")
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _watch(reader: int, writer: int, name: str, value: str) -> None:
    # A session of its own: Ctrl-C and the closing of the terminal are for the agent.
    os.setsid()
    os.close(writer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # A reader of the agent's output must see its end while the watchdog lives.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if os.read(reader, 1):
        return
    begun = found_s = time.monotonic()
    while (now := time.monotonic()) - found_s < _QUIET_S and now - begun < _SWEEP_S:
        found = with_variable(name, value)
        send_signal(found, signal.SIGKILL)
        found_s = now if found else found_s
        time.sleep(_POLL_S)
