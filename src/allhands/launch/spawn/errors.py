"""What the parent of `allhands.spawn` raises: the verdict on its ranks, as an exception that is torch's too."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ...diagnosis import Diagnosis, ranks
from ...errors import AllhandsError, SpawnFailed
from .. import verdict_text
from ..verdict import Outcome, Verdict

__all__ = ["SpawnExited", "SpawnRaised", "explain"]

# A parent prints the whole exception; the first tracebacks tell who is to blame.
_MOST_TRACES = 4


class SpawnRaised(SpawnFailed, ProcessRaisedException):
    """A rank raised. `.error_index` is its rank, `.error_pid` its process, `__cause__` what it raised."""

    def __init__(self, diagnosis: Diagnosis, error_index: int, error_pid: int) -> None:
        AllhandsError.__init__(self, diagnosis)
        self.msg = str(self)
        self.error_index, self.error_pid = error_index, error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.diagnosis, self.error_index, self.error_pid))


class SpawnExited(SpawnFailed, ProcessExitedException):
    """A rank exited, or was killed: `.exit_code` below 0 is a signal, whose name is `.signal_name`."""

    def __init__(
        self, diagnosis: Diagnosis, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        AllhandsError.__init__(self, diagnosis)
        self.msg = str(self)
        self.error_index, self.error_pid = error_index, error_pid
        self.exit_code, self.signal_name = exit_code, signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self.diagnosis, self.error_index, self.error_pid, self.exit_code, self.signal_name)
        return (type(self), given)


for _class in (SpawnRaised, SpawnExited):
    # The name to catch it by, as for the other exceptions.
    _class.__module__ = "allhands"


def explain(verdict: Verdict, leftovers: list[str], causes: dict[int, BaseException]) -> AllhandsError:
    """Return the exception for ``verdict``; ``causes`` are the exceptions of ranks that could be pickled."""
    by_rank = {outcome.rank: outcome for outcome in verdict.outcomes}
    failed = [by_rank[rank] for rank in verdict.culprits if rank in by_rank and by_rank[rank].status]
    # A rank that is to blame although it ended well has no exception to raise; whom it left does.
    first = (failed or [outcome for outcome in verdict.outcomes if outcome.status])[0]
    calls = verdict_text.last_calls({outcome.rank: outcome.board for outcome in verdict.outcomes})
    why = [verdict.why, *(line.removeprefix("  ") for line in calls)]
    if leftovers:
        why.append(f"ended what the ranks had left behind: {'; '.join(leftovers[:8])}")
    who = verdict_text.culprits(verdict)
    who += [f"{ranks(some)} only followed: {did}" for some, did in verdict.followers if did != "ended well"]
    diagnosis = Diagnosis(
        "spawn-failed",
        verdict.what,
        who="\n".join(who),
        why="\n".join(line for line in why if line),
        fix=verdict.fix or (f"see the traceback of {ranks(verdict.traces[0][0])} below" if verdict.traces else ""),
        ranks=verdict.culprits,
        hosts=tuple(dict.fromkeys(outcome.host for outcome in failed)),
        traceback=_traces(verdict),
    )
    diagnosis = _early(first, diagnosis)
    if first.raised:
        made: SpawnFailed = SpawnRaised(diagnosis, first.rank, first.pid)
    else:
        made = SpawnExited(diagnosis, first.rank, first.pid, first.status, _signal(first.status))
    made.__cause__ = causes.get(first.rank)
    return made


def _early(first: Outcome, diagnosis: Diagnosis) -> Diagnosis:
    """Say of a process that never came to the function why that is."""
    if first.record or first.status < 0:
        return diagnosis
    why = "it ended before the function was called: the script could not be imported again, or the function not found"
    return msgspec.structs.replace(
        diagnosis,
        why=why + " (observed; what it said is above)",
        fix="see that the script can be imported by a process that does not run it, with the function at its top level",
    )


def _traces(verdict: Verdict) -> str:
    """Return the tracebacks of the culprits, each once; where there are several, with their ranks."""
    if len(verdict.traces) == 1:
        return verdict.traces[0][1]
    parts = [f"of {ranks(who)}:\n{text.rstrip()}" for who, text in verdict.traces[:_MOST_TRACES]]
    return "\n".join(parts)


def _signal(status: int) -> str | None:
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"<Unknown signal {-status}>"
