"""Why a call in shared memory did not end well, in words: who called what, who did not come, who is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from . import notes
from .diagnosis import Diagnosis, duration, ranks
from .engines import shm
from .errors import AllhandsError, error

if TYPE_CHECKING:
    from .hostgroup import HostGroup

__all__ = ["explain"]

# The sequence number of a rank that has not come to a call yet.
_NOT_COME = 2**64 - 1

# How long the coordinator may take to say who it was that fell.
_VERDICT_S = 1.0


def explain(
    group: HostGroup, trouble: shm.Trouble, name: str, site: str, peers: Collection[int] | None = None
) -> AllhandsError:
    """Return the exception for ``trouble`` in the call ``name`` at ``site``; the same on every rank where possible.

    ``peers`` are the ranks that a message was to come from or go to; collectives are about everyone.
    """
    member = group.session.member
    culprit = group.ranks[trouble.culprit]
    who = f"rank {member.rank} ({socket.gethostname()}, pid {os.getpid()}) in {name} at {site}"
    match trouble.how:
        case "mismatch" if (odd := group.engine.mail.odd()) is not None:
            return error(member.wait_for_verdict(0) or member.condemn(_misfit(group, odd, who)))
        case "mismatch":
            # Who came after the others had found out has nothing of its own to show; it hears from them.
            came = group.engine.segment.call(group.rank())[0] != _NOT_COME
            verdict = member.wait_for_verdict(0 if came else _VERDICT_S)
            return error(verdict or member.condemn(_mismatch(group, culprit, who)))
        case "timeout":
            late = RuntimeError(f"Timed out waiting for rank {culprit} in {name}")
            return (
                group.session.explain(late, name, site, group.ranks)
                if peers is None
                else group.session.explain(late, name, site, peers, blamed=True)
            ) or error(_lost(culprit, who, "it did not come in time"))
        case "dead":
            verdict = member.wait_for_verdict(_VERDICT_S)
            return error(verdict or member.condemn(_lost(culprit, who, "its process ended (seen through its pidfd)")))
        case _:
            verdict = member.wait_for_verdict(_VERDICT_S)
            return error(verdict or _lost(culprit, who, "it ended the group"))


def _lost(culprit: int, who: str, why: str) -> Diagnosis:
    return Diagnosis(
        "peer-lost",
        f"rank {culprit} is gone",
        who=who,
        why=why,
        fix=f"look at the end of rank {culprit}'s output and at the kernel log (dmesg)",
        ranks=(culprit,),
    )


def _mismatch(group: HostGroup, culprit: int, who: str) -> Diagnosis:
    everyone = {status.rank: status for status in group.session.member.census()}
    calls: dict[str, list[int]] = {}
    places: dict[tuple[str, str], list[int]] = {}
    absent: list[int] = []
    sequence = group.engine.segment.call(group.rank())[0]
    for index, rank in enumerate(group.ranks):
        theirs = group.engine.segment.call(index)
        if theirs[0] == sequence:
            calls.setdefault(_call(theirs), []).append(rank)
            places.setdefault((_call(theirs), _detail(group, index, sequence)), []).append(rank)
        else:
            absent.append(rank)
    ordered = sorted(calls.items(), key=lambda item: (-len(item[1]), min(item[1])))
    odd = sorted(rank for _, members in ordered[1:] for rank in members) or [culprit]
    lines = [
        f"{ranks(members)} called {call}{detail}"
        for call, _ in ordered
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
        fix="make every rank of the group call the same operations in the same order, with tensors that fit",
        ranks=tuple(odd),
        hosts=(socket.gethostname(),),
    )


def _detail(group: HostGroup, index: int, sequence: int) -> str:
    """Return shape and place of a rank's call, from its board; nothing where that cannot be read."""
    pid = group.engine.pids[index]
    if not pid:
        return ""
    try:
        board = notes.read(pid)
    except (LookupError, OSError):
        return ""  # Gone, or another user's: what stands in the segment has to do.
    # One note may stand for several calls (coalesced tensors), so it is the last that began at or before it.
    fitting = [note for note in board.notes if note.group == group.getGroupName() and note.started_s]
    note = max((note for note in fitting if note.sequence <= sequence), key=lambda note: note.number, default=None)
    if note is None:
        return ""
    shape = f" (shape [{', '.join(map(str, note.shape))}])" if note.dtype else ""
    return f"{shape} at {note.site}"


def _misfit(group: HostGroup, odd: tuple[int, ...], who: str) -> Diagnosis:
    """Say which message did not fit the receive that it came to."""
    source, target = (group.ranks[rank] for rank in odd[:2])
    tag, sent, sent_bytes, wanted, wanted_bytes = odd[2:]
    everyone = {status.rank: status for status in group.session.member.census()}
    lines = [
        f"rank {source} sent {_elements(sent, sent_bytes)} with tag {tag} to rank {target}",
        f"rank {target} expected {_elements(wanted, wanted_bytes)}",
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
    names = {code: str(key).removeprefix("torch.") for key, code in shm.DTYPES.items()}
    return f"{names.get(dtype, 'bytes')} x {size // max(1, _bytes(dtype))}"


def _call(call: tuple[int, ...]) -> str:
    _, kind, reduction, dtype, size, root = call
    words = [shm.kind_name(kind)]
    names = {code: str(key).removeprefix("torch.") for key, code in shm.DTYPES.items()}
    words.append(f"of {names.get(dtype, 'bytes')}")
    if size:
        words.append(f"x {size // max(1, _bytes(dtype))}")
    if reduction:
        words.append(f"by {shm.REDUCTION_NAMES[reduction]}")
    if root >= 0:
        words.append(f"with root {root}")
    return " ".join(words)


def _bytes(dtype: int) -> int:
    sizes = {code: torch.empty(0, dtype=key).element_size() for key, code in shm.DTYPES.items()}
    return sizes.get(dtype, 1)
