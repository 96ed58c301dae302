"""Turn the failure of a call into a diagnosis, the same on every rank: the only place that does.

An engine raises an `EngineFailure`: its kind, and the group rank that caused it where the engine knows. `explain` waits
once, for a bounded time, for the coordinator's verdict. Where there is none it makes a diagnosis of the failure and of
what the other ranks are doing, and the coordinator makes it everyone's. The first diagnosis stands.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ..control.messages import Status
from ..diagnosis import Diagnosis, duration, join, majority, ranks
from ..engines import transport_errors
from ..engines.base import (
    CallMismatch,
    EngineAborted,
    EngineFailure,
    EngineTimeout,
    MessageMismatch,
    PeerDead,
    PeerLeft,
)
from ..engines.dtypes import OPERATIONS
from ..engines.fingerprint import Call, elements
from ..engines.shm.engine import ShmEngine
from ..errors import AllhandsError, GroupEnded, StoreTimeout, error
from ..observe import flight_recorder
from .session import NOT_THE_USERS, Session, call_site

if TYPE_CHECKING:
    from .process_group import Group

__all__ = ["announce", "barrier_timeout", "explain", "last_call_mismatch", "of_group", "reason"]

# How long a failed call waits for the coordinator's verdict. A death reaches the coordinator as a closed connection,
# so that the verdict arrives within milliseconds unless the machine is overloaded.
_VERDICT_S = 1.0

# Operations in which a rank with little data returns before the others arrive; it compares its next call. By number.
_EARLY = frozenset(OPERATIONS.index(name) for name in ("broadcast", "reduce", "gather", "scatter"))

# Operations whose sizes may differ between ranks.
_UNEVEN = frozenset(OPERATIONS.index(name) for name in ("all_gather", "gather", "scatter", "all_to_all"))

# How long to wait for more ranks to arrive at a call that some made differently: two that differ do not show which of
# them is the odd one. All ranks must raise within a second.
_ARRIVE_S, _POLL_S = 0.3, 0.002

# How long ranks may take to report what they do in place of a monitored barrier. Its caller has waited already.
_BARRIER_STATUS_S = 0.3

# Gloo's messages are pages of C++; a diagnosis keeps the first line.
_MAX_MESSAGE = 300

# How many characters of a refusal the other ranks receive.
_MAX_REASON = 120

# More ranks than this are not listed one by one.
_MAX_LISTED = 16


class _Ranked(Protocol):
    """A group of ranks of the job."""

    ranks: list[int]
    session: Session


def _engine_failure(problem: BaseException) -> EngineFailure | None:
    """Return ``problem`` as an engine's failure where it is one, of our engines or of torch's; None otherwise."""
    if isinstance(problem, EngineFailure):
        return problem
    if isinstance(problem, StoreTimeout):
        return EngineTimeout(str(problem))
    return transport_errors.failure_of(problem)


def explain(  # noqa: PLR0917  # what is known of a call
    session: Session,
    problem: BaseException,
    name: str,
    site: str,
    group: _Ranked | None = None,
    peers: Collection[int] | None = None,
) -> AllhandsError | None:
    """Return the exception that explains ``problem`` in the call ``name`` at ``site``; None where no engine failed.

    ``group`` is the group of the call where it is known, ``peers`` the ranks that a message is exchanged with.
    """
    member = session.member
    if member.verdict is None:
        if isinstance(problem, AllhandsError) and not isinstance(problem, StoreTimeout):
            return None
        if reason := transport_errors.duplicate_gpu(problem):
            return error(member.end_group(_shared_gpu(session, reason, name, site)))
        found = _engine_failure(problem)
        if found is None:
            return None
        verdict = member.wait_for_verdict(0 if _is_own_finding(found) else _VERDICT_S)
        if verdict is None:
            made = _diagnose(session, found, name, site, group, peers)
            # An abort concerns one group; the others of the job go on.
            verdict = made if isinstance(found, EngineAborted) else member.end_group(made)
    else:
        verdict = member.verdict
    member.verdict_raised = True
    return error(verdict)


def of_group(
    group: _Ranked, found: EngineFailure, name: str, site: str, peers: Collection[int] | None = None
) -> AllhandsError:
    """Return the exception that explains ``found`` in a call of ``group``."""
    explained = explain(group.session, found, name, site, group, peers)
    assert explained is not None  # noqa: S101  # an engine failed
    return explained


def announce(session: Session, problem: BaseException) -> None:
    """Report to the other ranks that this one raised, once. Never raises itself."""
    if session.failed or session.member.over or session.member.forked:
        return
    session.failed = True
    if isinstance(problem, GroupEnded):
        return  # All ranks have received it.
    trace = "".join(traceback.format_exception(type(problem), problem, _users_part(problem)))
    message = _first_line(problem) if str(problem) else ""
    consequential = _engine_failure(problem) is not None
    session.member.report_failure(type(problem).__name__, message, trace, follows=consequential)


def barrier_timeout(group: Group, waited_s: float, site: str, *, wait_all_ranks: bool) -> AllhandsError:
    """Return the exception for a monitored barrier that ranks are missing from; it ends the group for all."""
    member = group.session.member
    missing = [group.ranks[index] for index in group.engine.missing()]
    everyone = {status.rank: status for status in member.statuses(_BARRIER_STATUS_S)}
    named = missing if wait_all_ranks else missing[:1]
    more = len(missing) - len(named)
    found = Diagnosis(
        "collective-timeout",
        f"monitored_barrier did not finish within {duration(waited_s)}: "
        + (f"{ranks(named)} did not come" if named else "the last rank came just too late")
        + (f", nor did {more} more (wait_all_ranks=True names all)" if more else ""),
        who=_caller(session=group.session, name="monitored_barrier", site=site),
        why="; ".join(f"rank {rank} is {_doing(everyone[rank])}" for rank in named[:_MAX_LISTED] if rank in everyone),
        fix=f"see what keeps {ranks(named) if named else 'the last rank'} from coming to {site} in time, or "
        "give the call a longer timeout (timeout=)",
        ranks=tuple(named),
        hosts=_hosts(everyone[rank] for rank in named if rank in everyone),
    )
    return error(member.end_group(found))


# The diagnosis of each kind of failure ---------------------------------------------------------------------------


def _is_own_finding(found: EngineFailure) -> bool:
    """Return whether this rank observed the cause itself, so that no other rank's report can be more exact."""
    return isinstance(found, EngineTimeout | PeerLeft) or (isinstance(found, CallMismatch) and found.found_here)


