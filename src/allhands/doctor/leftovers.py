"""What earlier jobs left: workers without their launcher, named by pid, with the port or the GPU that they hold."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ..diagnosis import count, duration, join
from .finding import Finding, green, red, yellow
from .proc_status import Look, look, processes
from .request import Case

__all__ = ["Leftover", "check", "leftovers"]

_SECTION = "resources"

# What launchers leave in the environment of those that they start, and of nobody else.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "ALLHANDS_COORDINATOR", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "DEEPSPEED_RANK")

# Who adopts a process whose parent has ended.
_ADOPTERS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "launchd"}

# A launcher that ends takes its workers with it within this; what is older has been left behind.
_YOUNG_S = 2.0

# More than these are counted.
_MOST_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Leftover:
    """A worker whose launcher is gone."""

    pid: int
    command: str
    age_s: float
    mine: bool
    ports: tuple[int, ...]

    def __str__(self) -> str:
        ports = f", listening on {join([str(port) for port in self.ports])}" if self.ports else ""
        return f"pid {self.pid} ({self.command[:60]}), {duration(self.age_s)} old{ports}"


def leftovers() -> list[Leftover]:
    """Return the workers on this machine that an init process has adopted."""
    found = []
    for pid in processes():
        seen = look(pid)
        if seen is None or seen.zombie or pid == os.getpid() or not _adopted(seen):
            continue
        if not any(seen.environ.get(name) for name in _LAUNCHED) or seen.age_s < _YOUNG_S:
            continue
        found.append(Leftover(pid, seen.command, seen.age_s, seen.uid == os.getuid(), _listens(pid)))
    return found


def _adopted(seen: Look) -> bool:
    if seen.parent == 1:
        # Where a container's first process is the launcher itself, its workers are rightly its children.
        first = look(1)
        return first is None or first.name in _ADOPTERS or not first.environ.keys() & set(_LAUNCHED)
    above = look(seen.parent)
    return above is not None and above.name in _ADOPTERS


def _listens(pid: int) -> tuple[int, ...]:
    """Return the TCP ports that ``pid`` listens on."""
    inodes = _sockets(pid)
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for columns in (line.split() for line in lines):
            # 0A is LISTEN.
            if columns[3] == "0A" and columns[9] in inodes:
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return tuple(sorted(ports))


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the sockets that ``pid`` holds."""
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return set()
    found = set()
    for entry in entries:
        # One that the process closes while it is being looked at says nothing of the others.
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def check(case: Case) -> list[Finding]:
    """Name the workers that were left behind; red where one holds the port of this job."""
    found = leftovers()
    if not found:
        return [green(_SECTION, "leftovers", "no workers left of earlier jobs")]
    wanted = case.target.port if case.target is not None and (not case.asked or case.target_is_here) else None
    holding = [each for each in found if wanted is not None and wanted in each.ports]
    shown = join([str(each) for each in found[:_MOST_SHOWN]])
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    level = red if holding else yellow
    what = f"{count(len(found), 'worker')} of an earlier job whose launcher is gone"
    if holding:
        what += f"; pid {holding[0].pid} holds port {wanted}"
    ours = [each.pid for each in found if each.mine]
    return [
        level(
            _SECTION,
            "leftovers",
            "stale-worker",
            what,
            why=f"{shown}{more}: adopted by process 1 of {socket.gethostname()} (observed)",
            fix="end them, if that job is over (they are named, not ended, also with --fix: nothing brings them back)",
            commands=(f"kill {' '.join(map(str, ours))}",) if ours else (),
            details={"pids": [each.pid for each in found]},
        )
    ]
