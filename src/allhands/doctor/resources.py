"""The limits of this machine: shared memory, file descriptors, processes, memory and cores."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import psutil

from ..diagnosis import count
from .finding import Finding, Section
from .request import Request

__all__ = ["apply_fixes", "available_cores", "check", "check_cores", "memory_limits"]

_RESOURCES = Section("resources")
_MIB, _GIB = 1 << 20, 1 << 30

_CGROUPS = Path("/sys/fs/cgroup")


def check(request: Request) -> list[Finding]:
    """Compare each limit with the ranks that are expected."""
    ranks = request.local_ranks or 1
    size = request.world.world_size if request.world is not None else ranks
    return [_shm(ranks), _descriptors(max(size, ranks)), _processes(ranks), _memory(ranks)]


def _shm(ranks: int, path: str = "/dev/shm") -> Finding:  # noqa: S108  # the path that NCCL and torch use
    try:
        state = os.statvfs(path)
    except OSError:
        return _RESOURCES.yellow(
            "shm",
            "shm-too-small",
            f"there is no {path}",
            why="NCCL and torch's DataLoader workers pass data between processes there",
            fix=f"mount it: a tmpfs on {path}",
            commands=(f"mount -t tmpfs -o size=1g tmpfs {path}",),
        )
    total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    # NCCL's transport needs 8 MiB for a rank; in less than 16 MiB there is hardly room for one batch.
    need = max(ranks * 8, 16) * _MIB
    shown = f"{path} {_size(free)} free of {_size(total)}"
    # The default of Docker and Kubernetes is enough for NCCL, too little for the batches of DataLoader workers.
    if free >= need and total > 64 * _MIB:
        return _RESOURCES.green("shm", shown, total=total, free=free)
    return _RESOURCES.at(
        "red" if free < need else "yellow",
        "shm",
        "shm-too-small",
        shown if free < need else f"{shown}: the default of containers",
        why=f"NCCL passes data between ranks of one machine there ({count(ranks, 'rank')}: {_size(need)}), DataLoader "
        "workers their batches",
        fix=f"start the container with --shm-size=1g (Kubernetes: an emptyDir with medium Memory on {path}), or remove "
        "the files of earlier jobs there",
        commands=(f"ls -la {path}", f"mount -o remount,size=1g {path}   # as root, on your own machine"),
    )


def _descriptors(size: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Each rank has one connection to every other; a Python process with torch has some tens of other descriptors.
    need = size + 64
    details = {"soft": soft, "hard": hard, "need": need}
    if hard != resource.RLIM_INFINITY and need > hard:
        return _RESOURCES.red(
            "descriptors",
            "fd-limit",
            f"{count(size, 'rank')} need {need} file descriptors in each process, the limit is {hard}",
            why=f"ulimit -Hn is {hard}; each rank keeps a connection to every other",
            fix="raise the limit before the job starts (LimitNOFILE= in a service, --ulimit for a container)",
            commands=("ulimit -n 65536",),
            details=details,
        )
    # DataLoader workers soon use up 256.
    if soft != resource.RLIM_INFINITY and soft < max(need, 256):
        return _RESOURCES.yellow(
            "descriptors",
            "fd-limit",
            f"only {soft} file descriptors for each process, of {hard} that are allowed",
            why=f"ulimit -Sn is {soft}; {count(size, 'rank')} need {need}, DataLoader workers more. allhands raises it "
            "for its ranks, torch does not",
            fix="raise it in the shell that starts the job (--fix does)",
            commands=(f"ulimit -n {hard}" if hard != resource.RLIM_INFINITY else "ulimit -n 65536",),
            details=details,
        )
    return _RESOURCES.green("descriptors", f"{soft} file descriptors", f"at most {hard}", **details)


def apply_fixes(findings: Sequence[Finding]) -> dict[str, str]:
    """Make the changes that are safe and can be undone; return by check what was changed, or why not.

    Only the soft limit on descriptors is one: that of the calling shell is raised, and its jobs inherit it.
    """
    if not any(found.check == "descriptors" and found.level == "yellow" for found in findings):
        return {}
    try:
        shell = psutil.Process(os.getppid())
        name = f"{shell.name()} (pid {shell.pid})"
        soft, hard = shell.rlimit(psutil.RLIMIT_NOFILE)
        if shell.uids().effective != os.getuid() or shell.pid == 1:
            done = "nothing: the process that called this one is not yours"
        elif hard == soft:
            done = f"nothing: {name} has all {soft} that are allowed"
        else:
            shell.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
            done = f"raised the limit of {name} from {soft} to {hard}; `ulimit -Sn {soft}` there undoes it"
    except psutil.Error as problem:
        done = f"nothing: {problem}"
    return {"descriptors": done}


def _processes(ranks: int) -> Finding:
    # A rank with torch has some tens of threads, and its DataLoader workers as many again.
    need = ranks * 32
    room: list[tuple[int, str]] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        seen = [each.info for each in psutil.process_iter(["uids", "num_threads"])]
        own = sum(each["num_threads"] or 0 for each in seen if each["uids"] and each["uids"].real == os.getuid())
        room.append((soft - own, f"ulimit -u is {soft}"))
    for folder in _cgroups("pids"):
        most, now = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and now is not None:
            room.append((most - now, f"the control group {folder} may have {most} and has {now}"))
    threads = _number(Path("/proc/sys/kernel/threads-max"))
    if threads is not None:
        # "0.1 0.2 0.3 running/all last-pid"
        running = int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])
        room.append((threads - running, f"the kernel allows {threads}"))
    left, why = min(room, default=(need * 10, "no limit"))
    # The doctor's own threads end before the job starts.
    left += psutil.Process().num_threads()
    details = {"left": left, "need": need}
    if left >= max(need, 128):
        return _RESOURCES.green("processes", f"room for {left} more processes", why, **details)
    return _RESOURCES.at(
        "red" if left < ranks else "yellow",
        "processes",
        "process-limit",
        f"room for only {max(left, 0)} more {'process or thread' if left == 1 else 'processes and threads'}",
        why=f"{why}; {count(ranks, 'rank')} need about {need} with their threads",
        fix="raise the limit (ulimit -u, TasksMax= in a service, --pids-limit of a container), or end the processes of "
        "earlier jobs",
        commands=("ulimit -u unlimited", "ps -eLf --sort=-nlwp | head"),
        details=details,
    )


def memory_limits() -> list[tuple[int, int, str]]:
    """Return (bytes in total, bytes left, name) of the machine and of each control group with a limit."""
    machine = psutil.virtual_memory()
    found = [(int(machine.total), int(machine.available), "the machine")]
    for folder in _cgroups("memory"):
        most = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        now = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if most is not None and now is not None and most < machine.total:
            # The page cache counts as used, and is freed before any process is killed. In version 1 the lines that
            # begin with total_ count the groups below, too.
            cache = {}
            with contextlib.suppress(OSError):
                for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
                    name, _, size = line.partition(" ")
                    if name.endswith("active_file"):
                        cache[name.removeprefix("total_")] = int(size)
            found.append((most, most - now + sum(cache.values()), f"the control group {folder}"))
    return found


def _memory(ranks: int) -> Finding:
    total, left, where = min(memory_limits(), key=lambda each: each[1])
    shown = f"{_size(left)} of {_size(total)} memory left"
    details = {"total": total, "left": left, "where": where}
    # A rank that has imported torch and formed a group needs about 300 MiB, besides its part of the shared memory.
    if left >= ranks * 512 * _MIB:
        return _RESOURCES.green("memory", shown, where, **details)
    return _RESOURCES.at(
        "red" if left < ranks * 256 * _MIB else "yellow",
        "memory",
        "memory-low",
        f"{shown}, for {count(ranks, 'rank')}",
        why=f"of {where} (observed); a rank that has imported torch needs about 300 MiB, and the kernel kills "
        "processes without a message if memory runs out",
        fix="end the processes that use it, start fewer ranks, or raise the limit of the container or control group",
        commands=("ps -eo pid,rss,args --sort=-rss | head",),
        details=details,
    )


def _cgroups(controller: str) -> list[Path]:
    """Return the folders of this process's control group for ``controller``, from its own to the outermost."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            # Version 2 has one hierarchy for all controllers and names none.
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = _CGROUPS / controllers if (_CGROUPS / controllers).is_dir() else _CGROUPS / controller
            folder = base / path.lstrip("/")
            # In a container the path may be the host's; then the mounted folder is the container's own group.
            folder = folder if folder.is_dir() else base
            found += [each for each in (folder, *folder.parents) if each.is_relative_to(base)]
    return list(dict.fromkeys(found))


