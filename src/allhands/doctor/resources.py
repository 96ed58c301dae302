"""What this machine has to give: shared memory, file descriptors, processes, memory. Read from the kernel."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from ..diagnosis import count
from .finding import Finding, green, red, yellow
from .request import Case

__all__ = ["check", "group_of", "limits"]

_SECTION = "resources"
_MIB, _GIB = 1 << 20, 1 << 30

# What NCCL's shared-memory transport takes for a rank (engines/nccl.py has the same figure and its reason).
_SHM_PER_RANK = 8 * _MIB

# Docker and Kubernetes give 64 MiB: enough for NCCL, too little for DataLoader workers, whose batches stand there.
_SMALL_SHM = 64 * _MIB

# Below this, hardly one batch in flight fits.
_FULL_SHM = 16 * _MIB

# Descriptors that a Python process with torch has open besides its connections; each rank has one to every other.
_SPARE_DESCRIPTORS = 64

# torch alone does not raise a soft limit: with DataLoader workers this few are soon used up.
_FEW_DESCRIPTORS = 256

# A rank with torch has some tens of threads, and its DataLoader workers as many again.
_THREADS_PER_RANK, _FEW_THREADS = 32, 128

# A rank that has imported torch and formed a group takes about 300 MiB, and its part of the shared memory.
_LEAST_PER_RANK, _EASY_PER_RANK = 256 * _MIB, 512 * _MIB

_GROUPS = Path("/sys/fs/cgroup")


def check(case: Case) -> list[Finding]:
    """Look at each limit, against the ranks that are known to come."""
    ranks = case.local_ranks or 1
    size = case.world.world_size if case.world is not None else ranks
    found = [_shm(ranks), _descriptors(max(size, ranks)), _processes(ranks), _memory(ranks)]
    return [each for each in found if each is not None]


# Shared memory ------------------------------------------------------------------------------------------------


def _shm(ranks: int, path: str = "/dev/shm") -> Finding | None:  # noqa: S108  # the path that NCCL and torch use
    try:
        state = os.statvfs(path)
    except OSError:
        return yellow(
            _SECTION,
            "shm",
            "shm-too-small",
            f"there is no {path}",
            why="NCCL and torch's DataLoader workers pass data between processes there",
            fix=f"mount it: a tmpfs on {path}",
            commands=(f"mount -t tmpfs -o size=1g tmpfs {path}",),
        )
    whole, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    need = max(ranks * _SHM_PER_RANK, _FULL_SHM)
    shown = f"{path} {_size(free)} free of {_size(whole)}"
    fix = (
        f"start the container with --shm-size=1g (Kubernetes: an emptyDir with medium Memory on {path}), or remove "
        "what earlier jobs left there"
    )
    commands = (f"ls -la {path}", f"mount -o remount,size=1g {path}   # as root, on a machine of your own")
    why = f"NCCL passes data between ranks of one machine there ({count(ranks, 'rank')}: {_size(need)}), DataLoader "
    why += "workers their batches"
    if free < need:
        return red(_SECTION, "shm", "shm-too-small", shown, why=why, fix=fix, commands=commands)
    if whole <= _SMALL_SHM:
        return yellow(
            _SECTION,
            "shm",
            "shm-too-small",
            f"{shown}: what containers give by default",
            why=why,
            fix=fix,
            commands=commands,
        )
    return green(_SECTION, "shm", shown, total=whole, free=free)


# Descriptors and processes ------------------------------------------------------------------------------------


def _descriptors(size: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = size + _SPARE_DESCRIPTORS
    shown = f"{soft} file descriptors"
    parts = {"soft": soft, "hard": hard, "need": need}
    if hard != resource.RLIM_INFINITY and need > hard:
        return red(
            _SECTION,
            "descriptors",
            "fd-limit",
            f"{count(size, 'rank')} need {need} file descriptors in each process, the limit is {hard}",
            why=f"ulimit -Hn is {hard}; each rank keeps a connection to every other",
            fix="raise the limit before the job starts (LimitNOFILE= in a service, --ulimit for a container)",
            commands=("ulimit -n 65536",),
            details=parts,
        )
    if soft != resource.RLIM_INFINITY and soft < max(need, _FEW_DESCRIPTORS):
        return yellow(
            _SECTION,
            "descriptors",
            "fd-limit",
            f"only {soft} file descriptors for each process, of {hard} that are allowed",
            why=f"ulimit -Sn is {soft}; {count(size, 'rank')} need {need}, DataLoader workers more. allhands raises it "
            "for its ranks, torch does not",
            fix="raise it in the shell that starts the job (--fix does)",
            commands=(f"ulimit -n {hard}" if hard != resource.RLIM_INFINITY else "ulimit -n 65536",),
            details=parts,
        )
    return green(_SECTION, "descriptors", shown, f"at most {hard}", **parts)


def _processes(ranks: int) -> Finding:
    need = ranks * _THREADS_PER_RANK
    room: list[tuple[int, str]] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        room.append((soft - _own_threads(), f"ulimit -u is {soft}"))
    for folder in group_of("pids"):
        most, now = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and now is not None:
            room.append((most - now, f"the control group {folder} may have {most} and has {now}"))
    threads = _number(Path("/proc/sys/kernel/threads-max"))
    if threads is not None:
        room.append((threads - _all_threads(), f"the kernel allows {threads}"))
    left, why = min(room, default=(need * 10, "no limit"))
    # The doctor's own threads are gone when the job comes.
    left += len(list(Path("/proc/self/task").iterdir()))
    parts = {"left": left, "need": need}
    if left < need or left < _FEW_THREADS:
        level = red if left < ranks else yellow
        return level(
            _SECTION,
            "processes",
            "process-limit",
            f"room for only {max(left, 0)} more {'process or thread' if left == 1 else 'processes and threads'}",
            why=f"{why}; {count(ranks, 'rank')} need about {need} with their threads",
            fix="raise the limit (ulimit -u, TasksMax= in a service, --pids-limit of a container), or end what earlier "
            "jobs left",
            commands=("ulimit -u unlimited", "ps -eLf --sort=-nlwp | head"),
            details=parts,
        )
    return green(_SECTION, "processes", f"room for {left} more processes", why, **parts)


def _own_threads() -> int:
    me, found = os.getuid(), 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if folder.stat().st_uid == me:
                    found += len(list((folder / "task").iterdir()))
            except OSError:
                continue  # It ended while we looked.
    return found


def _all_threads() -> int:
    # "0.1 0.2 0.3 running/all last-pid"
    return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])


# Memory -------------------------------------------------------------------------------------------------------


def limits() -> list[tuple[int, int, str]]:
    """Return (bytes in all, bytes that are left, where) of the machine and of each control group with a limit."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if ":" in line
    )
    kib = {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
    found = [(kib["MemTotal"], kib.get("MemAvailable", kib["MemFree"]), "the machine")]
    for folder in group_of("memory"):
        most = _first(folder, "memory.max", "memory.limit_in_bytes")
        now = _first(folder, "memory.current", "memory.usage_in_bytes")
        if most is not None and now is not None and most < kib["MemTotal"]:
            # Pages of files are counted there, and are given back before anything is killed.
            found.append((most, most - now + _cache(folder), f"the control group {folder}"))
    return found


def _memory(ranks: int) -> Finding:
    whole, left, where = min(limits(), key=lambda each: each[1])
    shown = f"{_size(left)} of {_size(whole)} memory left"
    parts = {"total": whole, "left": left, "where": where}
    if left < ranks * _EASY_PER_RANK:
        level = red if left < ranks * _LEAST_PER_RANK else yellow
        return level(
            _SECTION,
            "memory",
            "memory-low",
            f"{shown}, for {count(ranks, 'rank')}",
            why=f"of {where} (observed); a rank that has imported torch takes about 300 MiB before it does anything, "
            "and the kernel ends processes without a word when there is no more",
            fix="end what uses it, start fewer ranks, or raise the limit of the container or control group",
            commands=("ps -eo pid,rss,args --sort=-rss | head",),
            details=parts,
        )
    return green(_SECTION, "memory", shown, where, **parts)


def _cache(folder: Path) -> int:
    try:
        text = (folder / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 0
    table = dict(line.split() for line in text.splitlines() if line.count(" ") == 1)
    names = (
        ("total_inactive_file", "total_active_file")
        if "total_inactive_file" in table
        else ("inactive_file", "active_file")
    )
    return sum(int(table.get(name, 0)) for name in names)


# Control groups -----------------------------------------------------------------------------------------------


def group_of(controller: str) -> list[Path]:
    """Return the folders of this process's control group for ``controller``, from its own up to the outermost."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = _GROUPS / controllers
            base = base if base.is_dir() else _GROUPS / controller
        elif not controllers:
            base = _GROUPS
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be the host's; what is mounted is then the container's own group.
        folder = folder if folder.is_dir() else base
        while True:
            if folder not in found and folder.is_dir():
                found.append(folder)
            if folder == base:
                break
            folder = folder.parent
    return found


def _first(folder: Path, *names: str) -> int | None:
    for name in names:
        number = _number(folder / name)
        if number is not None:
            return number
    return None


def _number(path: Path) -> int | None:
    """Return the number in a file of the kernel's; None where there is none, or "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _size(number: int) -> str:
    if number >= _GIB:
        return f"{number / _GIB:.1f}".removesuffix(".0") + " GiB"
    return f"{number / _MIB:.0f} MiB"
