"""Which rank stalls a job, since when and at which line: from flight recorders, stacks and the kernel's state.

`main_stack` reads the stack of a process; everything else is a pure function of snapshots.
"""

from __future__ import annotations

import json
import linecache
import re
import sysconfig
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..diagnosis import count, duration, join, ranks
from ..launch.verdict import lagging_ranks
from ..observe import stacks
from ..observe.flight_recorder import Entry, FlightRecorder
from .finding import Finding, Level, Section
from .proc_status import run_tool

__all__ = ["Frame", "RankState", "count_progress", "diagnose", "main_stack", "parse_frames", "user_frame"]

_JOB = Section("job")

# A collective that has waited this long is red for a user who asked about the job. Between machines, or beside a long
# checkpoint, it may still end; the finding shows the time.
_STALLED_S = 5.0

# Between two snapshots, a thread that computes uses most of a core.
_BUSY = 0.5

_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}

_WAITS = {
    "futex": "waiting for a lock",
    "read": "waiting for something to read",
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), "sleeping"),
    **dict.fromkeys(("recvfrom", "recvmsg"), "waiting for a socket"),
    **dict.fromkeys(
        ("poll", "select", "ppoll", "pselect6", "epoll_wait", "epoll_pwait"), "waiting for a file or a socket"
    ),
    **dict.fromkeys(("wait4", "waitid"), "waiting for a process that it started"),
}

# What may keep a rank at its line, by the beginning of its activity.
_REASONS = {
    "computing": ": that call does not return, or the rank has more work than the others (uneven data)",
    "waiting for a lock": ": the owner of the lock does not release it",
    "waiting for a disk": ": a file system does not answer",
    "": ", and whether it took another branch than the ranks that wait",
}

_OURS = str(Path(__file__).parents[1])
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen |^<string>$")


# Stacks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        site = f"{self.file.rpartition('/')[2]}:{self.line}"
        return f"{site} in {self.function}" + (f": {source}" if source else "")


def main_stack(pid: int) -> tuple[tuple[Frame, ...], str]:
    """Read the stack of the main thread of ``pid``, innermost first; also return how, "" if it could not be read.

    Its own handler writes it, or else py-spy if that is installed.
    """
    # A rank may have to wait for a core before it answers.
    if text := stacks.request(pid, 1.0):
        return parse_frames(text), "its own handler"
    # py-spy stops the process, reads it and continues it, within tenths of a second.
    output, problem = run_tool("py-spy", "dump", "--json", "--pid", str(pid), timeout_s=3.0)
    if problem:
        return (), ""
    threads = json.loads(output)
    main = next((each for each in threads if each.get("thread_name") == "MainThread"), threads[0])
    return tuple(Frame(each["filename"], int(each["line"]), each["name"]) for each in main["frames"]), "py-spy"


def parse_frames(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames from the output of faulthandler.

    The kernel delivers the signal to the main thread if it can, and faulthandler marks that thread as the current one.
    Otherwise the main thread is the last: threads are listed from the youngest to the oldest.
    """
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append((line, []))
        elif threads and (match := re.match(r'  File "(.*)", line (\d+) in (.*)$', line)):
            threads[-1][1].append(Frame(match[1], int(match[2]), match[3]))
    current = [each for head, each in threads if head.startswith("Current") and each]
    return tuple(current[0] if current else threads[-1][1] if threads else ())


def user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost frame of the user's code: not of Python's library, an installed package or allhands."""
    standard = sysconfig.get_path("stdlib")
    for frame in frames:
        if not frame.file.startswith((_OURS, standard)) and not _LIBRARY.search(frame.file):
            return frame
    return frames[0] if frames else None


# Ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank at one moment: the state of its process as psutil names it, and its main thread.

    ``waiting_in`` is the system call, ``source`` how ``frames`` were read, ``busy`` the part of a core that it used
    between two snapshots.
    """

    rank: int
    pid: int
    recorder: FlightRecorder
    state: str
    waiting_in: str = ""
    frames: tuple[Frame, ...] = ()
    source: str = ""
    busy: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return self.state in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}

    @property
    def call(self) -> Entry | None:
        """The oldest call that is under way, or None."""
        return next(iter(self.recorder.under_way), None)

    @property
    def line(self) -> str:
        """The user's line in which the main thread is, "" if not known."""
        frame = user_frame(self.frames)
        return str(frame) if frame is not None else ""

    @property
    def activity(self) -> str:
        """The state of the main thread according to the kernel, in words."""
        if self.stopped:
            return "stopped by a signal"
        call = self.waiting_in
        if self.state == psutil.STATUS_DISK_SLEEP:
            return f"waiting for a disk or a network file system{f' ({call})' if call else ''}"
        if self.busy >= _BUSY:
            return "computing without a pause"
        if self.state == psutil.STATUS_RUNNING:
            return "running"
        return _WAITS.get(call, f"waiting ({call})" if call else "sleeping")

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) is at {self.line or 'a line not known'}, {self.activity}"


