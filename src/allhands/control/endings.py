"""The words of how a group ends: each function takes what was observed of a rank and returns a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping

from ..diagnosis import Diagnosis
from .arrival import Arrival
from .comparison import Difference
from .messages import Failed

__all__ = ["differ", "failed", "lost"]


def differ(found: Difference, arrivals: Mapping[int, Arrival]) -> Diagnosis:
    """Ranks of one group told of different calls."""
    hosts = [arrivals[rank].claim.identity.host for rank in found.odd if rank in arrivals]
    return Diagnosis(
        "collective-mismatch",
        "ranks of one group made different calls",
        who=f"the coordinator, from what each rank says of its call {found.number} in the group {found.group!r}",
        why="\n".join(found.lines),
        fix="make every rank of the group call the same operations in the same order, with tensors that fit",
        ranks=found.odd,
        hosts=tuple(dict.fromkeys(hosts)),
    )


def failed(arrival: Arrival, message: Failed) -> Diagnosis:
    """A rank raised and said so."""
    return Diagnosis(
        "peer-failed",
        f"rank {arrival.rank} raised {message.kind}" + (f": {message.message}" if message.message else ""),
        who=str(arrival),
        why="it said so before it ended; its traceback is below",
        fix=f"mend the {message.kind} on rank {arrival.rank}; the other ranks only followed",
        ranks=(arrival.rank,),
        hosts=(arrival.claim.identity.host,),
        traceback=message.traceback,
    )


def lost(arrival: Arrival, how: str) -> Diagnosis:
    """A rank is gone without a goodbye."""
    host = arrival.claim.identity.host
    if "timed out" in how or "unreachable" in how.lower():
        fix = (
            f"see that {host} is up and its network is (ping, `ip link`), and run the job again; the process "
            "itself may be alive"
        )
    else:
        fix = (
            f"look at the end of rank {arrival.rank}'s output and at the kernel log (dmesg) of {host}: "
            "killed from outside, out of memory, a crash in native code, or os._exit; then run the job again"
        )
    return Diagnosis(
        "peer-lost",
        f"rank {arrival.rank} is gone",
        who=str(arrival),
        why=f"{how}, and it had not said goodbye (observed)",
        fix=fix,
        ranks=(arrival.rank,),
        hosts=(host,),
    )
