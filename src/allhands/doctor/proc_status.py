"""Processes of this machine as /proc shows them, and the workers that earlier jobs left behind."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..diagnosis import count, duration, join
from .finding import Finding, Section

__all__ = ["Leftover", "ProcStatus", "check_leftovers", "find_leftovers", "processes", "read_status"]

_RESOURCES = Section("resources")
_PROC = Path("/proc")

# System calls in which threads wait, for kernels that show only the number (x86-64 and arm64, <asm/unistd.h>).
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

# Variables that launchers set for the processes that they start, and nothing else sets.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "ALLHANDS_COORDINATOR", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "DEEPSPEED_RANK")

# Programs that adopt a process whose parent has ended.
_ADOPTERS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "launchd"}

# A launcher ends its workers within this; an orphan that is older was left behind.
_YOUNG_S = 2.0

_MOST_SHOWN = 6


@dataclass(frozen=True)
class ProcStatus:
    """The state of a process at one moment."""

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
        """Whether it has ended and only waits to be reaped."""
        return self.state in {"Z", "X"}

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return self.state in {"T", "t"}

    @property
    def age_s(self) -> float:
        """The time since its start."""
        uptime = float((_PROC / "uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - self.started_ticks / os.sysconf("SC_CLK_TCK"))

    @property
    def cpu_s(self) -> float:
        """The CPU time of its threads."""
        return self.ticks / os.sysconf("SC_CLK_TCK")

    @cached_property
    def environ(self) -> dict[str, str]:
        """The environment that it was started with; {} if this user may not read it."""
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
        """Its pid in its own pid namespace."""
        for line in self.status.splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
        return self.pid

    @property
    def waiting_in(self) -> str:
        """The system call in which its main thread waits; "" if it runs or the kernel does not show it."""
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
    """Return the pids of all processes."""
    return [int(folder.name) for folder in _PROC.iterdir() if folder.name.isdecimal()]


def read_status(pid: int) -> ProcStatus | None:
    """Return the state of ``pid``, None if there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        uid = (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None
    # The name is in brackets, and may contain blanks and brackets.
    before, _, after = stat.rpartition(")")
    fields = after.split()
    ticks = int(fields[11]) + int(fields[12])
    return ProcStatus(pid, before.partition("(")[2], fields[0], int(fields[1]), ticks, int(fields[19]), uid, status)


# Leftovers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftover:
    """A worker whose launcher has ended."""

    pid: int
    command: str
    age_s: float
    mine: bool
    ports: tuple[int, ...]

    def __str__(self) -> str:
        ports = f", listening on {join([str(port) for port in self.ports])}" if self.ports else ""
        return f"pid {self.pid} ({self.command[:60]}), {duration(self.age_s)} old{ports}"


def find_leftovers() -> list[Leftover]:
    """Return the workers on this machine that an init process has adopted."""
    found = []
    for pid in processes():
        status = read_status(pid)
        if status is None or status.zombie or pid == os.getpid() or not _is_adopted(status):
            continue
        if any(status.environ.get(name) for name in _LAUNCHED) and status.age_s >= _YOUNG_S:
            mine = status.uid == os.getuid()
            found.append(Leftover(pid, status.command, status.age_s, mine, _listening_ports(pid)))
    return found


def _is_adopted(status: ProcStatus) -> bool:
    parent = read_status(status.parent)
    if status.parent == 1:
        # The first process of a container may be the launcher itself.
        return parent is None or parent.name in _ADOPTERS or not parent.environ.keys() & set(_LAUNCHED)
    return parent is not None and parent.name in _ADOPTERS


def _listening_ports(pid: int) -> tuple[int, ...]:
    """Return the TCP ports on which ``pid`` listens."""
    inodes = _socket_inodes(pid)
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / str(pid) / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for columns in (line.split() for line in lines):
            # 0A is LISTEN.
            if columns[3] == "0A" and columns[9] in inodes:
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return tuple(sorted(ports))


def _socket_inodes(pid: int) -> set[str]:
    try:
        entries = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return set()
    found = set()
    for entry in entries:
        # A descriptor that is closed meanwhile is skipped.
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def check_leftovers(port: int | None) -> list[Finding]:
    """Report the workers that were left behind; red if one holds ``port``, that of this job's coordinator."""
    found = find_leftovers()
    if not found:
        return [_RESOURCES.green("leftovers", "no workers left of earlier jobs")]
    holding = next((each for each in found if port is not None and port in each.ports), None)
    shown = join([str(each) for each in found[:_MOST_SHOWN]])
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    mine = [each.pid for each in found if each.mine]
    return [
        Finding(
            _RESOURCES.name,
            "leftovers",
            "red" if holding else "yellow",
            f"{count(len(found), 'worker')} of an earlier job whose launcher has ended"
            + (f"; pid {holding.pid} holds port {port}" if holding else ""),
            slug="stale-worker",
            why=f"{shown}{more}: adopted by process 1 of {socket.gethostname()} (observed)",
            fix="end them, if that job is over (--fix does not end them, because that cannot be undone)",
            commands=(f"kill {' '.join(map(str, mine))}",) if mine else (),
            details={"pids": [each.pid for each in found]},
        )
    ]
