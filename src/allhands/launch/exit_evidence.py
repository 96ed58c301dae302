"""The evidence of a rank's end: exit status, exit record, flight recorder, fatal stack, and the kernel's OOM log.

Imports nothing slow: workers start before anything slow is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ..observe import flight_recorder

# Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .verdict import Outcome

__all__ = ["ExitEvidence", "OomMonitor", "find_oom_kill", "memory_limit", "oom_kill_count"]

# A record and a stack are a few KiB. The memory is writable by the user's code, so reads are bounded; the stacks of a
# node's workers are sent in one message of at most 64 MiB.
_MOST_RECORD_BYTES, _MOST_STACK_BYTES = 1 << 20, 1 << 18

_CGROUPS = "/sys/fs/cgroup"

# The kernel's messages since 2.6: "Out of memory: Killed process 12 (python) total-vm:...", and the same after "Memory
# cgroup out of memory:".
_OOM_MESSAGE = r"(?:out of memory|oom-kill|oom_reaper).*?(?:Kill(?:ed)? process|task=\S+,pid=|reaped process) ?(\d+)"

# No record of the kernel's log is longer.
_KMSG_BYTES = 8192


class ExitEvidence:
    """A rank's process as its parent sees it: a worker of the agent, or a rank of `spawn`."""

    def __init__(self, rank: int, record_name: str = "allhands-record") -> None:
        """``record_name`` names the memfd of the exit record, by which forks of the process can be found."""
        self.rank = rank
        self.pid = 0
        # Exit status, or the negative of a signal; None while the end was not seen.
        self.status: int | None = None
        # The signal that the launcher sent to end it; 0 for none.
        self.sent, self.sent_s = 0, 0.0
        self.started_s = self.ended_s = 0.0
        self._recorder = flight_recorder.make()
        self._record, self._fatal = (os.memfd_create(name, os.MFD_CLOEXEC) for name in (record_name, "allhands-fatal"))
        # Subclasses add theirs.
        self._descriptors = [self._recorder, self._record, self._fatal]

    @property
    def failed(self) -> bool:
        """Whether it ended with a status other than 0."""
        return self.status is not None and self.status != 0

    def record(self) -> dict[str, Any]:
        """Return the exit record that the process wrote (see `worker`); {} where it wrote none."""
        import json

        try:
            found = json.loads(self._text(self._record, _MOST_RECORD_BYTES) or "{}")
        except json.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}

    def recording(self) -> flight_recorder.FlightRecorder | None:
        """Return its flight recorder; None where it made no call."""
        try:
            found = flight_recorder.parse(self.pid, self._recorder)
        except LookupError:
            return None
        return found if found.entries else None

    def outcome(self, oom: OomMonitor, node: int | None = None) -> Outcome:
        """Return everything known of its end."""
        import socket

        from .verdict import Outcome

        status = self.status if self.status is not None else -signal.SIGKILL
        return Outcome(
            rank=self.rank,
            host=socket.gethostname(),
            pid=self.pid,
            status=status,
            sent=self.sent,
            sent_s=self.sent_s,
            ended_s=self.ended_s,
            after_s=self.ended_s - self.started_s,
            record=self.record(),
            # Written by faulthandler at a fatal signal.
            stack=self._text(self._fatal),
            recording=self.recording(),
            oom=oom.explain(self.pid) if status == -signal.SIGKILL and not self.sent else "",
            node=node,
        )

    def _note_signal(self, number: int) -> None:
        if not self.sent:
            self.sent, self.sent_s = number, time.monotonic()

    def close(self) -> None:
        """Close the descriptors; no evidence can be read afterwards."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    @staticmethod
    def _text(descriptor: int, most: int = _MOST_STACK_BYTES) -> str:
        size = min(os.fstat(descriptor).st_size, most)
        return os.pread(descriptor, size, 0).decode(errors="replace")


# The out-of-memory killer -----------------------------------------------------------------------------------------


class OomMonitor:
    """Counts OOM kills in this process's control group from now on. Workers are in the same group unless they move."""

    def __init__(self) -> None:
        self._group = _own_cgroup()
        self._before = oom_kill_count(self._group)

    def explain(self, pid: int) -> str:
        """Return the evidence that ``pid``, which died of SIGKILL, was killed for memory; "" where there is none."""
        message = find_oom_kill(pid, _kernel_log())
        if message:
            return f"the kernel's log reports it: {message} (observed)"
        kills = oom_kill_count(self._group) - self._before
        if kills > 0:
            limit = memory_limit(self._group)
            bound = f", whose limit is {limit / 2**20:.0f} MiB" if limit is not None else ""
            return (
                f"probably: the kernel counted {kills} out-of-memory kill(s) meanwhile in the control group "
                f" {self._group}{bound}"
            )
        return ""


def find_oom_kill(pid: int, log: Iterable[str]) -> str:
    """Return the last line of the kernel's log that reports an OOM kill of ``pid``; "" where none does."""
    import re

    pattern = re.compile(_OOM_MESSAGE, re.IGNORECASE)
    found = ""
    for line in log:
        match = pattern.search(line)
        if match is not None and int(match[1]) == pid:
            found = line.strip()
    return found


def oom_kill_count(group: str) -> int:
    """Return the number of OOM kills in the control group at the path ``group``, of version 2 or 1."""
    for name in ("memory.events", "memory.oom_control"):
        for line in _lines(f"{group}/{name}"):
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def memory_limit(group: str) -> int | None:
    """Return how many bytes a control group may use; None where there is no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        for text in _lines(f"{group}/{name}"):
            # Version 1 writes "no limit" as the largest multiple of a page.
            return int(text) if text.isdecimal() and int(text) < 1 << 62 else None
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123  # pathlib is slow to import
            return file.read().splitlines()
    except OSError:
        return []


def _own_cgroup() -> str:
    """Return the directory of this process's control group for memory, of version 2 or 1; "" where there is none."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        base = f"{_CGROUPS}/memory" if controllers else _CGROUPS
        # In a container the path may be the host's; the mounted tree is then the container's own group.
        for group in (base + path.rstrip("/"), base):
            if _lines(f"{group}/memory.events") or _lines(f"{group}/memory.oom_control"):
                return group
    return ""


def _kernel_log() -> Iterator[str]:
    """Yield the lines of the kernel's log; none where this user may not read it."""
    with contextlib.suppress(OSError), open("/dev/kmsg", "rb", buffering=0) as log:  # noqa: PTH123  # as above
        os.set_blocking(log.fileno(), False)
        while True:
            # Overwritten during the read; the next read continues with the oldest one left.
            with contextlib.suppress(BrokenPipeError):
                record = log.read(_KMSG_BYTES)
                if record is None:
                    return
                # "priority,number,microseconds,-;message"
                yield record.decode(errors="replace").partition(";")[2].partition("\n")[0]