def count_progress(before: Mapping[int, FlightRecorder], after: Mapping[int, FlightRecorder]) -> int:
    """Return the number of calls that began or ended between two snapshots."""
    old = {(pid, entry.number): entry.state for pid, taken in before.items() for entry in taken.entries}
    return sum(old.get((pid, entry.number)) != entry.state for pid, taken in after.items() for entry in taken.entries)


# Diagnosis ----------------------------------------------------------------------------------------------------


def diagnose(states: Sequence[RankState], world_size: int, progress: int, *, host: str) -> list[Finding]:
    """Report the state of a job. ``progress`` is the number of calls that began or ended between two snapshots."""
    by_rank = {each.rank: each for each in states}
    who = count(len(states), "rank") + (f" of {world_size}" if world_size > len(states) else "")
    calls = {rank: entry for rank, each in by_rank.items() if (entry := each.call) is not None}
    stopped = [each for each in states if each.stopped]
    if stopped:
        return [_stopped(each, calls, host) for each in stopped]
    if progress:
        return [_JOB.green("moving", f"{who} at work: {count(progress, 'call')} began or ended while we looked")]
    if not calls:
        return [_no_calls(states, who, world_size)]
    longest = max(entry.age_s for entry in calls.values())
    late = lagging_ranks({rank: each.recorder for rank, each in by_rank.items()})
    if longest < _STALLED_S and not late:
        return [_JOB.green("moving", f"{who} in a collective since {duration(longest)}")]
    level: Level = "red" if longest >= _STALLED_S else "yellow"
    if not late:
        return [_all_in_one_call(states, calls, world_size, level, who)]
    waiting = {rank: entry for rank, entry in calls.items() if rank not in late}
    return [_behind(by_rank[rank], waiting, level, host) for rank in late]


def _describe_waiting(waiting: Mapping[int, Entry]) -> str:
    """Return the calls in which ranks wait, equal ones together."""
    members: dict[str, list[int]] = defaultdict(list)
    ages: dict[str, float] = {}
    for rank, entry in waiting.items():
        # Calls of torch's own groups are not numbered.
        number = f" (call {entry.sequence + 1} in its group)" if entry.sequence else ""
        call = entry.call
        if entry.operation in _MESSAGES:
            direction = "from" if "recv" in entry.operation else "to"
            call = f"{call.partition(' with root')[0]} {direction} rank {entry.root}"
        key = f"{call}{number} at {entry.site}"
        members[key].append(rank)
        ages[key] = max(ages.get(key, 0.0), entry.age_s)
    return join(
        [
            f"{ranks(who)} wait{'s' if len(who) == 1 else ''} in {call} since {duration(ages[call])}"
            for call, who in members.items()
        ]
    )


def _behind(each: RankState, waiting: Mapping[int, Entry], level: Level, host: str) -> Finding:
    """Report a rank that others wait for: the call that it misses, and where it is instead."""
    missed = next(iter(waiting.values()))
    entry, last, line, activity = each.call, each.recorder.last, each.line, each.activity
    history = f"; stack from {each.source}" if each.source else ""
    if entry is not None:
        # It is in another call, whose line is more useful than a line inside the library.
        peer = f" with rank {entry.root}" if entry.operation in _MESSAGES and entry.root >= 0 else ""
        where = f"it is in {entry.operation}{peer} at {entry.site} since {duration(entry.age_s)}"
        fix = f"every rank must make the same calls in the same order: find out why rank {each.rank} does not call "
        fix += f"{missed.site} before {entry.site}"
    else:
        where = f"it is at {line}, {activity}" if line else f"it is {activity}; its line is not known"
        called = "it has made no call yet"
        if last is not None:
            called = f"its last call was {last.call} at {last.site}, {last.state} {duration(last.age_s)} ago"
        history = f"; {called}{history}"
        fix = f"find out why rank {each.rank} stays at {line.partition(' in ')[0]}"
        fix = fix if line else "find out where it is (py-spy dump)"
        fix += next(reason for start, reason in _REASONS.items() if activity.startswith(start))
    site, doing = (entry.site, entry.operation) if entry is not None else ("", activity)
    return _JOB.at(
        level,
        f"rank-{each.rank}",
        "rank-behind",
        f"rank {each.rank} (pid {each.pid}) has not called {missed.call} at {missed.site}: {where}",
        why=_describe_waiting(waiting) + history,
        fix=fix,
        commands=() if each.frames else (f"py-spy dump --pid {each.pid}", f"cat /proc/{each.pid}/stack"),
        details={
            **_details(each, waiting, host, line.partition(": ")[0] or site, doing),
            "misses_at": missed.site,
            "since_s": round(max(one.age_s for one in waiting.values()), 1),
            "stack": [str(frame) for frame in each.frames[:20]],
        },
    )


