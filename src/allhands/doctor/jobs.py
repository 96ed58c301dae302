"""The jobs that run on this machine: their ranks are found in /proc, without their help, and checked for stalls."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..diagnosis import count, duration, join
from ..errors import fail
from ..launch.termination import descendants
from ..observe.flight_recorder import FlightRecorder, read_owned
from .concurrent import run_concurrently
from .finding import Finding, Section
from .proc_status import command_line, environment, inner_pid, waiting_in
from .stalled_job import RankState, count_progress, diagnose, main_stack

__all__ = ["Rank", "examine_job", "list_jobs"]

_JOB = Section("job")

# A user who only asked about the machine is shown jobs that have made no progress for this long.
_STALLED_S = 30.0

# Variables that are equal for the ranks of one launch, the most specific first.
_LAUNCH_IDS = ("ALLHANDS_COORDINATOR", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMI_ID")

# A group's shared memory in /proc/PID/maps; the processes that map the same one are in the same group.
_SEGMENT = "/memfd:allhands (deleted)"

_ENDED = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank. ``number`` is -1 if not known; ``parents`` are the pids of its ancestors, the nearest first."""

    pid: int
    number: int
    world_size: int
    parents: tuple[int, ...]
    env: Mapping[str, str]
    recorder: FlightRecorder | None


# The ranks of one job on this machine, in order.
_Job = list[Rank]


def _find_jobs() -> list[_Job]:
    """Return every job that has ranks on this machine, as far as this user may see."""
    found = []
    for process in psutil.process_iter():
        # A process that has ended meanwhile is skipped.
        with contextlib.suppress(psutil.Error):
            if (rank := _rank(process)) is not None:
                found.append(rank)
    return _by_job(_without_descendants(found))


def _rank(process: psutil.Process) -> Rank | None:
    if process.status() in _ENDED or process.pid == os.getpid():
        return None
    recorder, env = read_owned(process.pid, inner_pid(process.pid)), environment(process)
    known = [(recorder.rank, recorder.world_size)] if recorder is not None and recorder.rank >= 0 else []
    # The shells around a rank have its variables too.
    if Path(command_line(process).partition(" ")[0]).name.startswith(("python", "pypy")):
        for prefix in ("ALLHANDS_", ""):
            number, world_size = env.get(f"{prefix}RANK", ""), env.get(f"{prefix}WORLD_SIZE", "")
            if number.isdecimal() and world_size.isdecimal():
                known.append((int(number), int(world_size)))
    if recorder is None and not known:
        return None
    return Rank(process.pid, *(known or [(-1, 0)])[0], tuple(each.pid for each in process.parents()), env, recorder)


def _without_descendants(found: list[Rank]) -> list[Rank]:
    """Remove processes that a rank started: they have its variables too, but no flight recorder of their own."""
    # A rank may also start another job, with other variables.
    identities = {(rank.pid, rank.number, rank.world_size) for rank in found}
    return [
        rank
        for rank in found
        if rank.recorder is not None
        or not any((pid, rank.number, rank.world_size) in identities for pid in rank.parents)
    ]


