"""Who waits for whom in a job, since when and at which line: from boards, stacks and what the kernel says. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..diagnosis import count, duration, join, ranks
from ..launch.verdict import lagging_ranks
from ..observe.flight_recorder import Entry, FlightRecorder
from .finding import Finding, green, red, yellow
from .proc_status import Look
from .stack_trace import Trace, users

__all__ = ["STUCK_S", "Standing", "judge", "moved"]

_SECTION = "job"

# A collective that has waited this long is worth a red line to someone who asked; between machines or beside a long
# checkpoint it may still be on its way, which the line says.
STUCK_S = 5.0

# Within the moment between two looks, a thread that computes takes most of a core.
_BUSY = 0.5

_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank at one moment. ``busy`` is the part of a core that it used between two looks."""

    rank: int
    pid: int
    board: FlightRecorder | None
    seen: Look
    trace: Trace = field(default_factory=Trace)
    busy: float = 0.0

    @property
    def inside(self) -> Entry | None:
        """The call that it waits in, the oldest first; None outside any."""
        under_way = self.board.under_way if self.board is not None else ()
        return under_way[0] if under_way else None

    @property
    def place(self) -> str:
        """Where its main thread is, as far as anyone can tell."""
        frame = users(self.trace.frames)
        return str(frame) if frame is not None else ""

    @property
    def doing(self) -> str:
        """What the kernel says that its main thread does, in words."""
        if self.seen.stopped:
            return "stopped by a signal"
        if self.seen.state == "D":
            call = self.seen.waiting_in
            return f"waiting for a disk or a network file system{f' ({call})' if call else ''}"
        if self.busy >= _BUSY or self.seen.state == "R":
            return "computing without a pause" if self.busy >= _BUSY else "running"
        words = {
            "futex": "waiting for a lock",
            "clock_nanosleep": "sleeping",
            "nanosleep": "sleeping",
            "read": "waiting for something to read",
            "poll": "waiting for a file or a socket",
            "select": "waiting for a file or a socket",
            "ppoll": "waiting for a file or a socket",
            "pselect6": "waiting for a file or a socket",
            "epoll_wait": "waiting for a file or a socket",
            "epoll_pwait": "waiting for a file or a socket",
            "recvfrom": "waiting for a socket",
            "recvmsg": "waiting for a socket",
            "wait4": "waiting for a process that it started",
            "waitid": "waiting for a process that it started",
        }
        call = self.seen.waiting_in
        return words.get(call, f"waiting ({call})" if call else "sleeping")


def moved(before: Mapping[int, FlightRecorder | None], after: Mapping[int, FlightRecorder | None]) -> int:
    """Return how many calls began or ended between two looks."""
    steps = 0
    for pid, now in after.items():
        then = before.get(pid)
        if now is None:
            continue
        old = {note.number: note.state for note in then.entries} if then is not None else {}
        steps += sum(1 for note in now.entries if old.get(note.number) != note.state)
    return steps


def judge(everyone: Sequence[Standing], world_size: int, steps: int, *, host: str) -> list[Finding]:
    """Say how the job stands. ``steps`` is how many calls began or ended while it was looked at."""
    here = {each.rank: each for each in everyone}
    who = count(len(everyone), "rank") + (f" of {world_size}" if world_size > len(everyone) else "")
    inside = {rank: note for rank, each in here.items() if (note := each.inside) is not None}
    stopped = [each for each in everyone if each.seen.stopped]
    if stopped:
        return [_stopped(each, inside, host) for each in stopped]
    if steps:
        return [green(_SECTION, "moving", f"{who} at work: {count(steps, 'call')} began or ended while we looked")]
    longest = max((note.age_s for note in inside.values()), default=0.0)
    if not inside:
        return [_outside(everyone, who, world_size)]
    late = lagging_ranks({rank: each.board for rank, each in here.items()})
    if longest < STUCK_S and not late:
        return [green(_SECTION, "moving", f"{who} in a collective since {duration(longest)}")]
    level = red if longest >= STUCK_S else yellow
    if not late:
        return [_all_inside(everyone, inside, world_size, level, who)]
    awaited = {rank: note for rank, note in inside.items() if rank not in late}
    return [_behind(here[rank], awaited, level, host) for rank in late if rank in here]


