"""Why a call in shared memory did not end well, in words: who called what, who did not come, who is gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from ..diagnosis import Diagnosis, duration, ranks
from ..engines.base import CallMismatch, EngineFailure, EngineTimeout, MessageMismatch, PeerDead, PeerLeft
from ..engines.dtypes import OPERATIONS, REDUCTION_NAMES, dtype_of, operation_name
from ..errors import AllhandsError, error
from ..observe import flight_recorder

if TYPE_CHECKING:
    from ..diagnosis.majority import Judgement
    from ..engines.shm.engine import ShmEngine
    from .hostgroup import HostGroup
    from .session import Session

__all__ = ["differ", "explain"]

# Operations whose sizes may differ between ranks, by the core's numbers.
_UNEVEN = frozenset(OPERATIONS.index(name) for name in ("all_gather", "gather", "scatter", "all_to_all"))

# How long to wait for more ranks to come to a call that some made differently: two that differ do not say which of
# them is the odd one. Everyone is to be told within a second.
_COME_S, _LOOK_S = 0.3, 0.002

# How long others may take to hear what this rank has heard already.
_HEAR_S = 0.1

# How long the coordinator may take to say who it was that fell.
_VERDICT_S = 1.0


def explain(
    group: HostGroup, problem: EngineFailure, name: str, site: str, peers: Collection[int] | None = None
) -> AllhandsError:
    """Return the exception for ``problem`` in the call ``name`` at ``site``; the same on every rank where possible.

    ``peers`` are the ranks that a message was to come from or go to; collectives are about everyone.
    """
    member = group.session.member
    member.verdict_raised = True
    if isinstance(problem, CallMismatch) and problem.judgement is not None:
        return differ(group, problem.judgement, name, site)
    culprit = group.ranks[problem.culprit or 0]
    who = f"rank {member.rank} ({socket.gethostname()}, pid {os.getpid()}) in {name} at {site}"
    match problem:
        case CallMismatch(message=MessageMismatch() as odd):
            return error(member.wait_for_verdict(0) or member.end_group(_misfit(group, odd, who)))
        case CallMismatch():
            # Only who found the difference knows in which call it was; others may not have come there, or be past it.
            verdict = member.wait_for_verdict(0 if problem.found_here else _VERDICT_S)
            return error(verdict or member.end_group(_mismatch(group, culprit, who)))
        case EngineTimeout():
            told = (
                group.session.explain(problem, name, site, group.ranks, late_rank=culprit)
                if peers is None
                else group.session.explain(problem, name, site, peers, blamed=True)
            )
            return told or error(_lost(culprit, who, "it did not come in time"))
        case PeerDead():
            verdict = member.wait_for_verdict(_VERDICT_S)
            return error(verdict or member.end_group(_lost(culprit, who, "its process ended (seen through its pidfd)")))
        case PeerLeft():
            return error(member.wait_for_verdict(0) or member.end_group(_departed(culprit, who, name)))
        case _:
            verdict = member.wait_for_verdict(_VERDICT_S)
            return error(verdict or _lost(culprit, who, "it ended the group"))


class _Grouped(Protocol):
    """A group as far as it is needed here."""

    ranks: list[int]
    session: Session


def differ(group: _Grouped, judgement: Judgement, name: str, site: str) -> AllhandsError:
    """Return the exception for calls that were told beforehand and differ. Everyone comes to the same judgement."""
    member = group.session.member
    member.verdict_raised = True
    odd = tuple(sorted(group.ranks[index] for index in judgement.odd))
    found = Diagnosis(
        "collective-mismatch",
        "ranks of one group made different calls",
        who=f"rank {member.rank} ({socket.gethostname()}, pid {os.getpid()}) in {name} at {site}",
        why="\n".join(judgement.lines),
        fix=_alike(odd),
        ranks=odd,
    )
    # Ending the group cuts connections that some may still hear it through.
    return error(member.wait_for_verdict(_HEAR_S) or member.end_group(found))


def _alike(odd: Sequence[int]) -> str:
    calls = "call" if len(odd) == 1 else "calls"
    return (
        f"make the {calls} of {ranks(odd)} the same as the others': on every rank the same operations in the same "
        "order, with the same size, type, reduction and root"
    )


def _lost(culprit: int, who: str, why: str) -> Diagnosis:
    return Diagnosis(
        "peer-lost",
        f"rank {culprit} is gone",
        who=who,
        why=why,
        fix=f"look at the end of rank {culprit}'s output and at the kernel log (dmesg); then run the job again",
        ranks=(culprit,),
    )


def _departed(culprit: int, who: str, name: str) -> Diagnosis:
    return Diagnosis(
        "peer-lost",
        f"{name} cannot finish: rank {culprit} left the group",
        who=who,
        why=f"rank {culprit} destroyed the group (observed in shared memory) without coming to this call",
        fix=f"let rank {culprit} make the same calls as the others, and destroy the group after the last of them",
        ranks=(culprit,),
    )


def _mismatch(group: HostGroup, culprit: int, who: str) -> Diagnosis:
    everyone = {status.rank: status for status in group.session.member.statuses()}
    came = _wait_for_calls(group)
    absent = [rank for rank in group.ranks if rank not in came]
    odd = sorted(rank for members in _parties(came)[1:] for rank in members) or [culprit]
    words: dict[str, list[int]] = {}
    places: dict[tuple[str, str], list[int]] = {}
    for rank, call in came.items():
        words.setdefault(_call(call), []).append(rank)
        places.setdefault((_call(call), _detail(group, group.ranks.index(rank), call[0])), []).append(rank)
    lines = [
        f"{ranks(members)} called {call}{detail}"
        for call, _ in sorted(words.items(), key=lambda item: (-len(item[1]), item[1]))
        for (each, detail), members in places.items()
        if each == call
    ]
    # Where a rank is instead; those whose call is listed with its place are there.
    placed = {rank for (_, detail), members in places.items() if detail for rank in members}
    if absent:
        lines.append(f"{ranks(absent)} had not come to this call yet")
    lines += [
        f"rank {rank} is {everyone[rank].doing} for {duration(everyone[rank].since_s)}"
        for rank in group.ranks
        if rank in everyone and rank not in placed
    ][:16]
    return Diagnosis(
        "collective-mismatch",
        "ranks of one group made different calls",
        who=who,
        why="\n".join(lines),
        fix=_alike(odd),
        ranks=tuple(odd),
        hosts=(socket.gethostname(),),
    )


def _detail(group: HostGroup, index: int, sequence: int) -> str:
    """Return shape and place of a rank's call, from its board; nothing where that cannot be read."""
    pid = _shm(group).pids[index]
    if not pid:
        return ""
    try:
        board = flight_recorder.read(pid)
    except (LookupError, OSError):
        return ""  # Gone, or another user's: what stands in the segment has to do.
    # One note may stand for several calls (coalesced tensors), so it is the last that began at or before it.
    fitting = [note for note in board.entries if note.group == group.getGroupName() and note.started_s]
    note = max((note for note in fitting if note.sequence <= sequence), key=lambda note: note.number, default=None)
    if note is None:
        return ""
    shape = f" (shape [{', '.join(map(str, note.shape))}])" if note.dtype else ""
    return f"{shape} at {note.site}"


