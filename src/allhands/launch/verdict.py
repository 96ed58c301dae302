"""The verdict on a dead job: the ranks to blame, by cause and not by clock, and the consequences. Pure.

After `judge` follows the text for the terminal and the JSON for --report.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, duration, ranks
from ..engines import transport_errors
from ..observe.flight_recorder import Entry, FlightRecorder
from .options import Job

__all__ = [
    "HANG_STATUS",
    "AttemptResult",
    "NodeLoss",
    "Outcome",
    "Stall",
    "Verdict",
    "brief_text",
    "culprit_lines",
    "judge",
    "lagging_ranks",
    "last_call_lines",
    "rank_ranges",
    "result",
    "should_restart",
    "stall_text",
    "status_name",
    "verdict_text",
]

# The exit status of coreutils' `timeout`.
HANG_STATUS = 124

# Signals of crashes in native code.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}

# Exceptions that report the end of a process that the rank itself had started.
_CHILD_ERRORS = {
    "ProcessRaisedException",
    "ProcessExitedException",
    "BrokenProcessPool",
    "CalledProcessError",
    "SpawnRaised",
    "SpawnExited",
}

# Our exceptions that report another rank's failure; subclasses have them among the bases in their exit record.
_PEER_ERRORS = {"GroupEnded", "StoreTimeout"}

# More tracebacks and stacks than this are in --report only; the first ones belong to the culprits.
_MOST_TRACES = 4

# More culprits than this are in --report only: they share a cause.
_MOST_CULPRITS = 8

_MOST_LEFTOVERS = 8

# Ranks with a traceback or a description that they share.
_Grouped = tuple[tuple[tuple[int, ...], str], ...]


class Outcome(msgspec.Struct, frozen=True):
    """How one worker ended, and the evidence that it left."""

    rank: int
    host: str
    pid: int
    # Exit status, or the negative of a signal.
    status: int
    # The signal that the agent had sent.
    sent: int = 0
    sent_s: float = 0.0
    ended_s: float = 0.0
    after_s: float = 0.0
    # The exit record (see `worker`).
    record: dict[str, Any] = msgspec.field(default_factory=dict)
    # The Python stack at a fatal signal.
    stack: str = ""
    recording: FlightRecorder | None = None
    # Evidence of the out-of-memory killer.
    oom: str = ""
    # None in a job of one node.
    node: int | None = None

    def __str__(self) -> str:
        place = self.host if self.node is None else f"node {self.node}, {self.host}"
        return f"rank {self.rank} ({place}, pid {self.pid})"

    @property
    def failed_s(self) -> float:
        """When its end began: at the exception, where there was one."""
        return float(self.record.get("at_s", self.ended_s))

    @property
    def raised(self) -> bool:
        """Whether an exception ended the script."""
        return self.record.get("end") == "raised"

    @property
    def ended_by_agent(self) -> bool:
        """Whether the agent had sent it a signal before it failed by itself."""
        return bool(self.sent) and not (self.record.get("end") in {"raised", "exit"} and self.failed_s < self.sent_s)

    @property
    def is_consequence(self) -> bool:
        """Whether its error only reports another rank's failure."""
        # The ranks named by a child's error belong to another job, which this rank had started.
        if not self.raised or self.record["kind"] in _CHILD_ERRORS:
            return False
        if "slug" in self.record and self.record["ranks"]:
            return self.rank not in self.record["ranks"] or bool(_PEER_ERRORS & set(self.record["bases"]))
        if _PEER_ERRORS & set(self.record["bases"]):
            return True
        return "RuntimeError" in self.record["bases"] and bool(transport_errors.classify(self.record["message"]))

    @property
    def cause(self) -> str:
        """The cause of its end, as --restart-if names it."""
        if self.oom:
            return "oom"
        if self.status < 0:
            return "signal"
        return "exception" if self.raised else "exit"


class Stall(msgspec.Struct, frozen=True):
    """The state of every worker at one moment, by rank: flight recorder, stacks of all threads, kernel state."""

    recordings: Mapping[int, FlightRecorder | None]
    stacks: Mapping[int, str]
    states: Mapping[int, str]
    pids: Mapping[int, int]
    after_s: float

    @property
    def lagging(self) -> tuple[int, ...]:
        """The ranks that the others wait for."""
        return lagging_ranks(self.recordings)