def _by_job(found: list[Rank]) -> list[_Job]:
    """Group ranks by launch id, by address, by shared memory, or else by parent."""
    # Merge the segments of ranks that share any of them.
    segments: dict[int, set[int]] = defaultdict(set)
    for rank in found:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{rank.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            segments[rank.pid] = {int(line.split()[4]) for line in maps if line.endswith(_SEGMENT)}
    merged: list[set[int]] = []
    for own in segments.values():
        touching = [each for each in merged if each & own]
        merged = [each for each in merged if not each & own] + ([own.union(*touching)] if own else [])
    jobs: dict[str, list[Rank]] = defaultdict(list)
    for rank in found:
        shared = next((number for number, each in enumerate(merged) if each & segments[rank.pid]), None)
        jobs[_job_key(rank, shared)].append(rank)
    return [sorted(members, key=lambda rank: (rank.number, rank.pid)) for members in jobs.values()]


def _name(job: _Job) -> str:
    env = job[0].env
    return env.get("ALLHANDS_JOB") or env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID") or ""


def _job_key(rank: Rank, shared: int | None) -> str:
    env = rank.env
    for name in _LAUNCH_IDS:
        if env.get(name):
            return f"{name}={env[name]} {env.get('MASTER_PORT', '')}"
    if env.get("RANK") and env.get("MASTER_PORT"):
        return f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    if shared is not None:
        return f"memory {shared}"
    return f"parent {rank.parents[:1]} of {rank.world_size}"


def examine_job(pid: int | None, name: str | None) -> list[Finding]:
    """Check the job of the process ``pid``, or the job called ``name``, or every job if both are None.

    Raises invalid-argument if there is no such process or job.
    """
    found = _find_jobs()
    if pid is None:
        chosen = [job for job in found if name in {None, "", _name(job)}]
    else:
        below = set(descendants(pid))
        exact = [job for job in found if any(rank.pid == pid for rank in job)]
        chosen = exact or [job for job in found if any(rank.pid in below for rank in job)]
    if chosen:
        return [finding for job in chosen for finding in _examine(job)]
    if pid is None and not name:
        return [_JOB.green("none", "no ranks of this user run on this machine")]
    what = f"no job with {f'the process {pid}' if pid is not None else f'the name {name}'} runs on this machine"
    there = join([f"{_name(job) or 'without a name'} (pid {job[0].pid})" for job in found[:8]])
    raise fail(
        "invalid-argument",
        what if pid is None or psutil.pid_exists(pid) else f"there is no process {pid}",
        who="the process or job given to doctor",
        why=f"jobs here: {there}" if there else "no process here has a flight recorder, or the variables of a rank",
        fix="give the pid of a rank or of its launcher (`allhands doctor --job` shows all jobs)",
    )


def _examine(job: _Job) -> list[Finding]:
    """Take two snapshots of the ranks of ``job``, read their stacks in between, and compare them."""
    before, started = _snapshots(rank.pid for rank in job), time.monotonic()
    if not before:
        return [_JOB.green("over", "the job has just ended")]
    stack_of = dict(zip(before, run_concurrently(main_stack, list(before)), strict=True))
    # Long enough for a training job to begin or end a call.
    time.sleep(max(0.0, started + 0.4 - time.monotonic()))
    passed_s, after = time.monotonic() - started, _snapshots(before)
    states = [
        RankState(
            rank.number,
            rank.pid,
            *after[rank.pid][:2],
            waiting_in(rank.pid),
            *stack_of[rank.pid],
            busy=(after[rank.pid][2] - before[rank.pid][2]) / passed_s,
        )
        for rank in job
        if rank.pid in after
    ]
    progress = count_progress(*({pid: each[0] for pid, each in taken.items()} for taken in (before, after)))
    world_size = max(len(states), *(rank.world_size for rank in job))
    return diagnose(states, world_size, progress, host=socket.gethostname())


def _snapshots(pids: Iterable[int]) -> dict[int, tuple[FlightRecorder, str, float]]:
    """Return flight recorder, state and CPU time of each of ``pids`` that still runs."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            state, used = process.status(), process.cpu_times()
            if state not in _ENDED:
                recorder = read_owned(pid, inner_pid(pid)) or FlightRecorder(pid, -1, 0, ())
                found[pid] = recorder, state, used.user + used.system
    return found


def list_jobs() -> Iterator[Finding]:
    """List the jobs that run here, for a check of the machine; a job that makes no progress is yellow."""
    for job in _find_jobs():
        name, first = _name(job), job[0].pid
        shown = (f"{name}: " if name else "") + f"{count(len(job), 'rank')} (pid {first}{' …' if job[1:] else ''})"
        recorders = [rank.recorder for rank in job if rank.recorder is not None]
        waiting = [entry for recorder in recorders for entry in recorder.under_way]
        latest = [entry.age_s for recorder in recorders for entry in recorder.entries[-1:]]
        idle_s = min(latest, default=0.0) if waiting else 0.0
        if idle_s < _STALLED_S:
            yield _JOB.green(f"job-{first}", f"runs here: {shown}")
            continue
        yield _JOB.yellow(
            f"job-{first}",
            "rank-behind",
            f"a job has made no progress for {duration(idle_s)}: {shown}",
            why=f"no call has begun or ended since; {count(len(waiting), 'call')} under way",
            fix="look into it",
            commands=(f"allhands doctor --pid {first}",),
            certain=False,
        )
