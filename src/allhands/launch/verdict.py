"""Who is to blame for a dead job, and who only followed: by cause, not by clock. Pure: outcomes in, verdict out."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, duration, ranks
from ..diagnosis.engine_errors import TRANSPORT
from ..observe.flight_recorder import FlightRecorder
from .multinode.node_loss import Loss, words_of
from .stall import Hang

__all__ = ["HANG_STATUS", "Outcome", "Verdict", "judge", "status_word"]

# What `timeout` exits with.
HANG_STATUS = 124

# Signals that a process brings on itself, in native code.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}

# Exceptions that pass on the end of a process that the rank itself had started.
_OF_A_CHILD = {
    "ProcessRaisedException",
    "ProcessExitedException",
    "BrokenProcessPool",
    "CalledProcessError",
    "SpawnRaised",
    "SpawnExited",
}

# Exceptions of ours that pass on another rank's failure; their subclasses are among the bases of a record.
_OF_ANOTHER = {"GroupEnded", "StoreTimeout"}


class Outcome(msgspec.Struct, frozen=True):
    """How one worker ended, and what it left. ``status`` below 0 is a signal; ``sent`` is what the agent had sent."""

    rank: int
    host: str
    pid: int
    status: int
    sent: int = 0
    sent_s: float = 0.0
    ended_s: float = 0.0
    after_s: float = 0.0
    record: dict[str, Any] = msgspec.field(default_factory=dict)
    stack: str = ""
    board: FlightRecorder | None = None
    memory: str = ""
    # Which node it was on, where there are several.
    node: int | None = None

    def __str__(self) -> str:
        place = self.host if self.node is None else f"node {self.node}, {self.host}"
        return f"rank {self.rank} ({place}, pid {self.pid})"

    @property
    def at_s(self) -> float:
        """When its own end began: the exception, where there was one."""
        return float(self.record.get("at_s", self.ended_s))

    @property
    def raised(self) -> bool:
        """Whether an exception ended the script."""
        return self.record.get("end") == "raised"

    @property
    def ended_by_agent(self) -> bool:
        """Whether the agent had asked it to end before it ended by itself."""
        return bool(self.sent) and not (self.record.get("end") in {"raised", "exit"} and self.at_s < self.sent_s)

    @property
    def follows(self) -> bool:
        """Whether its error only passes on another rank's."""
        # The ranks that it names are of another job, which this rank had started.
        if not self.raised or self.record["kind"] in _OF_A_CHILD:
            return False
        if "slug" in self.record and self.record["ranks"]:
            return self.rank not in self.record["ranks"] or bool(_OF_ANOTHER & set(self.record["bases"]))
        if _OF_ANOTHER & set(self.record["bases"]):
            return True
        return "RuntimeError" in self.record["bases"] and bool(TRANSPORT.search(self.record["message"]))

    @property
    def cause(self) -> str:
        """Why it ended, in one of the words that --restart-if takes."""
        if self.memory:
            return "oom"
        if self.status < 0:
            return "signal"
        return "exception" if self.raised else "exit"


