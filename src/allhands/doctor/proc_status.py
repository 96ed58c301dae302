"""Processes of this machine as /proc shows them, and the workers that earlier jobs left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ..diagnosis import count, duration, join
from .finding import Finding, Section
from .request import Request

__all__ = ["check_leftovers", "command_line", "environment", "inner_pid", "listening_ports", "run_tool", "waiting_in"]

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


def command_line(process: psutil.Process) -> str:
    """Return the command line of ``process`` for people. Raises psutil.Error if it has ended."""
    return " ".join(process.cmdline()) or str(process.name())


def run_tool(*command: str, timeout_s: float) -> tuple[str, str]:
    """Run ``command``; return (output, "") or ("", why it failed)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"it did not answer within {timeout_s:g} s"
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except OSError as problem:
        return "", problem.strerror or str(problem)
    if done.returncode:
        return "", next(iter((done.stdout + done.stderr).strip().splitlines()), "it failed")
    return done.stdout, ""


def environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment that ``process`` was started with; {} if this user may not read it."""
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def inner_pid(pid: int) -> int:
    """Return the pid that ``pid`` has in its own pid namespace."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def waiting_in(pid: int) -> str:
    """Return the system call in which the main thread of ``pid`` waits; "" if it runs or the kernel hides it."""
    with contextlib.suppress(OSError, IndexError):
        number = (_PROC / str(pid) / "syscall").read_text(encoding="ascii").split()[0]
        if number.isdecimal():
            return _CALLS.get(os.uname().machine, {}).get(int(number), f"system call {number}")
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "wchan").read_text(encoding="ascii").strip("0\n")
    return ""


def _is_leftover(process: psutil.Process) -> bool:
    """Return whether a launcher started ``process`` and an init process has adopted it."""
    env, age_s = environment(process), time.time() - process.create_time()
    if process.pid == os.getpid() or age_s < _YOUNG_S or not any(env.get(name) for name in _LAUNCHED):
        return False
    parent = process.parent()
    if parent is None:
        return bool(process.ppid() == 1)
    # The first process of a container may be the launcher itself.
    return parent.name() in _ADOPTERS or (parent.pid == 1 and not environment(parent).keys() & set(_LAUNCHED))


def listening_ports(pid: int) -> tuple[int, ...]:
    """Return the TCP ports on which ``pid`` listens."""
    connections = psutil.net_connections(kind="tcp")
    return tuple(
        sorted({each.laddr.port for each in connections if (each.pid, each.status) == (pid, psutil.CONN_LISTEN)})
    )


def check_leftovers(request: Request) -> Iterator[Finding]:
    """Report the workers that were left behind; red if one holds the port of this job's coordinator."""
    local = request.target is not None and (not request.target_given or request.target_is_here)
    port = request.target.port if request.target is not None and local else None
    found, mine, holding = {}, [], ""
    for process in psutil.process_iter():
        # A process that has ended meanwhile is skipped.
        with contextlib.suppress(psutil.Error):
            if _is_leftover(process):
                pid, ports, age = process.pid, listening_ports(process.pid), time.time() - process.create_time()
                listening = f", listening on {join([str(each) for each in ports])}" if ports else ""
                found[pid] = f"pid {pid} ({command_line(process)[:60]}), {duration(age)} old{listening}"
                mine += [str(pid)] if process.uids().effective == os.getuid() else []
                holding = f"; pid {pid} holds port {port}" if port in ports else holding
    if not found:
        yield _RESOURCES.green("leftovers", "no workers left of earlier jobs")
        return
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    yield _RESOURCES.at(
        "red" if holding else "yellow",
        "leftovers",
        "stale-worker",
        f"{count(len(found), 'worker')} of an earlier job whose launcher has ended{holding}",
        why=f"{join(list(found.values())[:_MOST_SHOWN])}{more}: adopted by process 1 of {socket.gethostname()} "
        "(observed)",
        fix="end them, if that job is over (--fix does not end them, because that cannot be undone)",
        commands=(f"kill {' '.join(mine)}",) if mine else (),
        details={"pids": list(found)},
    )
