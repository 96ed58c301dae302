"""A job that is running on this machine, examined: its ranks are looked at twice, and asked where they stand."""

from __future__ import annotations

import socket
import time

from ..diagnosis import count, duration, join
from ..errors import fail
from ..launch.termination import descendants
from . import stack_trace
from .concurrent import Together
from .finding import Finding, green, yellow
from .job_ranks import Crew, crews, refresh
from .proc_status import look
from .stalled_job import Standing, judge, moved

__all__ = ["at_work", "examine"]

_SECTION = "job"

# Between the two looks: long enough that a job which trains makes a step of something, short enough to wait for.
_LOOK_S = 0.4

# Someone who did not ask is told only of what has stood still this long.
_STANDSTILL_S = 30.0


def examine(pid: int | None, name: str | None) -> list[Finding]:
    """Say how the job of the process ``pid`` stands, or the one called ``name``, or every job where both are None.

    Raises invalid-argument where there is no such process or job.
    """
    found = crews()
    chosen = _with_pid(found, pid) if pid is not None else [each for each in found if name in {None, "", each.name}]
    if not chosen and pid is None and not name:
        return [green(_SECTION, "none", "no ranks of this user run on this machine")]
    if not chosen:
        there = join([f"{each.name or 'without a name'} (pid {each.pids[0]})" for each in found[:8]])
        raise fail(
            "invalid-argument",
            f"no job with {f'the process {pid}' if pid is not None else f'the name {name}'} runs on this machine",
            who="the process or job given to doctor",
            why=f"jobs here: {there}" if there else "no process here has a flight recorder, or the variables of a rank",
            fix="give the pid of a rank or of its launcher (`allhands doctor --job` shows all jobs)",
        )
    results: list[Finding] = []
    for each in chosen:
        results += _one(each)
    return results


def _with_pid(found: list[Crew], pid: int) -> list[Crew]:
    if look(pid) is None:
        raise fail(
            "invalid-argument",
            f"there is no process {pid}",
            who="the process given to doctor",
            fix="give the pid of a rank or of its launcher (`allhands doctor --job` shows all jobs)",
        )
    exact = [each for each in found if pid in each.pids]
    if exact:
        return exact
    below = set(descendants(pid))
    return [each for each in found if below & set(each.pids)]


def _one(crew: Crew) -> list[Finding]:
    first, started = refresh(crew), time.monotonic()
    if not first.ranks:
        return [green(_SECTION, "over", "the job has just ended")]
    asked = Together(stack_trace.of, first.pids)
    time.sleep(_LOOK_S)
    second = refresh(first)
    traces = dict(zip(first.pids, asked.results(), strict=True))
    passed = max(0.01, time.monotonic() - started)
    before = {rank.pid: rank for rank in first.ranks}
    standing = [
        Standing(
            rank.number,
            rank.pid,
            rank.board,
            rank.seen,
            traces[rank.pid],
            (rank.seen.cpu_s - before[rank.pid].seen.cpu_s) / passed,
        )
        for rank in second.ranks
    ]
    boards = {rank.pid: rank.board for rank in first.ranks}
    steps = moved(boards, {rank.pid: rank.board for rank in second.ranks})
    return judge(standing, max(crew.world_size, len(standing)), steps, host=socket.gethostname())


def at_work() -> list[Finding]:
    """Say which jobs run here, for someone who asked about the machine; a word more where one stands still."""
    found = crews()
    if not found:
        return []
    results = []
    for each in found:
        name = f"{each.name}: " if each.name else ""
        shown = f"{name}{count(len(each.ranks), 'rank')} (pid {each.pids[0]}{' …' if len(each.pids) > 1 else ''})"
        boards = [rank.board for rank in each.ranks if rank.board is not None]
        waiting = [note for board in boards for note in board.under_way]
        still = min((note.age_s for board in boards for note in board.entries[-1:]), default=0.0) if waiting else 0.0
        if still >= _STANDSTILL_S:
            results.append(
                yellow(
                    _SECTION,
                    f"job-{each.pids[0]}",
                    "rank-behind",
                    f"a job stands still since {duration(still)}: {shown}",
                    why=f"no call has begun or ended since; {count(len(waiting), 'call')} under way",
                    fix="look into it",
                    commands=(f"allhands doctor --pid {each.pids[0]}",),
                    certain=False,
                )
            )
        else:
            results.append(green(_SECTION, f"job-{each.pids[0]}", f"runs here: {shown}"))
    return results