def _waits(waiting: Mapping[int, Entry]) -> str:
    """Say in which calls ranks wait, equal ones together."""
    calls: dict[str, list[int]] = defaultdict(list)
    ages: dict[str, float] = {}
    for rank, note in waiting.items():
        # Groups of torch's own are not counted: all their calls are number 0.
        number = f" (call {note.sequence + 1} in its group)" if note.sequence else ""
        peer = (
            f" {'from' if 'recv' in note.operation else 'to'} rank {note.root}" if note.operation in _MESSAGES else ""
        )
        call = note.call.partition(" with root")[0] if peer else note.call
        key = f"{call}{peer}{number} at {note.site}"
        calls[key].append(rank)
        ages[key] = max(ages.get(key, 0.0), note.age_s)
    return join(
        [
            f"{ranks(who)} wait{'s' if len(who) == 1 else ''} in {call} since {duration(ages[call])}"
            for call, who in calls.items()
        ]
    )


def _behind(each: Standing, awaited: Mapping[int, Entry], level: object, host: str) -> Finding:
    """Say of one rank what it misses and where it is instead."""
    missed = next(iter(awaited.values()), None)
    note = each.inside
    last = each.board.last if each.board is not None else None
    call = missed.call if missed is not None else "the call"
    where = each.place
    if note is not None:
        # It is in a call of its own, and the line of that call says more than where in the library it stands.
        peer = f" with rank {note.root}" if note.operation in _MESSAGES and note.root >= 0 else ""
        doing = f"it is in {note.operation}{peer} at {note.site} since {duration(note.age_s)}"
    else:
        doing = f"it is at {where}, {each.doing}" if where else f"it is {each.doing}; its line is not known"
    history = ""
    if note is None and last is not None:
        history = f"; its last call was {last.call} at {last.site}, {last.state} {duration(last.age_s)} ago"
    elif note is None:
        history = "; it has made no call yet"
    make = red if level is red else yellow
    return make(
        _SECTION,
        f"rank-{each.rank}",
        "rank-behind",
        f"rank {each.rank} (pid {each.pid}) has not come to {call}"
        + (f" at {missed.site}" if missed is not None else "")
        + f": {doing}",
        why=f"{_waits(awaited)}{history}" + (f"; told by {each.trace.by}" if each.trace.by else ""),
        fix=_advice(each, missed, where),
        commands=_commands(each),
        details={
            "rank": each.rank,
            "pid": each.pid,
            "host": host,
            "line": where.partition(": ")[0] or (note.site if note is not None else ""),
            "misses": missed.call if missed is not None else "",
            "misses_at": missed.site if missed is not None else "",
            "waiting": sorted(awaited),
            "since_s": round(max((one.age_s for one in awaited.values()), default=0.0), 1),
            "doing": note.operation if note is not None else each.doing,
            "stack": [str(frame) for frame in each.trace.frames[:20]],
        },
    )


def _advice(each: Standing, missed: Entry | None, where: str) -> str:
    if each.inside is not None:
        return (
            f"every rank must make the same calls in the same order: see why rank {each.rank} does not come to "
            f"{missed.site if missed is not None else 'that line'} before {each.inside.site}"
        )
    at = (
        f"see why rank {each.rank} stays at {where.partition(' in ')[0]}"
        if where
        else "find out where it is (py-spy dump)"
    )
    doing = each.doing
    if doing.startswith("computing"):
        return f"{at}: it does not come out of that call, or has more to do than the others (uneven data)"
    if doing == "waiting for a lock":
        return f"{at}: whoever holds the lock never gives it back"
    if doing.startswith("waiting for a disk"):
        return f"{at}: a file system does not answer"
    return f"{at}, and whether it took another branch than the ranks that wait"


def _commands(each: Standing) -> tuple[str, ...]:
    if not each.trace.frames:
        return (f"py-spy dump --pid {each.pid}", f"cat /proc/{each.pid}/stack")
    return ()