def _diagnose(  # noqa: PLR0917  # what is known of a call
    session: Session,
    found: EngineFailure,
    name: str,
    site: str,
    group: _Ranked | None,
    peers: Collection[int] | None,
) -> Diagnosis:
    who = _caller(session, name, site)
    if isinstance(found, CallMismatch) and group is not None:
        if found.judgement is not None:
            odd = tuple(sorted(group.ranks[index] for index in found.judgement.odd))
            return _different_calls(odd, found.judgement.lines, who)
        if found.message is not None:
            return _different_message(cast("Group", group), found.message, who)
        return _different_calls_in_segment(cast("Group", group), group.ranks[found.culprit or 0], who)
    culprit = None if found.culprit is None or group is None else group.ranks[found.culprit]
    if culprit is not None and isinstance(found, PeerDead | EngineAborted):
        aborted = isinstance(found, EngineAborted)
        return Diagnosis(
            "peer-lost",
            f"rank {culprit} is gone",
            who=who,
            why="it ended the group" if aborted else "its process ended (seen through its pidfd)",
            fix=f"look at the end of rank {culprit}'s output and at the kernel log (dmesg); then run the job again",
            ranks=(culprit,),
        )
    if culprit is not None and isinstance(found, PeerLeft):
        why = f"rank {culprit} destroyed the group (observed in shared memory) without coming to this call"
        return _left([culprit], who, why, name, site=site)
    # A timeout or a lost connection, by what the ranks report.
    member, mine = session.member, session.member.rank
    waited_s = session.waited_s()
    waited = duration(waited_s) if waited_s is not None else "the time it was given"
    expected = peers if peers is not None else group.ranks if group is not None else None
    statuses = member.statuses()
    everyone = [status for status in statuses if expected is None or status.rank in expected or status.rank == mine]
    others = [status for status in everyone if status.rank != mine]
    if member.verdict is not None:
        return member.verdict
    if not everyone and member.over:
        why = "the coordinator ended in good order (observed), as it does once rank 0 beside it has left"
        return _left([0], who, why, name, site=site)
    silent = [status for status in others if status.state == "silent"]
    between = ""
    if peers is not None and not silent:
        # A message's peer that answers may itself wait for one that does not.
        silent = [status for status in statuses if status.state == "silent" and status.rank != mine]
        between = f"; {ranks(peers)} {'answers' if len(peers) == 1 else 'answer'}, and may wait for it too"
    if silent:
        return _silent(silent, who, f"{name} did not finish within {waited}", between)
    if left := [status for status in others if status.state in {"left", "gone"}]:
        why = join([f"rank {status.rank} {status.doing} {duration(status.since_s)} ago" for status in left[:8]])
        return _left([status.rank for status in left], who, why, name, site=site, hosts=_hosts(left))
    if not isinstance(found, EngineTimeout):
        return Diagnosis(
            "engine-failed",
            f"{name} failed although every rank is there",
            who=who,
            why=_first_line(found),
            fix="look at the network between the hosts, and at the messages of the other ranks",
            ranks=(mine,),
        )
    # Two ranks that wait for a message from each other are in the same call, and neither has sent.
    elsewhere = [status for status in others if peers is not None or not status.doing.startswith(f"in {name} ")]
    if not elsewhere:
        # All are in a call of this name; the missing rank is in one of another group.
        elsewhere = [status for status in everyone if status.rank == culprit]
    missing = ranks(status.rank for status in elsewhere) if elsewhere else ""
    return Diagnosis(
        "collective-timeout",
        f"{name} did not finish within {waited}" + (f": {missing} did not come" if missing else ""),
        who=who,
        why="; ".join([f"rank {status.rank} is {_doing(status)}" for status in everyone[:_MAX_LISTED]])
        or _first_line(found),
        fix=f"see what keeps {missing or 'a rank'} from coming to {site} in time, or give the call a longer timeout "
        "(timeout= of init_process_group or new_group)",
        ranks=tuple(status.rank for status in elsewhere),
        hosts=_hosts(elsewhere),
        certain=False,
    )


