"""This process and this host, as others can tell them apart: no host name comparison, no guesses."""

from __future__ import annotations

import os
import socket
import time
from functools import cache
from pathlib import Path

import msgspec

__all__ = ["Identity", "boot", "host_key", "process_start", "this_process"]


class Identity(msgspec.Struct, frozen=True):
    """A process: where it runs and since when. ``key`` is equal for processes that share a loopback."""

    host: str
    key: str
    pid: int
    started: float
    parent: str

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


@cache
def boot() -> str:
    """Return what is unique to this boot of this kernel, or "" where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def host_key() -> str:
    """Return a key that is equal exactly for processes which reach each other over loopback.

    That is the kernel's boot id with the network namespace; containers on one machine differ.
    """
    try:
        namespace = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        namespace = 0
    return f"{boot() or socket.gethostname()}:{namespace}"


def process_start(pid: int) -> float | None:
    """Return when ``pid`` started, in seconds since the epoch, or None where no such process runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    if _fields(stat)[0] in {"Z", "X"}:
        return None  # Ended; only whoever started it has not taken note.
    return time.time() - uptime + int(_start_field(stat)) / os.sysconf("SC_CLK_TCK")


def this_process() -> Identity:
    """Return the identity of the calling process."""
    pid, parent = os.getpid(), os.getppid()
    started = process_start(pid) or 0.0
    return Identity(socket.gethostname(), host_key(), pid, started, f"{boot()}:{parent}:{_ticks(parent)}")


def _ticks(pid: int) -> str:
    """Return the start time of ``pid`` in kernel ticks, which two readers see the same; "" where unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return _start_field(stat)


def _start_field(stat: str) -> str:
    return _fields(stat)[19]


def _fields(stat: str) -> list[str]:
    # The command name may hold spaces and brackets; the fields after its last bracket are fixed.
    return stat.rpartition(")")[2].split()