class NodeLoss(msgspec.Struct, frozen=True):
    """The end of the connection to a node's agent, or its silence; ``last_received_s`` dates its last message."""

    node: int
    host: str
    address: str
    ranks: tuple[int, ...]
    how: str
    last_received_s: float
    seen_s: float
    # Whether its end was observed (a broken connection), or inferred from silence.
    observed: bool = True
    # Whether this node itself is cut off from node 0, and so from all others.
    cut_off: bool = False

    def __str__(self) -> str:
        return f"node {self.node} ({', '.join(part for part in (self.host, self.address) if part)})"

    @property
    def what(self) -> str:
        """The first line of a verdict on it."""
        if not self.observed:
            return f"{self} does not answer"
        return f"{self} was lost" + (f", and {ranks(self.ranks)} with it" if self.ranks else "")

    def why_and_fix(self) -> tuple[str, str]:
        """Return why the node counts as lost, and what to check."""
        place = self.host or self.address
        quiet = duration(max(0.0, self.seen_s - self.last_received_s))
        if not self.observed:
            lacks = "gave no verdict" if self.cut_off else "did not report how its ranks ended"
            return (
                f"its agent {lacks}; last heard {quiet} ago (inferred from silence: it may live)",
                f"look at the agent on {place}: it may be stopped or starved (ps -o stat)",
            )
        why = f"{self.how} (observed); it was last heard {quiet} before"
        if any(word in self.how.lower() for word in ("timed out", "unreachable", "no route")):
            fix = f"see that {place} is up and its network is (ping, ip link); it may be alive and cut off"
        else:
            fix = f"look at the end of the agent's output on {place}, and at its kernel log (dmesg)"
        if self.cut_off:
            why += "; without node 0 there is no verdict for the whole job, so this node ended its ranks"
        return why, fix


class Verdict(msgspec.Struct, frozen=True):
    """The ranks to blame, ``culprits``, the root cause first; why they failed, and the exit status of the job."""

    cause: str
    culprits: tuple[int, ...]
    what: str
    why: str = ""
    fix: str = ""
    exit_code: int = 1
    # Tracebacks or stacks of the culprits.
    traces: _Grouped = ()
    outcomes: tuple[Outcome, ...] = ()
    stall: Stall | None = None

    @property
    def others(self) -> _Grouped:
        """How the other ranks ended; () after a stall, which ends all of them alike, and for a job that succeeded."""
        if self.stall is not None or not self.exit_code:
            return ()
        return _group((each.rank, _end(each)) for each in self.outcomes if each.rank not in self.culprits)


def judge(
    outcomes: Sequence[Outcome],
    findings: Sequence[Diagnosis] = (),
    stall: Stall | None = None,
    stopped: int = 0,
    *,
    stopped_by: str = "",
    lost: Sequence[NodeLoss] = (),
) -> Verdict | None:
    """Return the verdict on a job that is over; None where every rank succeeded.

    ``findings`` are the coordinator's diagnoses, ``stopped`` is the signal by which a user or scheduler ended the job
    (``stopped_by`` names the node, where there are several), ``lost`` are the nodes that sent no outcomes.
    """
    outcomes = tuple(outcomes)
    if stall is not None:
        return _stalled(outcomes, stall)
    if not lost and all(outcome.status == 0 for outcome in outcomes):
        return None
    failed = [outcome for outcome in outcomes if outcome.status != 0 and not outcome.ended_by_agent]
    primary = sorted((outcome for outcome in failed if not outcome.is_consequence), key=lambda each: each.failed_s)
    if stopped and all(
        outcome.status == -stopped or "KeyboardInterrupt" in outcome.record.get("bases", ()) for outcome in primary
    ):
        return _stopped(outcomes, stopped, stopped_by)
    loss = _first_loss(lost, primary)
    if loss is not None:
        return _lost(outcomes, loss, lost)
    # The last finding first: a script may have continued after an earlier group failed.
    findings = list(reversed(findings))
    named = [rank for finding in findings for rank in finding.ranks]
    if primary:
        # The coordinator saw the root cause; the clock decides between ranks that it did not name.
        first = min(primary, key=lambda each: named.index(each.rank) if each.rank in named else len(named))
        return _blamed(outcomes, [first, *(outcome for outcome in primary if outcome is not first)])
    return _blamed_by_others(outcomes, failed or [outcome for outcome in outcomes if outcome.status], findings)