class Verdict(msgspec.Struct, frozen=True):
    """Who is to blame. ``culprits`` are ranks, the first failure by cause first."""

    cause: str
    culprits: tuple[int, ...]
    what: str
    why: str
    fix: str
    exit_code: int
    # Traceback or stack of the culprits, each with the ranks that share it.
    traces: tuple[tuple[tuple[int, ...], str], ...] = ()
    # What became of the others, each with the ranks of which it is true.
    followers: tuple[tuple[tuple[int, ...], str], ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    hanging: Hang | None = None


def judge(
    outcomes: Sequence[Outcome],
    findings: Sequence[Diagnosis] = (),
    hanging: Hang | None = None,
    stopped: int = 0,
    *,
    by: str = "",
    lost: Sequence[Loss] = (),
) -> Verdict | None:
    """Return the verdict on a job that is over, None where it went well.

    ``findings`` is what the coordinator saw, ``hanging`` what was found when the job stood still, ``stopped`` the
    signal by which someone ended it (``by`` which node, where there are several), ``lost`` the nodes of which no
    outcomes came.
    """
    if hanging is not None:
        return _hung(outcomes, hanging)
    if not lost and all(outcome.status == 0 for outcome in outcomes):
        return None
    failed = [outcome for outcome in outcomes if outcome.status != 0 and not outcome.ended_by_agent]
    own = sorted((outcome for outcome in failed if not outcome.follows), key=lambda outcome: outcome.at_s)
    if stopped and not [outcome for outcome in own if not _interrupted(outcome, stopped)]:
        return _stopped(outcomes, stopped, by)
    gone = _to_blame(lost, own)
    if gone is not None:
        return _lost(outcomes, gone, lost)
    # The last finding first: a script may have gone on after an earlier group failed.
    findings = list(reversed(findings))
    named = [rank for finding in findings for rank in finding.ranks]
    if own:
        # The coordinator saw the first cause; the clock only decides between those that it did not see.
        first = min(own, key=lambda outcome: named.index(outcome.rank) if outcome.rank in named else len(named))
        return _blamed(outcomes, [first, *(outcome for outcome in own if outcome is not first)])
    return _pointed_at(outcomes, failed or [outcome for outcome in outcomes if outcome.status], findings)


def status_word(status: int) -> str:
    """Write how a process ended: ``exit status 3`` or ``SIGKILL``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _code(status: int) -> int:
    """Return the exit status of a job whose culprit ended so; a culprit that ended well still failed the job."""
    return status if status > 0 else 128 - status if status < 0 else 1


def _interrupted(outcome: Outcome, number: int) -> bool:
    return outcome.status == -number or "KeyboardInterrupt" in outcome.record.get("bases", ())


# The kinds of verdict ---------------------------------------------------------------------------------------------


def _blamed(outcomes: Sequence[Outcome], own: list[Outcome]) -> Verdict:
    first = own[0]
    alike = sorted((outcome for outcome in own if _did(outcome) == _did(first)), key=lambda outcome: outcome.rank)
    others = [outcome for outcome in own if outcome not in alike]
    what = f"{ranks(outcome.rank for outcome in alike)} {_did(first)}"
    for outcome in others[:3]:
        what += f"; rank {outcome.rank} {_did(outcome)}"
    if len(others) > 3:
        what += f"; {len(others) - 3} more failed by themselves"
    culprits = (*(outcome.rank for outcome in alike), *(outcome.rank for outcome in others))
    return Verdict(
        cause=first.cause,
        culprits=culprits,
        what=what,
        why=_why(first),
        fix=_fix(first),
        exit_code=_code(first.status),
        traces=_traces([*alike, *others]),
        followers=_followers(outcomes, culprits),
        outcomes=tuple(outcomes),
    )


def _pointed_at(outcomes: Sequence[Outcome], failed: list[Outcome], findings: Sequence[Diagnosis]) -> Verdict:
    """All that failed only pass on what others did: believe the coordinator, else what most of them say."""
    first = min(failed, key=lambda outcome: outcome.at_s)
    named: tuple[int, ...] = ()
    what = why = fix = ""
    for finding in findings:
        named, what, why, fix = finding.ranks, finding.what, finding.why, finding.fix
        break
    if not named:
        named = tuple(first.record.get("ranks", ())) or (first.rank,)
        what = str(first.record.get("message", "")).partition("\n")[0] or f"rank {first.rank} {_did(first)}"
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    early = [by_rank[rank] for rank in named if rank in by_rank and by_rank[rank].status == 0]
    if early:
        what = f"{ranks(outcome.rank for outcome in early)} ended well, but before the others were done"
        why = f"{early[0]} ended with exit status 0 after {duration(early[0].after_s)}; {why}".rstrip("; ")
        fix = "let every rank make the same calls before it ends; one that is done early still has to take part"
    return Verdict(
        cause="lost" if not named or set(named) - set(by_rank) or early else "exception",
        culprits=named,
        what=what,
        why=why,
        fix=fix,
        exit_code=_code(first.status),
        traces=_traces([outcome for outcome in failed if outcome.rank in named] or [first]),
        followers=_followers(outcomes, named),
        outcomes=tuple(outcomes),
    )


def _hung(outcomes: Sequence[Outcome], hanging: Hang) -> Verdict:
    late = hanging.behind
    waits = duration(hanging.after_s)
    what = f"the job stood still for {waits}: "
    stopped = [rank for rank in late if "stopped" in hanging.states.get(rank, "")]
    if late:
        what += f"the others wait for {ranks(late)}"
        why = "from the boards: " + (
            f"{ranks(stopped)} is stopped (SIGSTOP or a debugger; observed)" if stopped else _where(hanging, late[0])
        )
        fix = "look at the stack of that rank below: it does not come to the call that the others are in"
    else:
        what += "every rank is in the same call, and none comes out"
        why = "from the boards: nobody is behind, so the engine or the network does not move (inferred)"
        fix = "look at the stacks below, and at the network between the ranks"
    return Verdict(
        cause="hang",
        culprits=late,
        what=what,
        why=why,
        fix=fix,
        exit_code=HANG_STATUS,
        followers=(),
        outcomes=tuple(outcomes),
        hanging=hanging,
    )


def _where(hanging: Hang, rank: int) -> str:
    board = hanging.boards.get(rank)
    last = board.last if board else None
    if last is None:
        return f"rank {rank} has called no collective"
    if last.under_way:
        return f"rank {rank} is in {last.call} at {last.site}, which is not the others' call"
    return f"rank {rank} was last in {last.call} at {last.site} and came out of it"


def _to_blame(lost: Sequence[Loss], own: Sequence[Outcome]) -> Loss | None:
    """Return the node whose loss is to blame: the first, unless a rank failed by itself before that was last heard."""
    if not lost:
        return None
    first = min(lost, key=lambda loss: (not loss.observed, loss.at_s))
    return None if any(outcome.at_s < first.at_s for outcome in own) else first


def _lost(outcomes: Sequence[Outcome], first: Loss, lost: Sequence[Loss]) -> Verdict:
    why, fix = words_of(first)
    others = [loss for loss in lost if loss is not first]
    known = {outcome.rank for outcome in outcomes}
    return Verdict(
        cause="lost",
        culprits=tuple(rank for loss in (first, *others) for rank in loss.ranks if rank not in known),
        what="; ".join([first.what, *(loss.what for loss in others)]),
        why=why,
        fix=fix,
        exit_code=1,
        followers=_followers(outcomes, ()),
        outcomes=tuple(outcomes),
    )


def _stopped(outcomes: Sequence[Outcome], number: int, by: str) -> Verdict:
    name = signal.Signals(number).name
    said = {
        signal.SIGINT: "Ctrl-C or SIGINT",
        signal.SIGHUP: "SIGHUP: its terminal was closed",
        signal.SIGPIPE: "nobody reads its output any more",
    }
    return Verdict(
        cause="stopped",
        culprits=(),
        what=f"the job was stopped by {said.get(signal.Signals(number), name)}" + (f" on {by}" if by else ""),
        why="",
        fix="",
        exit_code=128 + number,
        followers=_followers(outcomes, ()),
        outcomes=tuple(outcomes),
    )


# Words ------------------------------------------------------------------------------------------------------------


def _did(outcome: Outcome) -> str:
    """Say what a rank did to end, as the predicate of a sentence."""
    if outcome.memory:
        return "was killed because memory ran out"
    if outcome.status < 0:
        verb = "crashed with" if outcome.stack or -outcome.status in _CRASHES else "was ended by"
        return f"{verb} {status_word(outcome.status)}"
    record = outcome.record
    if outcome.raised:
        first = str(record.get("message", "")).partition("\n")[0]
        return f"raised {record['kind']}" + (f": {first}" if first else "")
    if record.get("end") == "exit":
        code = str(record.get("message", ""))
        return f"called sys.exit({code})" if code.lstrip("-").isdecimal() else f"exited, saying: {code.splitlines()[0]}"
    word = "" if record.get("end") == "program" else " and said nothing"
    return f"ended with exit status {outcome.status}{word}"


def _why(outcome: Outcome) -> str:
    if outcome.memory:
        return outcome.memory
    record = outcome.record
    if outcome.status == -signal.SIGKILL:
        return "someone sent SIGKILL, not allhands (observed); no sign that memory ran out"
    if outcome.status == -signal.SIGBUS:
        return "probably a mapped file or shared memory that is smaller than it was (a full /dev/shm)"
    if outcome.status < 0 and outcome.stack:
        return "the kernel stopped it in native code (observed); its Python stack is below"
    if -outcome.status in _CRASHES:
        return "it ended in native code (observed), and left no Python stack with the launcher"
    if outcome.status < 0:
        return "the signal came from outside, not from allhands (observed)"
    if outcome.raised and (record["kind"] in _OF_A_CHILD or record.get("remote")):
        return "the exception comes from a process that this rank had started; that one's traceback is in it"
    if outcome.raised and record["kind"] == "MemoryError":
        return "memory was refused to it: its own limit (ulimit -v), or the machine's"
    if outcome.raised and "SyntaxError" in record["bases"]:
        return "the script cannot be compiled, so it did not begin"
    if record.get("end") == "exit":
        return f"at {record['site']}" if record.get("site") else ""
    if outcome.raised or record.get("end") == "program":
        return ""
    return "the script did not come to its end (observed): os._exit, or exit() in native code"


def _fix(outcome: Outcome) -> str:
    if outcome.memory:
        return "give the job more memory, or each rank less to do: a smaller batch, fewer DataLoader workers"
    if outcome.status == -signal.SIGKILL:
        return "ask who may kill it: a scheduler's limit, systemd-oomd, a person; then run the job again"
    if outcome.status < 0 and outcome.stack:
        return "the last Python line of the stack calls what crashed"
    return ""


def _traces(culprits: Sequence[Outcome]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return each different traceback once, with the ranks that have it."""
    found: dict[str, list[int]] = {}
    for outcome in culprits:
        text = outcome.stack if outcome.status < 0 and outcome.stack else str(outcome.record.get("traceback", ""))
        if text:
            found.setdefault(text, []).append(outcome.rank)
    return tuple((tuple(sorted(who)), text) for text, who in found.items())


def _followers(outcomes: Sequence[Outcome], culprits: Sequence[int]) -> tuple[tuple[tuple[int, ...], str], ...]:
    found: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.rank in culprits:
            continue
        if outcome.status == 0:
            words = "ended well"
        elif outcome.ended_by_agent:
            words = f"ended by allhands ({status_word(-outcome.sent)})"
        elif outcome.raised:
            words = f"raised {outcome.record['kind']}"
        else:
            words = status_word(outcome.status)
        found.setdefault(words, []).append(outcome.rank)
    return tuple((tuple(sorted(who)), words) for words, who in found.items())
