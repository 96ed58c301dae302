"""The verdict in words, for the last lines on the screen, and as JSON, for --report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..diagnosis import count, duration, ranks
from ..observe.flight_recorder import FlightRecorder
from .fold import ranges
from .job import Job
from .stall import Hang
from .verdict import Outcome, Verdict, status_word

__all__ = ["brief", "culprits", "last_calls", "report", "standing", "words"]

# More stacks and tracebacks than this are in --report only; the first ones tell who is to blame.
_MOST_TRACES = 4

# More culprits than this are in --report only: they share a cause.
_MOST_CULPRITS = 8


def words(verdict: Verdict, leftovers: list[str]) -> str:
    """Return what people read when a job has died."""
    lines = _head(verdict)
    for who, words_ in verdict.followers:
        lines.append(f"  {'after:' if verdict.culprits else 'ranks:'} {ranks(who)}: {words_}")
    lines += last_calls({outcome.rank: outcome.board for outcome in verdict.outcomes})
    for who, text in verdict.traces[:_MOST_TRACES]:
        lines.append(f"  of {ranks(who)}:")
        lines += [f"    | {line}" for line in text.rstrip().splitlines()]
    if len(verdict.traces) > _MOST_TRACES:
        lines.append(f"  and {len(verdict.traces) - _MOST_TRACES} more, which --report FILE holds")
    if verdict.hanging is not None:
        lines += _stacks(verdict.hanging)
    if leftovers:
        lines.append(
            f"  left:  {count(len(leftovers), 'process')}".replace("processs", "processes") + " ended by allhands"
        )
        lines += [f"         {each}" for each in leftovers[:8]]
    lines.append(f"  exit status {verdict.exit_code}")
    return "\n".join(lines) + "\n"


def brief(verdict: Verdict) -> str:
    """Return the verdict in short, for the screens of the other nodes: who and why, not how they came there."""
    return "\n".join([*_head(verdict), f"  exit status {verdict.exit_code} (the whole verdict is on node 0)"]) + "\n"


def _head(verdict: Verdict) -> list[str]:
    lines = [f"allhands: {verdict.what}"]
    lines += [f"  who:   {each}" for each in culprits(verdict)]
    if verdict.why:
        lines.append(f"  why:   {verdict.why}")
    if verdict.fix:
        lines.append(f"  fix:   {verdict.fix}")
    return lines


def culprits(verdict: Verdict) -> list[str]:
    """Return a line for each culprit: who it was, and how it ended."""
    by_rank = {outcome.rank: outcome for outcome in verdict.outcomes}
    lines = []
    for rank in verdict.culprits[:_MOST_CULPRITS]:
        if rank in by_rank:
            outcome = by_rank[rank]
            how = f"{status_word(outcome.status)} after {duration(outcome.after_s)}"
            ended = f"ended by allhands ({status_word(-outcome.sent)})" if outcome.ended_by_agent else how
            lines.append(f"{outcome}, {ended}")
    if len(verdict.culprits) > _MOST_CULPRITS:
        lines.append(f"and {len(verdict.culprits) - _MOST_CULPRITS} more")
    return lines


def last_calls(boards: Mapping[int, FlightRecorder | None]) -> list[str]:
    """Return the last collective of each rank, equal ones in one line."""
    found: dict[str, list[int]] = {}
    for rank, board in boards.items():
        last = board.last if board else None
        if last is not None:
            state = "did not finish" if last.under_way else last.state
            found.setdefault(f"{last.call} at {last.site}: {state}", []).append(rank)
    return ["  last calls:", *(f"    [{ranges(who)}] {call}" for call, who in found.items())] if found else []


def _stacks(hanging: Hang) -> list[str]:
    """Return the stacks of all ranks, equal ones once; those of the ranks that are behind first."""
    found: dict[str, list[int]] = {}
    order = sorted(hanging.stacks, key=lambda rank: (rank not in hanging.behind, rank))
    for rank in order:
        text = hanging.stacks[rank].rstrip() or f"(no stack: the process is {hanging.states.get(rank) or 'gone'})"
        # Thread ids differ between processes that do the same.
        found.setdefault(_anonymous(text), []).append(rank)
    lines: list[str] = []
    for text, who in list(found.items())[: _MOST_TRACES * 2]:
        lines.append(f"  stack of {ranks(who)}:")
        lines += [f"    | {line}" for line in text.splitlines()]
    return lines


def _anonymous(stack: str) -> str:
    lines = []
    for line in stack.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            lines.append(line.partition(" 0x")[0] + " (most recent call first):")
        else:
            lines.append(line)
    return "\n".join(lines)


def standing(hanging: Hang) -> str:
    """Return what every rank is doing, for whoever asked with SIGUSR1."""
    late = hanging.behind
    lines = ["allhands: what every rank is doing" + (f"; the others wait for {ranks(late)}" if late else "")]
    for rank, board in hanging.boards.items():
        last = board.last if board else None
        call = str(last) if last is not None else "no collective yet"
        lines.append(f"  [{rank}] pid {hanging.pids[rank]}, {hanging.states.get(rank) or 'gone'}: {call}")
    return "\n".join([*lines, *_stacks(hanging)]) + "\n"


def report(
    job: Job, attempt: int, verdict: Verdict | None, outcomes: list[Outcome], leftovers: list[str]
) -> dict[str, Any]:
    """Return the verdict for programs; of a job that went well too."""
    found: dict[str, Any] = {
        "job": job.name,
        "attempt": attempt,
        "world_size": job.world_size,
        "exit_code": 0 if verdict is None else verdict.exit_code,
        "cause": "" if verdict is None else verdict.cause,
        "culprits": [] if verdict is None else list(verdict.culprits),
        "what": "the job went well" if verdict is None else verdict.what,
        "why": "" if verdict is None else verdict.why,
        "fix": "" if verdict is None else verdict.fix,
        "followers": [] if verdict is None else [{"ranks": list(who), "did": did} for who, did in verdict.followers],
        "left_behind": leftovers,
        "ranks": [_rank(outcome) for outcome in outcomes],
        "nodes": job.nodes,
    }
    if verdict is not None:
        found["traces"] = [{"ranks": list(who), "text": text} for who, text in verdict.traces]
    if verdict is not None and verdict.hanging is not None:
        found["stacks"] = {str(rank): text for rank, text in verdict.hanging.stacks.items()}
    return found


def _rank(outcome: Outcome) -> dict[str, Any]:
    last = outcome.board.last if outcome.board else None
    return {
        "rank": outcome.rank,
        "node": outcome.node or 0,
        "host": outcome.host,
        "pid": outcome.pid,
        "exit_code": outcome.status if outcome.status >= 0 else None,
        "signal": status_word(outcome.status) if outcome.status < 0 else None,
        "ended_by_allhands": outcome.ended_by_agent,
        "follows": outcome.follows,
        "seconds": round(outcome.after_s, 3),
        "exception": outcome.record.get("kind", ""),
        "message": outcome.record.get("message", ""),
        "diagnosis": outcome.record.get("slug", ""),
        "last_call": "" if last is None else f"{last.call} at {last.site}: {last.state}",
    }
