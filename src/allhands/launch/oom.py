"""Whether the kernel's out-of-memory killer ended a process: from control groups and the kernel's log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Memory", "counter", "limit", "victim"]

_GROUPS = Path("/sys/fs/cgroup")

# The kernel's words, of every version since 2.6: "Out of memory: Killed process 12 (python) total-vm:…", and the same
# with "Memory cgroup out of memory:".
_KILLED = re.compile(
    r"(?:out of memory|oom-kill|oom_reaper).*?(?:Kill(?:ed)? process|task=\S+,pid=|reaped process) ?(\d+)",
    re.IGNORECASE,
)

# One record of the kernel's log is shorter than this.
_RECORD = 8192


class Memory:
    """Counts the kills in this process's control group from now on; workers are in the same, unless they move."""

    def __init__(self) -> None:
        self._group = _own_group()
        self._before = counter(self._group) if self._group is not None else 0
        self._after = self._before

    def look(self, _: int) -> None:
        """A worker ended: read the counter before others move it."""
        if self._group is not None:
            self._after = counter(self._group)

    def killed(self, pid: int) -> str:
        """Return the evidence that ``pid``, which died of SIGKILL, was killed for memory; "" where there is none."""
        said = victim(pid, _kernel_log())
        if said:
            return f"the kernel's log says so: {said} (observed)"
        if self._group is not None and self._after > self._before:
            most = limit(self._group)
            bound = f", whose limit is {most / 2**20:.0f} MiB" if most is not None else ""
            return (
                f"probably: the kernel counted {self._after - self._before} out-of-memory kill(s) meanwhile in the "
                f"control group {self._group}{bound}"
            )
        return ""


def victim(pid: int, log: Iterable[str]) -> str:
    """Return the last line of the kernel's log that says it killed ``pid`` for memory; "" where none does."""
    found = ""
    for line in log:
        match = _KILLED.search(line)
        if match is not None and int(match[1]) == pid:
            found = line.strip()
    return found


def counter(group: Path) -> int:
    """Return how many processes the kernel has killed for memory in a control group (of either version)."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            text = (group / name).read_text(encoding="ascii")
        except OSError:
            continue
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def limit(group: Path) -> int | None:
    """Return how many bytes a control group may use, None where there is no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (group / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 writes "no limit" as the largest multiple of a page.
        return int(text) if text.isdecimal() and int(text) < 1 << 62 else None
    return None


def _own_group() -> Path | None:
    """Return the folder of this process's control group for memory, of version 2 or 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            base = _GROUPS / "memory"
        elif not controllers:
            base = _GROUPS
        else:
            continue
        # In a container the path may be the host's; what is mounted is then the container's own group.
        for folder in (base / path.lstrip("/"), base):
            if (folder / "memory.events").exists() or (folder / "memory.oom_control").exists():
                return folder
    return None


def _kernel_log() -> list[str]:
    """Return the kernel's log, [] where this user may not read it."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    found: list[str] = []
    try:
        while True:
            try:
                record = os.read(log, _RECORD).decode(errors="replace")
            except BrokenPipeError:
                continue  # Overwritten while we read; the next read goes on with the oldest that is left.
            # "priority,number,microseconds,-;message"
            found.append(record.partition(";")[2].partition("\n")[0])
    except OSError:
        return found
    finally:
        os.close(log)