def should_restart(job: Job, verdict: Verdict | None, attempt: int, *, stopped: bool = False) -> bool:
    """Return whether to start the job again after ``attempt`` ended with ``verdict``."""
    if verdict is None or stopped or verdict.cause == "stopped" or attempt >= job.max_restarts:
        return False
    # An OOM kill is a signal too.
    causes = {verdict.cause, "any"} | ({"signal"} if verdict.cause == "oom" else set())
    return bool(causes & job.restart_if)


def lagging_ranks(recordings: Mapping[int, FlightRecorder | None]) -> tuple[int, ...]:
    """Return the ranks that the others wait for: those outside any collective, else at an earlier or another call.

    Returns () where all ranks are in the same call.
    """
    inside: dict[int, Entry] = {}
    for rank, recording in recordings.items():
        if recording and recording.under_way:
            inside[rank] = recording.under_way[0]
    outside = tuple(sorted(set(recordings) - set(inside)))
    if outside:
        return outside if inside else ()
    if len({note.group for note in inside.values()}) == 1:
        first = min(note.sequence for note in inside.values())
        early = tuple(sorted(rank for rank, note in inside.items() if note.sequence == first))
        if len(early) < len(inside):
            return early
    calls = Counter((note.group, note.operation) for note in inside.values())
    most = calls.most_common(1)[0][0] if calls else None
    return tuple(sorted(rank for rank, note in inside.items() if (note.group, note.operation) != most))


def status_name(status: int) -> str:
    """Return how a process ended: ``exit status 3`` or ``SIGKILL``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _exit_code(status: int) -> int:
    """Return the exit status of a job whose culprit ended with ``status``; a culprit that exited with 0 gives 1."""
    return status if status > 0 else 128 - status if status < 0 else 1


# The kinds of verdict ---------------------------------------------------------------------------------------------


def _blamed(outcomes: tuple[Outcome, ...], primary: list[Outcome]) -> Verdict:
    first = primary[0]
    alike = sorted((outcome for outcome in primary if _did(outcome) == _did(first)), key=lambda each: each.rank)
    different = [outcome for outcome in primary if outcome not in alike]
    what = f"{ranks(outcome.rank for outcome in alike)} {_did(first)}"
    for outcome in different[:3]:
        what += f"; rank {outcome.rank} {_did(outcome)}"
    if len(different) > 3:
        what += f"; {len(different) - 3} more failed by themselves"
    culprits = [*alike, *different]
    return Verdict(
        first.cause,
        tuple(outcome.rank for outcome in culprits),
        what,
        *_why_and_fix(first),
        exit_code=_exit_code(first.status),
        traces=_traces(culprits),
        outcomes=outcomes,
    )


def _blamed_by_others(outcomes: tuple[Outcome, ...], failed: list[Outcome], findings: Sequence[Diagnosis]) -> Verdict:
    """Judge where every failure reports another rank: by the coordinator's finding, else by the first report."""
    first = min(failed, key=lambda outcome: outcome.failed_s)
    named: tuple[int, ...] = ()
    what = why = fix = ""
    if findings:
        named, what, why, fix = findings[0].ranks, findings[0].what, findings[0].why, findings[0].fix
    if not named:
        named = tuple(first.record.get("ranks", ())) or (first.rank,)
        what = str(first.record.get("message", "")).partition("\n")[0] or f"rank {first.rank} {_did(first)}"
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    early = [by_rank[rank] for rank in named if rank in by_rank and by_rank[rank].status == 0]
    if early:
        what = f"{ranks(outcome.rank for outcome in early)} ended well, but before the others were done"
        why = f"{early[0]} ended with exit status 0 after {duration(early[0].after_s)}; {why}".rstrip("; ")
        fix = "let every rank make the same calls before it exits; one that is done early still has to take part"
    return Verdict(
        "lost" if set(named) - set(by_rank) or early else "exception",
        named,
        what,
        why,
        fix,
        exit_code=_exit_code(first.status),
        traces=_traces([outcome for outcome in failed if outcome.rank in named] or [first]),
        outcomes=outcomes,
    )


