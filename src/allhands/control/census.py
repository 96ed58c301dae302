"""What everyone is doing, as far as it is worth telling."""

from __future__ import annotations

from collections import Counter

from .messages import Status

__all__ = ["telling"]

# As many as a person reads about; messages name 16.
_MOST_TOLD = 64


def telling(everyone: list[Status]) -> list[Status]:
    """Return what is worth telling of ``everyone``: all of a small group; of a large one, who stands out.

    All ranks may ask at the same time, and n answers about n ranks would be n * n.
    """
    if len(everyone) <= _MOST_TOLD:
        return everyone
    most = Counter(status.doing for status in everyone).most_common(1)[0][0]
    odd = [status for status in everyone if status.state != "busy" or status.doing != most]
    return odd[:_MOST_TOLD] or everyone[:_MOST_TOLD]
