"""What everyone is doing, as far as it is worth telling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from .messages import Status

if TYPE_CHECKING:
    from .connection import Connection

__all__ = ["everyone", "telling"]

# Whoever has not answered a question for this long is called silent (never dead).
_SILENT_S = 0.9

# As many as a person reads about; messages name 16.
_MOST_TOLD = 64


def telling(found: list[Status]) -> list[Status]:
    """Return what is worth telling of ``found``: all of a small group; of a large one, who stands out.

    All ranks may ask at the same time, and n answers about n ranks would be n * n.
    """
    if len(found) <= _MOST_TOLD:
        return found
    most = Counter(status.doing for status in found).most_common(1)[0][0]
    odd = [status for status in found if status.state != "busy" or status.doing != most]
    return odd[:_MOST_TOLD] or found[:_MOST_TOLD]


def everyone(members: Mapping[int, Connection], left: Mapping[int, Status], now: float) -> list[Status]:
    """Return what each of ``members`` is doing, as it said last; those who ``left`` have said so."""
    statuses = []
    for rank, connection in sorted(members.items()):
        arrival = connection.arrival
        if arrival is None:
            continue
        identity = arrival.claim.identity
        if rank in left:
            statuses.append(msgspec.structs.replace(left[rank], since_s=now - left[rank].since_s))
        elif connection.closed:
            statuses.append(Status(rank, "gone", "its connection closed", 0.0, identity.host, identity.pid))
        elif connection.pending and now - connection.asked >= _SILENT_S:
            quiet = now - connection.heard_at
            statuses.append(Status(rank, "silent", "does not answer", quiet, identity.host, identity.pid))
        else:
            said = connection.status
            doing, since = (said.doing, said.since_s) if said is not None else ("not asked", 0.0)
            statuses.append(Status(rank, "busy", doing, since, identity.host, identity.pid))
    return statuses
