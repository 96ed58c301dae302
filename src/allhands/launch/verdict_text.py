"""The end of an attempt as text: the verdict for the terminal, and as JSON for --report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..diagnosis import duration, ranks
from ..observe.flight_recorder import FlightRecorder
from .options import Job
from .verdict import Outcome, Stall, Verdict, status_name

__all__ = [
    "AttemptResult",
    "brief_text",
    "culprit_lines",
    "last_call_lines",
    "rank_ranges",
    "result",
    "stall_text",
    "verdict_text",
]

# More tracebacks and stacks than this are in --report only; the first ones belong to the culprits.
_MOST_TRACES = 4

# More culprits than this are in --report only: they share a cause.
_MOST_CULPRITS = 8

_MOST_LEFTOVERS = 8


class AttemptResult(msgspec.Struct, tag=True, frozen=True):
    """The end of an attempt: exit status, text for the terminal, JSON for --report, and whether another one follows."""

    exit_code: int
    text: str
    report: str = ""
    restart: bool = False
    # The text for the terminals of nodes other than 0: without tracebacks and last calls.
    brief: str = ""


def result(
    job: Job,
    attempt: int,
    verdict: Verdict | None,
    outcomes: Sequence[Outcome],
    leftovers: Sequence[str],
    *,
    restart: bool = False,
) -> AttemptResult:
    """Return the result of an attempt that was judged here."""
    text = f"allhands: ended what the ranks had left behind: {'; '.join(leftovers)}\n" if leftovers else ""
    if verdict is None:
        verdict = Verdict("", (), "the job went well", exit_code=0, outcomes=tuple(outcomes))
        brief = ""
    else:
        text, brief = verdict_text(verdict, leftovers), brief_text(verdict)
    report = json.dumps(_report(job, attempt, verdict, leftovers), indent=2) + "\n"
    return AttemptResult(verdict.exit_code, text, report, restart, brief)


def verdict_text(verdict: Verdict, leftovers: Sequence[str]) -> str:
    """Return the verdict as printed at the end of a failed job."""
    lines = _head(verdict)
    for who, end in verdict.others:
        lines.append(f"  {'after:' if verdict.culprits else 'ranks:'} {ranks(who)}: {end}")
    lines += last_call_lines({outcome.rank: outcome.recording for outcome in verdict.outcomes})
    for who, text in verdict.traces[:_MOST_TRACES]:
        lines += _quoted(f"  of {ranks(who)}:", text.rstrip())
    if len(verdict.traces) > _MOST_TRACES:
        lines.append(f"  and {len(verdict.traces) - _MOST_TRACES} more, which --report FILE holds")
    if verdict.stall is not None:
        lines += _stack_lines(verdict.stall)
    if leftovers:
        lines.append(f"  left:  {len(leftovers)} {'process' if len(leftovers) == 1 else 'processes'} ended by allhands")
        lines += [f"         {each}" for each in leftovers[:_MOST_LEFTOVERS]]
    lines.append(f"  exit status {verdict.exit_code}")
    return "\n".join(lines) + "\n"


def brief_text(verdict: Verdict) -> str:
    """Return the verdict for the terminals of nodes other than 0: without tracebacks and last calls."""
    return "\n".join([*_head(verdict), f"  exit status {verdict.exit_code} (the whole verdict is on node 0)"]) + "\n"


def _head(verdict: Verdict) -> list[str]:
    lines = [f"allhands: {verdict.what}"]
    lines += [f"  who:   {each}" for each in culprit_lines(verdict)]
    if verdict.why:
        lines.append(f"  why:   {verdict.why}")
    if verdict.fix:
        lines.append(f"  fix:   {verdict.fix}")
    return lines


def culprit_lines(verdict: Verdict) -> list[str]:
    """Return a line for each culprit: where it ran, and how it ended."""
    by_rank = {outcome.rank: outcome for outcome in verdict.outcomes}
    lines = []
    for rank in verdict.culprits[:_MOST_CULPRITS]:
        if rank in by_rank:
            outcome = by_rank[rank]
            end = f"{status_name(outcome.status)} after {duration(outcome.after_s)}"
            if outcome.ended_by_agent:
                end = f"ended by allhands ({status_name(-outcome.sent)})"
            lines.append(f"{outcome}, {end}")
    if len(verdict.culprits) > _MOST_CULPRITS:
        lines.append(f"and {len(verdict.culprits) - _MOST_CULPRITS} more")
    return lines


def last_call_lines(recordings: Mapping[int, FlightRecorder | None]) -> list[str]:
    """Return the last collective of each rank, equal ones in one line."""
    found: dict[str, list[int]] = {}
    for rank, recording in recordings.items():
        last = recording.last if recording else None
        if last is not None:
            state = "did not finish" if last.under_way else last.state
            found.setdefault(f"{last.call} at {last.site}: {state}", []).append(rank)
    calls = [f"    [{rank_ranges(who)}] {call}" for call, who in found.items()]
    return ["  last calls:", *calls] if calls else []


def stall_text(stall: Stall) -> str:
    """Return what every rank is doing, as printed at SIGUSR1."""
    waits = f"; the others wait for {ranks(stall.lagging)}" if stall.lagging else ""
    lines = [f"allhands: what every rank is doing{waits}"]
    for rank, recording in stall.recordings.items():
        last = recording.last if recording else None
        call = str(last) if last is not None else "no collective yet"
        lines.append(f"  [{rank}] pid {stall.pids[rank]}, {stall.states.get(rank) or 'gone'}: {call}")
    return "\n".join([*lines, *_stack_lines(stall)]) + "\n"


def _stack_lines(stall: Stall) -> list[str]:
    """Return the stacks of all ranks, equal ones once, those of the lagging ranks first."""
    found: dict[str, list[int]] = {}
    for rank in sorted(stall.stacks, key=lambda rank: (rank not in stall.lagging, rank)):
        text = stall.stacks[rank].rstrip() or f"(no stack: the process is {stall.states.get(rank) or 'gone'})"
        found.setdefault(_without_thread_ids(text), []).append(rank)
    lines: list[str] = []
    for text, who in list(found.items())[: _MOST_TRACES * 2]:
        lines += _quoted(f"  stack of {ranks(who)}:", text)
    return lines


def _without_thread_ids(stack: str) -> str:
    """Remove what differs between processes that do the same."""
    return "\n".join(
        line.partition(" 0x")[0] + " (most recent call first):"
        if line.startswith(("Thread 0x", "Current thread 0x"))
        else line
        for line in stack.splitlines()
    )


def _quoted(heading: str, text: str) -> list[str]:
    return [heading, *(f"    | {line}" for line in text.splitlines())]


def rank_ranges(numbers: Iterable[int]) -> str:
    """Return ranks as ``0-3,7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _report(job: Job, attempt: int, verdict: Verdict, leftovers: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "job": job.name,
        "attempt": attempt,
        "world_size": job.world_size,
        "exit_code": verdict.exit_code,
        "cause": verdict.cause,
        "culprits": list(verdict.culprits),
        "what": verdict.what,
        "why": verdict.why,
        "fix": verdict.fix,
        "followers": [{"ranks": list(who), "did": end} for who, end in verdict.others],
        "left_behind": list(leftovers),
        "ranks": [_rank_report(outcome) for outcome in verdict.outcomes],
        "nodes": job.nodes,
        "traces": [{"ranks": list(who), "text": text} for who, text in verdict.traces],
    }
    if verdict.stall is not None:
        found["stacks"] = {str(rank): text for rank, text in verdict.stall.stacks.items()}
    return found


def _rank_report(outcome: Outcome) -> dict[str, Any]:
    last = outcome.recording.last if outcome.recording else None
    return {
        "rank": outcome.rank,
        "node": outcome.node or 0,
        "host": outcome.host,
        "pid": outcome.pid,
        "exit_code": outcome.status if outcome.status >= 0 else None,
        "signal": status_name(outcome.status) if outcome.status < 0 else None,
        "ended_by_allhands": outcome.ended_by_agent,
        "follows": outcome.is_consequence,
        "seconds": round(outcome.after_s, 3),
        "exception": outcome.record.get("kind", ""),
        "message": outcome.record.get("message", ""),
        "diagnosis": outcome.record.get("slug", ""),
        "last_call": "" if last is None else f"{last.call} at {last.site}: {last.state}",
    }