def _stalled(outcomes: tuple[Outcome, ...], stall: Stall) -> Verdict:
    lagging = stall.lagging
    what = f"the job made no progress for {duration(stall.after_s)}: "
    if lagging:
        suspended = [rank for rank in lagging if "stopped" in stall.states.get(rank, "")]
        what += f"the others wait for {ranks(lagging)}"
        position = _position(stall, lagging[0])
        if suspended:
            position = f"{ranks(suspended)} is stopped (SIGSTOP or a debugger; observed)"
        why = f"from the flight recorders: {position}"
        fix = "look at the stack of that rank below: it does not reach the call that the others are in"
    else:
        what += "every rank is in the same call, and none returns"
        why = "from the flight recorders: no rank lags, so the engine or the network makes no progress (inferred)"
        fix = "look at the stacks below, and at the network between the ranks"
    return Verdict("hang", lagging, what, why, fix, exit_code=HANG_STATUS, outcomes=outcomes, stall=stall)


def _position(stall: Stall, rank: int) -> str:
    recording = stall.recordings.get(rank)
    last = recording.last if recording else None
    if last is None:
        return f"rank {rank} has called no collective"
    if last.under_way:
        return f"rank {rank} is in {last.call} at {last.site}, which is not the others' call"
    return f"rank {rank} was last in {last.call} at {last.site} and returned from it"


def _first_loss(lost: Sequence[NodeLoss], primary: Sequence[Outcome]) -> NodeLoss | None:
    """Return the node loss to blame: the first, unless a rank failed by itself before the node's last message."""
    if not lost:
        return None
    first = min(lost, key=lambda loss: (not loss.observed, loss.last_received_s))
    return None if any(outcome.failed_s < first.last_received_s for outcome in primary) else first


def _lost(outcomes: tuple[Outcome, ...], first: NodeLoss, lost: Sequence[NodeLoss]) -> Verdict:
    in_order = [first, *(loss for loss in lost if loss is not first)]
    known = {outcome.rank for outcome in outcomes}
    culprits = tuple(rank for loss in in_order for rank in loss.ranks if rank not in known)
    return Verdict("lost", culprits, "; ".join(loss.what for loss in in_order), *first.why_and_fix(), outcomes=outcomes)


def _stopped(outcomes: tuple[Outcome, ...], number: int, by: str) -> Verdict:
    reasons = {
        signal.SIGINT: "Ctrl-C or SIGINT",
        signal.SIGHUP: "SIGHUP: its terminal was closed",
        signal.SIGPIPE: "nobody reads its output any more",
    }
    reason = reasons.get(signal.Signals(number), signal.Signals(number).name)
    what = f"the job was stopped by {reason}" + (f" on {by}" if by else "")
    return Verdict("stopped", (), what, exit_code=128 + number, outcomes=outcomes)


# Sentences about one rank -----------------------------------------------------------------------------------------


def _did(outcome: Outcome) -> str:
    """Return how a rank ended, as the predicate of a sentence."""
    if outcome.oom:
        return "was killed because memory ran out"
    if outcome.status < 0:
        verb = "crashed with" if outcome.stack or -outcome.status in _CRASHES else "was ended by"
        return f"{verb} {status_name(outcome.status)}"
    record = outcome.record
    if outcome.raised:
        first = str(record.get("message", "")).partition("\n")[0]
        return f"raised {record['kind']}" + (f": {first}" if first else "")
    if record.get("end") == "exit":
        code = str(record.get("message", ""))
        return (
            f"called sys.exit({code})"
            if code.lstrip("-").isdecimal()
            else f"exited with the message: {code.splitlines()[0]}"
        )
    without = "" if record.get("end") == "program" else " without a message"
    return f"ended with exit status {outcome.status}{without}"


