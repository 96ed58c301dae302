"""A barrier that says who did not come to it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..diagnosis import Diagnosis, duration, ranks
from ..errors import AllhandsError, error, fail

if TYPE_CHECKING:
    from .hostgroup import HostGroup

__all__ = ["absent", "monitored_barrier"]

# How long ranks may take to say what they are doing instead. Whoever waits has waited long enough already.
_ASK_S = 0.3


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> Any:
    """Wait for every rank of the group, at most ``timeout``, and raise CollectiveTimeout naming who did not come.

    Every rank of the group calls it. Without ``wait_all_ranks`` the first who is missing is named, with it all of
    them. As torch's, which refuses every backend that is not called "gloo".
    """
    chosen: Any = group if group is not None else dist.group.WORLD
    if chosen is dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(chosen) == dist.Backend.GLOO:
        # torch says what it has to say to those who are not in the group, and knows its own default timeout.
        return dist.monitored_barrier(group, timeout, wait_all_ranks)
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    if timeout is not None and timeout <= timedelta(0):
        raise fail(
            "invalid-argument",
            f"monitored_barrier: a timeout of {timeout.total_seconds():g} s leaves nobody time to come",
            who="this process",
            fix="give a timeout above 0, or none for that of the group",
        )
    if timeout is None:
        return chosen.monitored_barrier(wait_all_ranks=wait_all_ranks)
    return chosen.monitored_barrier(timeout, wait_all_ranks)


def absent(group: HostGroup, waited_s: float, site: str, *, wait_all_ranks: bool) -> AllhandsError:
    """Return the exception for a barrier of ``group`` that not everyone has come to; it ends the group for all."""
    member = group.session.member
    missing = [group.ranks[rank] for rank in group.engine.missing()]
    everyone = {status.rank: status for status in member.statuses(_ASK_S)}
    named = missing if wait_all_ranks else missing[:1]
    more = len(missing) - len(named)
    lines = [
        f"rank {rank} is {everyone[rank].doing}" + _for(everyone[rank].since_s)
        for rank in named[:16]
        if rank in everyone
    ]
    return error(
        member.end_group(
            Diagnosis(
                "collective-timeout",
                f"monitored_barrier did not finish within {duration(waited_s)}: "
                + (f"{ranks(named)} did not come" if named else "the last rank came just too late")
                + (f", nor did {more} more (wait_all_ranks=True names all)" if more else ""),
                who=f"rank {member.rank} ({socket.gethostname()}, pid {os.getpid()}) in monitored_barrier at {site}",
                why="; ".join(lines),
                fix=f"see what keeps {ranks(named) if named else 'the last rank'} from coming to {site} in time, or "
                "give the call a longer timeout (timeout=)",
                ranks=tuple(named),
                hosts=tuple(dict.fromkeys(everyone[rank].host for rank in named if rank in everyone)),
            )
        )
    )


def _for(since_s: float) -> str:
    return f" for {duration(since_s)}" if since_s >= 0.1 else ""
