"""The floor: the least time in which the bytes of the staged scheme can be moved, at the speed of plain copies.

Measured in the same run as the engines and in turn with them, because on a shared machine the speed of memory
changes from minute to minute. Needs no torch.
"""

from __future__ import annotations

from .operations import OPERATIONS

__all__ = ["COPIES", "LEAST_JUDGED", "copied", "floor_s", "speed"]

# The two copies that are timed, and whether all ranks that take part make them at the same time (STREAM's way) or
# rank 0 alone.
COPIES = {"memcpy": False, "stream": True}

# Below this a copy is mostly the call of it, so its speed is that of a copy of this size, which every core's cache
# holds twice.
_LEAST_COPIED = 64 << 10

# Below this an operation is mostly meetings and calls: how many times the floor it takes says nothing.
LEAST_JUDGED = 64 << 10


def copied(size: int) -> int:
    """Return how many bytes a copy moves from one place to another to find the floor of ``size`` bytes."""
    return max(size, _LEAST_COPIED)


def speed(size: int, seconds: float) -> float:
    """Return what a copy in ``seconds`` loads and stores, in bytes per second: each byte counts twice."""
    return 2 * copied(size) / seconds


def floor_s(operation: str, ranks: int, size: int, stream_s: float) -> float:
    """Return the floor in seconds, where ``ranks`` copies at the same time took ``stream_s`` each."""
    return OPERATIONS[operation].moved(size, ranks) / speed(size, stream_s)
