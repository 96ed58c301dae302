"""One process of this machine as the kernel shows it: parent, age, environment, what it is waiting in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["Look", "look", "processes"]

_PROC = Path("/proc")

# Where the kernel says only the number of the call that a thread is in (x86-64 and arm64, <asm/unistd.h>): those in
# which threads wait.
_CALLS = {
    "x86_64": {
        0: "read", 7: "poll", 23: "select", 35: "nanosleep", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 202: "futex",
        230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait", 63: "read", 72: "pselect6", 73: "ppoll", 95: "waitid", 98: "futex", 101: "nanosleep",
        115: "clock_nanosleep", 207: "recvfrom", 212: "recvmsg", 260: "wait4",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """What /proc said about a process at one moment."""

    pid: int
    name: str
    state: str
    parent: int
    ticks: int
    started_ticks: int
    uid: int
    status: str

    @property
    def zombie(self) -> bool:
        """Whether only its remains are there."""
        return self.state in {"Z", "X"}

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state in {"T", "t"}

    @property
    def age_s(self) -> float:
        """How long it has been running."""
        uptime = float((_PROC / "uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - self.started_ticks / os.sysconf("SC_CLK_TCK"))

    @property
    def cpu_s(self) -> float:
        """How much time on cores its threads have had."""
        return self.ticks / os.sysconf("SC_CLK_TCK")

    @cached_property
    def environ(self) -> dict[str, str]:
        """The environment that it was started with; {} where this user may not see it."""
        try:
            words = (_PROC / str(self.pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            return {}
        pairs = (word.decode(errors="replace").partition("=") for word in words if word)
        return {name: value for name, _, value in pairs}

    @cached_property
    def command(self) -> str:
        """Its command line, for people."""
        try:
            text = (_PROC / str(self.pid) / "cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return self.name
        return text.replace("\0", " ").strip() or self.name

    @property
    def inner_pid(self) -> int:
        """Its number in its own pid namespace, which is what it calls itself."""
        for line in self.status.splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
        return self.pid

    @property
    def waiting_in(self) -> str:
        """The system call in which its main thread waits; "" where it runs or the kernel does not say."""
        if self.state == "R":
            return ""
        try:
            number = (_PROC / str(self.pid) / "syscall").read_text(encoding="ascii").split()[0]
        except (OSError, IndexError):
            number = ""
        if number.isdecimal():
            return _CALLS.get(os.uname().machine, {}).get(int(number), f"system call {number}")
        try:
            return (_PROC / str(self.pid) / "wchan").read_text(encoding="ascii").strip("0\n")
        except OSError:
            return ""


def processes() -> list[int]:
    """Return the numbers of all processes."""
    return [int(folder.name) for folder in _PROC.iterdir() if folder.name.isdecimal()]


def look(pid: int) -> Look | None:
    """Return what is to be seen of ``pid``, None where there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        uid = (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None
    # The command's name stands in brackets and may hold blanks and brackets itself.
    before, _, after = stat.rpartition(")")
    fields = after.split()
    return Look(
        pid,
        before.partition("(")[2],
        fields[0],
        int(fields[1]),
        int(fields[11]) + int(fields[12]),
        int(fields[19]),
        uid,
        status,
    )
