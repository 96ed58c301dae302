"""Which rank is to blame for a dead job, and which failures are consequences: by cause, not by clock. Pure."""

from __future__ import annotations

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
    "NodeLoss",
    "Outcome",
    "Stall",
    "Verdict",
    "judge",
    "lagging_ranks",
    "should_restart",
    "status_name",
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
    """What every worker was doing at one moment, by rank: flight recorder, stacks of all threads, kernel state."""

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
    """Who is to blame. ``culprits`` are ranks, the root cause first."""

    cause: str
    culprits: tuple[int, ...]
    what: str
    why: str
    fix: str
    exit_code: int
    # Tracebacks or stacks of the culprits.
    traces: _Grouped = ()
    # How the other ranks ended.
    others: _Grouped = ()
    outcomes: tuple[Outcome, ...] = ()
    stall: Stall | None = None


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
    if stall is not None:
        return _stalled(outcomes, stall)
    if not lost and all(outcome.status == 0 for outcome in outcomes):
        return None
    failed = [outcome for outcome in outcomes if outcome.status != 0 and not outcome.ended_by_agent]
    primary = sorted((outcome for outcome in failed if not outcome.is_consequence), key=lambda each: each.failed_s)
    if stopped and all(_interrupted(outcome, stopped) for outcome in primary):
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


def _interrupted(outcome: Outcome, number: int) -> bool:
    return outcome.status == -number or "KeyboardInterrupt" in outcome.record.get("bases", ())


# The kinds of verdict ---------------------------------------------------------------------------------------------


def _blamed(outcomes: Sequence[Outcome], primary: list[Outcome]) -> Verdict:
    first = primary[0]
    alike = sorted((outcome for outcome in primary if _did(outcome) == _did(first)), key=lambda each: each.rank)
    different = [outcome for outcome in primary if outcome not in alike]
    what = f"{ranks(outcome.rank for outcome in alike)} {_did(first)}"
    for outcome in different[:3]:
        what += f"; rank {outcome.rank} {_did(outcome)}"
    if len(different) > 3:
        what += f"; {len(different) - 3} more failed by themselves"
    culprits = tuple(outcome.rank for outcome in (*alike, *different))
    return Verdict(
        cause=first.cause,
        culprits=culprits,
        what=what,
        why=_why(first),
        fix=_fix(first),
        exit_code=_exit_code(first.status),
        traces=_traces([*alike, *different]),
        others=_others(outcomes, culprits),
        outcomes=tuple(outcomes),
    )


def _blamed_by_others(outcomes: Sequence[Outcome], failed: list[Outcome], findings: Sequence[Diagnosis]) -> Verdict:
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
        cause="lost" if not named or set(named) - set(by_rank) or early else "exception",
        culprits=named,
        what=what,
        why=why,
        fix=fix,
        exit_code=_exit_code(first.status),
        traces=_traces([outcome for outcome in failed if outcome.rank in named] or [first]),
        others=_others(outcomes, named),
        outcomes=tuple(outcomes),
    )


def _stalled(outcomes: Sequence[Outcome], stall: Stall) -> Verdict:
    lagging = stall.lagging
    what = f"the job made no progress for {duration(stall.after_s)}: "
    suspended = [rank for rank in lagging if "stopped" in stall.states.get(rank, "")]
    if lagging:
        what += f"the others wait for {ranks(lagging)}"
        why = "from the flight recorders: " + (
            f"{ranks(suspended)} is stopped (SIGSTOP or a debugger; observed)"
            if suspended
            else _position(stall, lagging[0])
        )
        fix = "look at the stack of that rank below: it does not reach the call that the others are in"
    else:
        what += "every rank is in the same call, and none returns"
        why = "from the flight recorders: no rank lags, so the engine or the network makes no progress (inferred)"
        fix = "look at the stacks below, and at the network between the ranks"
    return Verdict(
        cause="hang",
        culprits=lagging,
        what=what,
        why=why,
        fix=fix,
        exit_code=HANG_STATUS,
        outcomes=tuple(outcomes),
        stall=stall,
    )


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


def _lost(outcomes: Sequence[Outcome], first: NodeLoss, lost: Sequence[NodeLoss]) -> Verdict:
    why, fix = first.why_and_fix()
    in_order = [first, *(loss for loss in lost if loss is not first)]
    known = {outcome.rank for outcome in outcomes}
    return Verdict(
        cause="lost",
        culprits=tuple(rank for loss in in_order for rank in loss.ranks if rank not in known),
        what="; ".join(loss.what for loss in in_order),
        why=why,
        fix=fix,
        exit_code=1,
        others=_others(outcomes, ()),
        outcomes=tuple(outcomes),
    )


def _stopped(outcomes: Sequence[Outcome], number: int, by: str) -> Verdict:
    reasons = {
        signal.SIGINT: "Ctrl-C or SIGINT",
        signal.SIGHUP: "SIGHUP: its terminal was closed",
        signal.SIGPIPE: "nobody reads its output any more",
    }
    reason = reasons.get(signal.Signals(number), signal.Signals(number).name)
    return Verdict(
        cause="stopped",
        culprits=(),
        what=f"the job was stopped by {reason}" + (f" on {by}" if by else ""),
        why="",
        fix="",
        exit_code=128 + number,
        others=_others(outcomes, ()),
        outcomes=tuple(outcomes),
    )


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


def _why(outcome: Outcome) -> str:
    if outcome.oom:
        return outcome.oom
    record = outcome.record
    if outcome.status == -signal.SIGKILL:
        return "another process sent SIGKILL, not allhands (observed); no sign that memory ran out"
    if outcome.status == -signal.SIGBUS:
        return "probably a mapped file or shared memory that is smaller than it was (a full /dev/shm)"
    if outcome.status < 0 and outcome.stack:
        return "it crashed in native code (observed); its Python stack is below"
    if -outcome.status in _CRASHES:
        return "it crashed in native code (observed), and left no Python stack"
    if outcome.status < 0:
        return "the signal came from outside, not from allhands (observed)"
    if outcome.raised and (record["kind"] in _CHILD_ERRORS or record.get("remote")):
        return "the exception comes from a process that this rank had started, whose traceback it contains"
    if outcome.raised and record["kind"] == "MemoryError":
        return "an allocation of memory failed: its own limit (ulimit -v), or the machine's"
    if outcome.raised and "SyntaxError" in record["bases"]:
        return "the script cannot be compiled, so it did not begin"
    if record.get("end") == "exit":
        return f"at {record['site']}" if record.get("site") else ""
    if outcome.raised or record.get("end") == "program":
        return ""
    return "the script did not reach its end (observed): os._exit, or exit() in native code"


def _fix(outcome: Outcome) -> str:
    if outcome.oom:
        return "give the job more memory, or each rank less to do: a smaller batch, fewer DataLoader workers"
    if outcome.status == -signal.SIGKILL:
        return "find out what may kill it: a scheduler's limit, systemd-oomd, a person; then run the job again"
    if outcome.status < 0 and outcome.stack:
        return "the last Python line of the stack calls what crashed"
    return ""


def _traces(culprits: Sequence[Outcome]) -> _Grouped:
    """Return each different traceback once, with the ranks that have it."""
    return _group(
        (each.rank, each.stack if each.status < 0 and each.stack else str(each.record.get("traceback", "")))
        for each in culprits
    )


def _others(outcomes: Sequence[Outcome], culprits: Sequence[int]) -> _Grouped:
    return _group((each.rank, _end(each)) for each in outcomes if each.rank not in culprits)


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