def _why_and_fix(outcome: Outcome) -> tuple[str, str]:
    record, status = outcome.record, outcome.status
    if outcome.oom:
        return (
            outcome.oom,
            "give the job more memory, or each rank less to do: a smaller batch, fewer DataLoader workers",
        )
    if status == -signal.SIGKILL:
        return (
            "another process sent SIGKILL, not allhands (observed); no sign that memory ran out",
            "find out what may kill it: a scheduler's limit, systemd-oomd, a person; then run the job again",
        )
    fix = "the last Python line of the stack calls what crashed" if status < 0 and outcome.stack else ""
    why = ""
    if status == -signal.SIGBUS:
        why = "probably a mapped file or shared memory that is smaller than it was (a full /dev/shm)"
    elif status < 0 and outcome.stack:
        why = "it crashed in native code (observed); its Python stack is below"
    elif -status in _CRASHES:
        why = "it crashed in native code (observed), and left no Python stack"
    elif status < 0:
        why = "the signal came from outside, not from allhands (observed)"
    elif outcome.raised and (record["kind"] in _CHILD_ERRORS or record.get("remote")):
        why = "the exception comes from a process that this rank had started, whose traceback it contains"
    elif outcome.raised and record["kind"] == "MemoryError":
        why = "an allocation of memory failed: its own limit (ulimit -v), or the machine's"
    elif outcome.raised and "SyntaxError" in record["bases"]:
        why = "the script cannot be compiled, so it did not begin"
    elif record.get("end") == "exit":
        why = f"at {record['site']}" if record.get("site") else ""
    elif not outcome.raised and record.get("end") != "program":
        why = "the script did not reach its end (observed): os._exit, or exit() in native code"
    return why, fix


def _traces(culprits: Sequence[Outcome]) -> _Grouped:
    """Return each different traceback once, with the ranks that have it."""
    return _group(
        (each.rank, each.stack if each.status < 0 and each.stack else str(each.record.get("traceback", "")))
        for each in culprits
    )


def _end(outcome: Outcome) -> str:
    if outcome.status == 0:
        return "ended well"
    if outcome.ended_by_agent:
        return f"ended by allhands ({status_name(-outcome.sent)})"
    return f"raised {outcome.record['kind']}" if outcome.raised else status_name(outcome.status)


def _group(texts: Iterable[tuple[int, str]]) -> _Grouped:
    found: dict[str, list[int]] = {}
    for rank, text in texts:
        if text:
            found.setdefault(text, []).append(rank)
    return tuple((tuple(sorted(who)), text) for text, who in found.items())


# The verdict as text -----------------------------------------------------------------------------------------------


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
        if outcome := by_rank.get(rank):
            ended = f"{status_name(outcome.status)} after {duration(outcome.after_s)}"
            lines.append(f"{outcome}, {_end(outcome) if outcome.ended_by_agent else ended}")
    if len(verdict.culprits) > _MOST_CULPRITS:
        lines.append(f"and {len(verdict.culprits) - _MOST_CULPRITS} more")
    return lines


def last_call_lines(recordings: Mapping[int, FlightRecorder | None]) -> list[str]:
    """Return the last collective of each rank, equal ones in one line."""
    calls = _group(
        (rank, f"{last.call} at {last.site}: {'did not finish' if last.under_way else last.state}")
        for rank, recording in recordings.items()
        if recording and (last := recording.last)
    )
    return ["  last calls:", *(f"    [{rank_ranges(some)}] {call}" for some, call in calls)] if calls else []


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
    in_order = sorted(stall.stacks, key=lambda rank: (rank not in stall.lagging, rank))
    stacks = _group((rank, _comparable_stack(stall, rank)) for rank in in_order)
    return [line for some, text in stacks[: _MOST_TRACES * 2] for line in _quoted(f"  stack of {ranks(some)}:", text)]


def _comparable_stack(stall: Stall, rank: int) -> str:
    """Return the stack without the thread ids, which differ between processes that do the same."""
    lines = stall.stacks[rank].rstrip().splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("Thread 0x", "Current thread 0x")):
            lines[number] = line.partition(" 0x")[0] + " (most recent call first):"
    return "\n".join(lines) or f"(no stack: the process is {stall.states.get(rank) or 'gone'})"


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