def _stopped(each: Standing, inside: Mapping[int, Entry], host: str) -> Finding:
    waiting = {rank: note for rank, note in inside.items() if rank != each.rank}
    missed = next(iter(waiting.values()), None)
    last = each.board.last if each.board is not None else None
    return red(
        _SECTION,
        f"rank-{each.rank}",
        "peer-silent",
        f"rank {each.rank} (pid {each.pid}) is stopped by a signal and does nothing",
        why=(f"{_waits(waiting)}; " if waiting else "")
        + "the kernel says that it is stopped (SIGSTOP, Ctrl-Z or a debugger; observed)"
        + (f"; its last call was {last.call} at {last.site}" if last is not None else ""),
        fix="let it go on",
        commands=(f"kill -CONT {each.pid}",),
        details={
            "rank": each.rank,
            "pid": each.pid,
            "host": host,
            "line": last.site if last is not None else "",
            "misses": missed.call if missed is not None else "",
            "waiting": sorted(waiting),
            "doing": "stopped by a signal",
        },
    )


def _outside(everyone: Sequence[Standing], who: str, world_size: int) -> Finding:
    """Nobody waits in a call: everyone computes, or the group has not formed."""
    forming = [each for each in everyone if any(frame.function == "init_process_group" for frame in each.trace.frames)]
    if forming:
        sites = sorted({each.place for each in forming})
        absent = sorted(set(range(world_size)) - {each.rank for each in forming})
        others = [each for each in everyone if each.rank in absent]
        told = join(
            [
                f"rank {each.rank} (pid {each.pid}) is at {each.place or 'a line not known'}, {each.doing}"
                for each in others[:4]
            ]
        )
        return yellow(
            _SECTION,
            "forming",
            "missing-ranks",
            f"{ranks(each.rank for each in forming)} wait{'s' if len(forming) == 1 else ''} for the others, to form "
            "the group",
            why=f"they are at {join(sites)}"
            + (f"; not there: {ranks(absent)}" if absent else "")
            + (f"; {told}" if told else ""),
            fix="see that every rank was started, with the same address; the ranks say themselves whom they wait for",
            commands=("allhands whoami",),
            details={"waiting": [each.rank for each in forming], "missing": absent},
        )
    busy = sum(1 for each in everyone if each.busy >= _BUSY)
    state = f"{busy} of them computing" if busy else "none of them computing"
    places = [
        f"rank {each.rank} (pid {each.pid}) is at {each.place or 'a line not known'}, {each.doing}" for each in everyone
    ]
    if all(each.board is None or not each.board.entries for each in everyone):
        # A group of torch's own, or none: what it waits for stands on no board.
        return green(_SECTION, "unknown", f"{who} without a call on a board; {join(places[:4])}", places=places)
    return green(_SECTION, "moving", f"{who}, nobody waits in a collective; {state}", join(places[:4]), places=places)


def _all_inside(
    everyone: Sequence[Standing], inside: Mapping[int, Entry], world_size: int, level: object, who: str
) -> Finding:
    """All ranks of this machine are in the same call and it does not end: others are missing, or the network."""
    here = {each.rank for each in everyone}
    elsewhere = sorted(set(range(world_size)) - here)
    oldest = max(note.age_s for note in inside.values())
    make = red if level is red else yellow
    if elsewhere:
        return make(
            _SECTION,
            "elsewhere",
            "rank-behind",
            f"all ranks of this machine are in the same call; not here: {ranks(elsewhere)}",
            why=_waits(inside),
            fix="run the same command on the other machines of the job; if a rank should be here, it has ended",
            commands=("allhands doctor --job",),
            certain=False,
            details={"waiting": sorted(inside), "missing": elsewhere, "since_s": round(oldest, 1)},
        )
    if max(each.busy for each in everyone) >= _BUSY:
        return green(_SECTION, "moving", f"{who} in the same call, at work: {_waits(inside)}")
    return make(
        _SECTION,
        "together",
        "collective-timeout",
        f"{who} are in the same call, and it does not end",
        why=_waits(inside),
        fix="the engine is stuck, not a rank: look at the network between the machines, or at the GPU (nvidia-smi)",
        certain=False,
        details={"waiting": sorted(inside), "since_s": round(oldest, 1)},
    )