def _misfit(group: HostGroup, odd: MessageMismatch, who: str) -> Diagnosis:
    """Say which message did not fit the receive that it came to."""
    source, target = group.ranks[odd.source], group.ranks[odd.target]
    everyone = {status.rank: status for status in group.session.member.statuses()}
    lines = [
        f"rank {source} sent {_elements(odd.sent_dtype, odd.sent_nbytes)} with tag {odd.tag} to rank {target}",
        f"rank {target} expected {_elements(odd.expected_dtype, odd.expected_nbytes)}",
    ]
    lines += [
        f"rank {rank} is {everyone[rank].doing} for {duration(everyone[rank].since_s)}"
        for rank in dict.fromkeys((source, target))
        if rank in everyone
    ]
    return Diagnosis(
        "collective-mismatch",
        f"rank {target} did not expect what rank {source} sent to it",
        who=who,
        why="\n".join(lines),
        fix="receive into a tensor of the type and size that is sent; messages with one tag arrive in their order",
        ranks=tuple(dict.fromkeys((source, target))),
        hosts=(socket.gethostname(),),
    )


def _elements(dtype: int, size: int) -> str:
    of = dtype_of(dtype)
    return f"{str(of).removeprefix('torch.') if of else 'bytes'} x {size // (of.itemsize if of else 1)}"


def _shm(group: HostGroup) -> ShmEngine:
    return cast("ShmEngine", group.engine)


def _wait_for_calls(group: HostGroup) -> dict[int, tuple[int, ...]]:
    """Return what the ranks called that have come, once it is clear what most of them call, or after _COME_S."""
    deadline = time.monotonic() + _COME_S
    segment = _shm(group).segment
    while True:
        sequence = segment.call(group.rank())[0]
        made: dict[int, tuple[int, ...]] = {rank: segment.call(index) for index, rank in enumerate(group.ranks)}
        came = {rank: call for rank, call in made.items() if call[0] == sequence}
        most = max(map(len, _parties(came)), default=0)
        if most * 2 > len(made) or len(came) == len(made) or time.monotonic() >= deadline:
            return came
        time.sleep(_LOOK_S)


def _parties(calls: dict[int, tuple[int, ...]]) -> list[list[int]]:
    """Return the ranks that made the same call together, the most of them first."""

    def by(key: Callable[[tuple[int, ...]], object]) -> list[list[int]]:
        found: dict[object, list[int]] = {}
        for rank, call in calls.items():
            found.setdefault(key(call), []).append(rank)
        return sorted(found.values(), key=lambda members: (-len(members), members))

    # Where sizes may differ, they are what is wrong only if nothing else is.
    parties = by(lambda call: (*call[1:4], call[5], 0 if call[1] in _UNEVEN else call[4]))
    return parties if len(parties) > 1 else by(lambda call: call[4])


def _call(call: tuple[int, ...]) -> str:
    _, kind, reduction, dtype, size, root = call
    words = [operation_name(kind)]
    of = dtype_of(dtype)
    if dtype:
        words.append(f"of {str(of).removeprefix('torch.') if of else 'bytes'}")
    if size:
        words.append(f"x {size // (of.itemsize if of else 1)}")
    if reduction:
        words.append(f"by {REDUCTION_NAMES[reduction]}")
    if root >= 0:
        words.append(f"with root {root}")
    elif root < -1:
        # The core's digest of their sizes: where nothing else differs, this does.
        words.append(f"of several tensors (digest of their sizes: {-root})")
    return " ".join(words)
