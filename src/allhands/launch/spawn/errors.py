"""The exceptions of `allhands.spawn`: the verdict on its ranks, as subclasses of torch's exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from ...diagnosis import Diagnosis, ranks
from ...errors import AllhandsError, SpawnFailed
from ..verdict import Verdict, culprit_lines, last_call_lines, status_name

__all__ = ["SpawnExited", "SpawnRaised", "spawn_error"]

# The whole exception is printed; more tracebacks than this add nothing.
_MOST_TRACES = 4

_MOST_LEFTOVERS = 8


class SpawnRaised(SpawnFailed, ProcessRaisedException):
    """A rank raised. `.error_index` is its rank, `.error_pid` its process, `__cause__` its exception."""

    def __init__(self, diagnosis: Diagnosis, error_index: int, error_pid: int) -> None:
        AllhandsError.__init__(self, diagnosis)
        self.msg = str(self)
        self.error_index, self.error_pid = error_index, error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.diagnosis, self.error_index, self.error_pid))


class SpawnExited(SpawnFailed, ProcessExitedException):
    """A rank exited or was killed: `.exit_code` below 0 is a signal, whose name is `.signal_name`."""

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
    # The public name, as of the other exceptions.
    _class.__module__ = "allhands"


def spawn_error(
    verdict: Verdict, leftovers: Sequence[str], causes: Mapping[int, BaseException | None]
) -> AllhandsError:
    """Return the exception for ``verdict``; ``causes`` has the ranks' own exceptions where they could be unpickled."""
    by_rank = {outcome.rank: outcome for outcome in verdict.outcomes}
    failed = [by_rank[rank] for rank in verdict.culprits if rank in by_rank and by_rank[rank].status]
    # A culprit that exited with 0 has no exception; a rank that failed because of it does.
    first = (failed or [outcome for outcome in verdict.outcomes if outcome.status])[0]
    calls = last_call_lines({outcome.rank: outcome.recording for outcome in verdict.outcomes})
    why = [verdict.why, *(line.removeprefix("  ") for line in calls)]
    if leftovers:
        why.append(f"ended what the ranks had left behind: {'; '.join(leftovers[:_MOST_LEFTOVERS])}")
    who = culprit_lines(verdict)
    who += [f"{ranks(some)} only followed: {end}" for some, end in verdict.others if end != "ended well"]
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
    if not first.record and first.status >= 0:
        diagnosis = msgspec.structs.replace(
            diagnosis,
            why="it ended before the function was called: the script could not be imported again, or the function not "
            "found (observed; its output is above)",
            fix="see that the script can be imported by a process that does not run it, with the function at its top "
            "level",
        )
    signal_name = status_name(first.status) if first.status < 0 else None
    found: SpawnFailed = SpawnExited(diagnosis, first.rank, first.pid, first.status, signal_name)
    if first.raised:
        found = SpawnRaised(diagnosis, first.rank, first.pid)
    found.__cause__ = causes.get(first.rank)
    return found


def _traces(verdict: Verdict) -> str:
    """Return the tracebacks of the culprits, each once; where there are several, with their ranks."""
    if len(verdict.traces) == 1:
        return verdict.traces[0][1]
    parts = [f"of {ranks(who)}:\n{text.rstrip()}" for who, text in verdict.traces[:_MOST_TRACES]]
    return "\n".join(parts)
