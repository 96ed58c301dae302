"""Leftovers of a test, read from /proc: processes, listening ports, abstract sockets, shared memory.

The test process makes itself the adoptive parent of every orphan below it (`adopt_orphans`), so a process whose
starter was killed is still found. Its remains stay a zombie until reaped: ask `alive`, not `os.kill(pid, 0)`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Snapshot", "adopt_orphans", "alive", "children", "end", "left_behind", "snapshot"]

# <linux/prctl.h>; the standard library does not name it.
PR_SET_CHILD_SUBREAPER = 36
# Time for a process to end after its test: enough for an exit handler on a loaded machine,
# too short to hide a hang; the harness gives as much to processes that ranks started.
PATIENCE_S = 5.0
# The state column of /proc/net/tcp for LISTEN.
LISTEN = "0A"
# A file in /dev/shm that names its purpose and the pid of its creator.
OWNED = re.compile(r"allhands-[a-z]+-(\d+)-")
PROC = Path("/proc")
LINUX = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The resources at one moment; those that appear during a test must be gone after it."""

    processes: frozenset[int]
    sockets: frozenset[int]
    segments: frozenset[str]


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux only)."""
    if LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def alive(pid: int) -> bool:
    """Return whether ``pid`` still runs; a zombie does not."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    # The name before the state may itself contain blanks and brackets.
    return text.rpartition(")")[2].split()[0] not in {"Z", "X"}


def children() -> frozenset[int]:
    """Return the pids of this process's children (adopted orphans included), zombies too."""
    pids: set[int] = set()
    try:
        for task in (PROC / "self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread ended meanwhile
                pids.update(map(int, (task / "children").read_text().split()))
    except OSError:
        return frozenset(child.pid for child in psutil.Process().children())
    if not pids and not (PROC / "self/task" / str(os.getpid()) / "children").exists():
        # A kernel without CONFIG_PROC_CHILDREN.
        return frozenset(child.pid for child in psutil.Process().children())
    return frozenset(pids)


def sockets(pid: int | str = "self") -> frozenset[int]:
    """Return the inodes of the sockets that ``pid`` holds open."""
    inodes: set[int] = set()
    with contextlib.suppress(OSError):
        for fd in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                target = str(fd.readlink())
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
    return frozenset(inodes)


def segments() -> frozenset[str]:
    """Return the names of allhands' files in /dev/shm, but those of ranks that other tests have started meanwhile."""
    try:
        return frozenset(
            path.name for path in Path("/dev/shm").iterdir() if "allhands" in path.name and not _others(path.name)
        )
    except OSError:
        return frozenset()


def _others(name: str) -> bool:
    """Tell whether ``name`` has the pid of a running process in it that is not below this one."""
    found = OWNED.match(name)
    if found is None or int(found[1]) == os.getpid() or not alive(int(found[1])):
        return False
    try:
        return os.getpid() not in {each.pid for each in psutil.Process(int(found[1])).parents()}
    except psutil.NoSuchProcess:
        return False


def snapshot() -> Snapshot:
    """Return what is there now."""
    return Snapshot(children(), sockets(), segments())


def end(pid: int) -> None:
    """Kill ``pid``, a child of this process, with all below it, and reap it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def left_behind(before: Snapshot) -> list[str]:
    """Say what is here that was not in ``before``, having given it PATIENCE_S to go; kill processes that stay."""
    deadline = time.monotonic() + PATIENCE_S
    while found := _found(before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in _new_processes(before):
        end(pid)
    return found


def _found(before: Snapshot) -> list[str]:
    processes = _new_processes(before)
    found = [f"process {pid}: {_command(pid)}" for pid in processes]
    inodes = sockets() - before.sockets
    for pid in processes:
        inodes |= sockets(pid)
    # Only a test that left a socket open pays for reading the system's tables.
    if inodes:
        found += [f"listening port {address}" for address in _listening(inodes)]
        found += [f"Unix socket {name}" for name in _named_sockets(inodes)]
    found += [f"shared memory /dev/shm/{name}" for name in sorted(segments() - before.segments)]
    return found


def _new_processes(before: Snapshot) -> list[int]:
    """Return the running children that are new, and reap those that have ended."""
    running: list[int] = []
    for pid in sorted(children() - before.processes - _kept()):
        if alive(pid):
            running.append(pid)
        else:
            # An adopted orphan, which no one else will wait for. Whoever holds a Popen of it has not waited
            # either: that is a ResourceWarning, which is an error here too.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return running


def _kept() -> set[int]:
    """Return the pids of multiprocessing's own servants, which live as long as the interpreter."""
    kept = set()
    for module, name, attribute in (
        ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
        ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
    ):
        pid = getattr(getattr(sys.modules.get(module), name, None), attribute, None)
        if pid is not None:
            kept.add(pid)
    return kept


def _command(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_text().replace("\0", " ").strip() or "?"
    except OSError:
        return "?"


def _listening(inodes: frozenset[int]) -> list[str]:
    """Return the local addresses (as the kernel writes them) of those sockets that listen on TCP."""
    found: list[str] = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == LISTEN and int(columns[9]) in inodes:
                    found.append(f"{int(columns[1].rpartition(':')[2], 16)} ({table})")
    return found


def _named_sockets(inodes: frozenset[int]) -> list[str]:
    """Return the names of those sockets that are allhands' Unix sockets."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for line in (PROC / "net/unix").read_text(errors="replace").splitlines()[1:]:
            columns = line.split(maxsplit=7)
            if len(columns) == 8 and "allhands" in columns[7] and int(columns[6]) in inodes:
                found.append(columns[7])
    return found