def _details(each: RankState, waiting: Mapping[int, Entry], host: str, line: str, doing: str) -> dict[str, Any]:
    missed = next(iter(waiting.values()), None)
    return {
        "rank": each.rank,
        "pid": each.pid,
        "host": host,
        "line": line,
        "misses": missed.call if missed is not None else "",
        "waiting": sorted(waiting),
        "doing": doing,
    }


def _stopped(each: RankState, calls: Mapping[int, Entry], host: str) -> Finding:
    waiting = {rank: entry for rank, entry in calls.items() if rank != each.rank}
    last = each.recorder.last
    return _JOB.red(
        f"rank-{each.rank}",
        "peer-silent",
        f"rank {each.rank} (pid {each.pid}) is stopped by a signal",
        why=(f"{_describe_waiting(waiting)}; " if waiting else "")
        + "the kernel reports it as stopped (SIGSTOP, Ctrl-Z or a debugger; observed)"
        + (f"; its last call was {last.call} at {last.site}" if last is not None else ""),
        fix="continue it",
        commands=(f"kill -CONT {each.pid}",),
        details=_details(each, waiting, host, last.site if last is not None else "", "stopped by a signal"),
    )


def _no_calls(states: Sequence[RankState], who: str, world_size: int) -> Finding:
    """Report a job in which no rank waits in a call: all compute, or the group has not formed."""
    forming = [each for each in states if any(frame.function == "init_process_group" for frame in each.frames)]
    if forming:
        absent = sorted(set(range(world_size)) - {each.rank for each in forming})
        others = [str(each) for each in states if each.rank in absent]
        return _JOB.yellow(
            "forming",
            "missing-ranks",
            f"{ranks(each.rank for each in forming)} wait{'s' if len(forming) == 1 else ''} for the others, to form "
            "the group",
            why=f"they are at {join(sorted({each.line for each in forming}))}"
            + (f"; not there: {ranks(absent)}" if absent else "")
            + (f"; {join(others[:4])}" if others else ""),
            fix="check that every rank was started, with the same address; the ranks report for whom they wait",
            commands=("allhands whoami",),
            details={"waiting": [each.rank for each in forming], "missing": absent},
        )
    places = [str(each) for each in states]
    if not any(each.recorder.entries for each in states):
        # A group of torch's own, or none: its calls are not recorded.
        return _JOB.green("unknown", f"{who} without a recorded call; {join(places[:4])}", places=places)
    busy = sum(each.busy >= _BUSY for each in states)
    what = f"{who}, none waits in a collective; {busy or 'none'} of them computing"
    return _JOB.green("moving", what, join(places[:4]), places=places)


def _all_in_one_call(
    states: Sequence[RankState], calls: Mapping[int, Entry], world_size: int, level: Level, who: str
) -> Finding:
    """Report a call in which all ranks of this machine wait: other ranks are missing, or the engine stalls."""
    elsewhere = sorted(set(range(world_size)) - {each.rank for each in states})
    details = {"waiting": sorted(calls), "since_s": round(max(entry.age_s for entry in calls.values()), 1)}
    why = _describe_waiting(calls)
    if elsewhere:
        return _JOB.at(
            level,
            "elsewhere",
            "rank-behind",
            f"all ranks of this machine are in the same call; not here: {ranks(elsewhere)}",
            why=why,
            fix="run the same command on the other machines of the job; if a rank should be here, it has ended",
            commands=("allhands doctor --job",),
            certain=False,
            details={**details, "missing": elsewhere},
        )
    if max(each.busy for each in states) >= _BUSY:
        return _JOB.green("moving", f"{who} in the same call, at work: {why}")
    return _JOB.at(
        level,
        "together",
        "collective-timeout",
        f"{who} are in the same call, and it does not end",
        why=why,
        fix="the engine stalls, not a rank: check the network between the machines, or the GPU (nvidia-smi)",
        certain=False,
        details=details,
    )
