"""Which process is it: this one, the one at the other end of a Unix socket, or the one that listens on a port."""

from __future__ import annotations

import os
import socket
import struct
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

__all__ = [
    "Identity",
    "PortOwner",
    "boot",
    "host_key",
    "peer_credentials",
    "port_owner",
    "process_start",
    "this_process",
]

_UCRED = struct.Struct("3i")

# Command lines can be pages long; the beginning is enough to recognise one.
_MOST_COMMAND = 120


class Identity(msgspec.Struct, frozen=True):
    """A process, its host and its start time. ``key`` is equal for processes that share a loopback interface."""

    host: str
    key: str
    pid: int
    started: float
    parent: str

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


@cache
def boot() -> str:
    """Return the kernel's boot id, "" where it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def host_key() -> str:
    """Return a key that is equal exactly for processes that can connect to each other over loopback.

    It is the boot id and the network namespace: two containers on one machine have different keys.
    """
    try:
        namespace = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        namespace = 0
    return f"{boot() or socket.gethostname()}:{namespace}"


def process_start(pid: int) -> float | None:
    """Return the start time of ``pid`` in seconds since the epoch, None if no such process runs."""
    stat = _stat(pid)
    # A zombie (Z) has exited; its parent has not reaped it yet.
    if not stat or stat[0] in {"Z", "X"}:
        return None
    try:
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    return time.time() - uptime + int(stat[19]) / os.sysconf("SC_CLK_TCK")


def this_process() -> Identity:
    """Return the identity of the calling process."""
    pid, parent = os.getpid(), os.getppid()
    stat = _stat(parent)
    # The start time in ticks is the same for every reader; in seconds it would not be.
    ticks = stat[19] if stat else ""
    return Identity(socket.gethostname(), host_key(), pid, process_start(pid) or 0.0, f"{boot()}:{parent}:{ticks}")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (state) on, [] if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    # The command name may contain spaces and brackets; the fields follow the last bracket.
    return stat.rpartition(")")[2].split()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process that connected the Unix socket ``sock``, as the kernel recorded them."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


class PortOwner(NamedTuple):
    """A process that listens on a port; pid 0 if the kernel hides it (another user's process)."""

    pid: int
    command: str
    user: str

    def __str__(self) -> str:
        if not self.pid:
            return "a process of another user (its pid is not visible to this user)"
        return f"pid {self.pid} of {self.user} ({self.command[:_MOST_COMMAND]})"

    @property
    def ours(self) -> bool:
        """Whether it is a coordinator process of allhands."""
        return "allhands.control" in self.command


def port_owner(port: int) -> PortOwner | None:
    """Return the process that listens on TCP ``port`` on this host, or None."""
    # The kernel's tables are read one after another while they change: a line may be skipped, and a new socket may
    # have no process yet. The port is known to be in use, so a second search is worth its time.
    found = _find_port_owner(port)
    return found if found is not None and found.pid else _find_port_owner(port) or found


def _find_port_owner(port: int) -> PortOwner | None:
    import psutil  # only on the error path: the import takes 10 ms

    for entry in psutil.net_connections(kind="tcp"):
        if entry.status != psutil.CONN_LISTEN or not entry.laddr or entry.laddr.port != port:
            continue
        if entry.pid is None:
            return PortOwner(0, "", "")
        try:
            process = psutil.Process(entry.pid)
            command = " ".join(process.cmdline()) or process.name()
            return PortOwner(entry.pid, command, process.username())
        except psutil.Error:
            return PortOwner(entry.pid, "?", "?")
    return None