def _number(*paths: Path) -> int | None:
    """Return the number in the first of these files of the kernel that has one; "max" is none."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text(encoding="ascii"))
    return None


def _size(number: int) -> str:
    if number >= _GIB:
        return f"{number / _GIB:.1f}".removesuffix(".0") + " GiB"
    return f"{number / _MIB:.0f} MiB"


def available_cores() -> tuple[int, str]:
    """Return the number of cores that this process may use, and the limit that determines it."""
    cores = len(os.sched_getaffinity(0))
    why = f"{os.cpu_count()} in all" if cores == os.cpu_count() else f"this process may use {cores} of {os.cpu_count()}"
    for folder in _cgroups("cpu"):
        quota = _cpu_quota(folder)
        # A part of a core still runs one thread at a time.
        if quota is not None and max(1, round(quota)) < cores:
            cores, why = max(1, round(quota)), f"the control group {folder} may use {quota:g}"
    return cores, why


def _cpu_quota(folder: Path) -> float | None:
    """Return the number of cores that a control group may use, None if it has no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):
            quota, period = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
            # "max" and -1 are no limit.
            return int(quota) / int(period) if quota.isdecimal() else None
    return None


def check_cores(request: Request) -> list[Finding]:
    """Compare the cores with ranks and OMP_NUM_THREADS."""
    cores, why = available_cores()
    text = request.env.get("OMP_NUM_THREADS", "").strip()
    threads = int(text) if text.isdecimal() and int(text) > 0 else None

    def yellow(what: str, why: str, fix: str, command: str) -> list[Finding]:
        return [_RESOURCES.yellow("cores", "too-few-cores", what, why=why, fix=fix, commands=(command,))]

    if text and threads is None and not all(part.strip().isdecimal() for part in text.split(",")):
        return yellow(
            f"OMP_NUM_THREADS={text} is not a number: every rank starts a thread for each core",
            f"{count(cores, 'core')} ({why})",
            "give a number, or unset it",
            "export OMP_NUM_THREADS=1",
        )
    ranks = request.local_ranks
    if ranks is None:
        return [_RESOURCES.green("cores", count(cores, "core"), why, cores=cores)]
    if ranks > cores:
        return yellow(
            f"{count(ranks, 'rank')} on {count(cores, 'core')}",
            f"{why}; each collective waits for ranks that have no core at that moment",
            f"start at most {count(cores, 'rank')} here, or give the job more cores",
            f"allhands run -n {cores} …",
        )
    each = threads if threads is not None else cores
    variable = f"OMP_NUM_THREADS={threads}" if threads is not None else "OMP_NUM_THREADS is not set"
    if ranks > 1 and ranks * each > cores:
        share = max(1, cores // ranks)
        return yellow(
            f"{ranks} ranks with {count(each, 'thread')} each on {count(cores, 'core')}",
            f"{variable}, and {why}",
            f"give each rank its share: OMP_NUM_THREADS={share} (allhands run and torchrun set 1)",
            f"export OMP_NUM_THREADS={share}",
        )
    return [_RESOURCES.green("cores", f"{count(cores, 'core')} for {count(ranks, 'rank')}", variable, cores=cores)]