def _different_calls(odd: tuple[int, ...], lines: Sequence[str], who: str, hosts: tuple[str, ...] = ()) -> Diagnosis:
    return Diagnosis(
        "collective-mismatch",
        "ranks of one group made different calls",
        who=who,
        why="\n".join(lines),
        fix=f"make the {'call' if len(odd) == 1 else 'calls'} of {ranks(odd)} the same as the others': on every rank "
        "the same operations in the same order, with the same size, type, reduction and root",
        ranks=odd,
        hosts=hosts,
    )


def _different_message(group: Group, odd: MessageMismatch, who: str) -> Diagnosis:
    source, target = group.ranks[odd.source], group.ranks[odd.target]
    everyone = {status.rank: status for status in group.session.member.statuses()}
    lines = [
        f"rank {source} sent {elements(odd.sent_dtype, odd.sent_nbytes)} with tag {odd.tag} to rank {target}",
        f"rank {target} expected {elements(odd.expected_dtype, odd.expected_nbytes)}",
    ]
    lines += [
        f"rank {rank} is {_doing(everyone[rank])}" for rank in dict.fromkeys((source, target)) if rank in everyone
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


def _left(
    culprits: Sequence[int], who: str, why: str, call: str, *, site: str, hosts: tuple[str, ...] = ()
) -> Diagnosis:
    return Diagnosis(
        "peer-lost",
        f"{call} cannot finish: {ranks(culprits)} left the group",
        who=who,
        why=why,
        fix=f"let {ranks(culprits)} come to {call} ({site}) too: every rank has to make the same calls before it ends",
        ranks=tuple(culprits),
        hosts=hosts,
    )


def _shared_gpu(session: Session, message: str, name: str, site: str) -> Diagnosis:
    """NCCL finds out in its first collective that ranks use one GPU."""
    device, host = f"cuda:{torch.cuda.current_device()}", socket.gethostname()
    return Diagnosis(
        "gpu-shared",
        f"ranks on {host} use the same GPU ({device}), which NCCL refuses",
        who=_caller(session, name, site),
        why=f"NCCL says: {message}; a rank that never calls torch.cuda.set_device is on cuda:0",
        fix="call torch.cuda.set_device(local_rank) before init, pass device_id=, or use backend='allhands', on "
        "which ranks may share a GPU",
        ranks=(session.member.rank,),
        hosts=(host,),
    )


def _silent(silent: Sequence[Status], who: str, what: str, between: str) -> Diagnosis:
    """Ranks are connected and do not answer the coordinator's pings."""
    first, unreachable = silent[0], ""
    if first.host != socket.gethostname():
        unreachable = f"; where {first.host} cannot be reached, see that it is up and its network is (`ip link`), "
        unreachable += "and run the job again"
    said = [
        f"rank {each.rank} ({each.host}, pid {each.pid}) has said nothing for {duration(each.since_s)}"
        for each in silent[:8]
    ]
    return Diagnosis(
        "peer-silent",
        f"{what}: {ranks(status.rank for status in silent)} {'does' if len(silent) == 1 else 'do'} not answer",
        who=who,
        why=join(said)
        + " though connected (observed); probably stopped, swapped out, or in native code with the GIL"
        + between,
        fix=f"on {first.host}: `ps -o stat,wchan,cmd -p {first.pid}`; T is stopped, and `kill -CONT "
        f"{first.pid}` lets it go on; D waits for a disk; else `py-spy dump --pid {first.pid}`" + unreachable,
        ranks=tuple(status.rank for status in silent),
        hosts=_hosts(silent),
        certain=False,
    )


# Calls that differ in shared memory -------------------------------------------------------------------------------


def last_call_mismatch(group: Any) -> AllhandsError | None:
    """Compare the last call of a group in shared memory, as the next one would; return what to raise for a difference.

    Every rank calls this after all have left, so that no further call is made.
    """
    if not isinstance(getattr(group, "engine", None), ShmEngine):
        return None
    calls = _arrived_calls(group).values()
    if not all(call[1] in _EARLY for call in calls) or len({_compared(call) for call in calls}) < 2:
        return None
    who = _caller(group.session, "destroy_process_group", call_site())
    return error(_different_calls_in_segment(group, group.ranks[0], who))


def _different_calls_in_segment(group: Group, culprit: int, who: str) -> Diagnosis:
    """Compare the fingerprints in the segment, with shapes and lines from the ranks' flight recorders."""
    everyone = {status.rank: status for status in group.session.member.statuses()}
    arrived = _wait_for_calls(group)
    calls = {rank: _described(group, group.ranks.index(rank), call) for rank, call in arrived.items()}
    numbers, words = list(calls), [call.words() for call in calls.values()]
    judgement = majority.judge(_keys(arrived), words, numbers)
    odd = tuple(numbers[index] for index in judgement.odd) if judgement is not None else (culprit,)
    lines = list(judgement.lines) if judgement is not None else majority.lines(words, numbers)
    if absent := [rank for rank in group.ranks if rank not in arrived]:
        lines.append(f"{ranks(absent)} had not come to this call yet")
    # A rank whose call is listed with its line is there; the others report where they are.
    elsewhere = [rank for rank in group.ranks if rank in everyone and (rank not in calls or not calls[rank].site)]
    lines += [f"rank {rank} is {_doing(everyone[rank])}" for rank in elsewhere[:_MAX_LISTED]]
    return _different_calls(odd, lines, who, hosts=(socket.gethostname(),))


def _wait_for_calls(group: Group) -> dict[int, tuple[int, ...]]:
    """Return the calls of the ranks that arrived, once a majority is known, or after _ARRIVE_S."""
    deadline = time.monotonic() + _ARRIVE_S
    while True:
        arrived = _arrived_calls(group)
        most = max(Counter(_keys(arrived)).values(), default=0)
        if most * 2 > len(group.ranks) or len(arrived) == len(group.ranks) or time.monotonic() >= deadline:
            return arrived
        time.sleep(_POLL_S)


def _arrived_calls(group: Group) -> dict[int, tuple[int, ...]]:
    """Return the calls of the ranks that have begun this rank's current call."""
    segment = cast("ShmEngine", group.engine).segment
    sequence = segment.call(group.rank())[0]
    made = {rank: segment.call(index) for index, rank in enumerate(group.ranks)}
    return {rank: call for rank, call in made.items() if call[0] == sequence}


def _keys(calls: dict[int, tuple[int, ...]]) -> list[object]:
    """Return what differs between ``calls``, if anything does."""
    keys = [_compared(call) for call in calls.values()]
    # Where sizes may differ, they are wrong only if nothing else is.
    return keys if len(set(keys)) > 1 else [call[4] for call in calls.values()]


def _compared(call: tuple[int, ...]) -> object:
    """Return what must be the same on every rank: operation, reduction, dtype, root, and the size where it must."""
    return (*call[1:4], *call[5:], 0 if call[1] in _UNEVEN else call[4])


def _described(group: Group, index: int, call: tuple[int, ...]) -> Call:
    """Return a rank's call with shape and line from its flight recorder, without them where that cannot be read."""
    sequence, operation, reduction, dtype, nbytes, root, list_digest = call
    pid, name = cast("ShmEngine", group.engine).pids[index], group.getGroupName()
    entry: flight_recorder.Entry | None = None
    with suppress(LookupError, OSError):  # The process has ended, or is another user's.
        entries = flight_recorder.read(pid).entries if pid else ()
        # One entry may be of several calls (coalesced tensors), so it is the last that began at or before this one.
        fitting = [each for each in entries if each.group == name and each.started_s and each.sequence <= sequence]
        entry = max(fitting, key=lambda each: each.number, default=None)
    shape = str(list(entry.shape)) if entry is not None and entry.dtype else ""
    if list_digest:
        # Two lists may have the same number of bytes in all; then only the digest differs.
        shape = f"{shape} of several tensors (digest of their sizes: {list_digest:016x})".lstrip()
    site = entry.site if entry is not None else ""
    return Call(sequence, operation, nbytes, reduction, dtype, root, shape=shape, site=site)


# Parts of a message -----------------------------------------------------------------------------------------------


def _caller(session: Session, name: str, site: str) -> str:
    return f"rank {session.member.rank} ({socket.gethostname()}, pid {os.getpid()}) in {name} at {site}"


def reason(problem: BaseException) -> str:
    """Return why this rank cannot make its call, as the other ranks receive it."""
    return _first_line(problem.diagnosis.what if isinstance(problem, AllhandsError) else problem)[:_MAX_REASON]


def _first_line(problem: object) -> str:
    return str(problem).splitlines()[0][:_MAX_MESSAGE] if str(problem) else type(problem).__name__


def _hosts(statuses: Iterable[Status]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(status.host for status in statuses))


def _doing(status: Status) -> str:
    since = f" for {duration(status.since_s)}" if status.since_s >= 0.1 else ""
    return f"{status.doing}{since}"


def _users_part(problem: BaseException) -> TracebackType | None:
    """Return the traceback of ``problem`` from the first frame that is the user's."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(NOT_THE_USERS):
        trace = trace.tb_next
    return trace if trace is not None else problem.__traceback__
