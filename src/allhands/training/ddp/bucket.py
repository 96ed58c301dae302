"""Which gradients are reduced together, and in which order. Pure: no tensors, no communication."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["FIRST_BYTES", "ItemSize", "Place", "assign", "place"]

# The first bucket is small, so that reducing begins soon after backward does; torch's figure.
FIRST_BYTES = 1 << 20

# Regions begin on cache lines of their own, so that no two ranks' slices share one.
_LINE_BYTES = 64


class ItemSize(NamedTuple):
    """What the layout has to know of one parameter. Only those with equal ``kind`` (type, device) share a bucket.

    One that stands alone (a sparse gradient) shares with nobody.
    """

    numel: int
    element_bytes: int
    kind: Hashable
    alone: bool = False


class Place(NamedTuple):
    """Where a bucket lies in the memory of its kind, in elements; ``room`` includes one element for a mark."""

    start: int
    numel: int
    room: int


def assign(items: Sequence[ItemSize], order: Iterable[int], caps_bytes: Sequence[int]) -> list[list[int]]:
    """Put ``items``, taken in ``order``, into buckets; return the indices in each, in the order to reduce them in.

    A bucket is closed once it has its share of ``caps_bytes`` (one for each bucket of a kind; the last for all
    further ones). What is left at the end comes in the order in which it can be complete.
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    for index in order:
        item = items[index]
        if item.alone:
            closed.append([index])
            continue
        # Moved to the end: the kind whose last gradient comes last is complete last.
        members = filling.pop(item.kind, [])
        filling[item.kind] = members
        members.append(index)
        filled[item.kind] = filled.get(item.kind, 0) + item.numel * item.element_bytes
        number = count.get(item.kind, 0)
        if filled[item.kind] >= caps_bytes[min(number, len(caps_bytes) - 1)]:
            closed.append(filling.pop(item.kind))
            filled[item.kind] = 0
            count[item.kind] = number + 1
    return [*closed, *filling.values()]


def place(items: Sequence[ItemSize], buckets: Sequence[Sequence[int]]) -> Iterator[tuple[int, Place]]:
    """Yield the number of each bucket and where it lies in the memory of its kind; those that stand alone lie nowhere.

    The memory that a kind needs does not depend on the order of its gradients, but for what cache lines waste.
    """
    ends: dict[Hashable, int] = {}
    for number, members in enumerate(buckets):
        first = items[members[0]]
        if first.alone:
            continue
        numel = sum(items[index].numel for index in members)
        line = max(1, _LINE_BYTES // first.element_bytes)
        room = -(-(numel + 1) // line) * line
        start = ends.get(first.kind, 0)
        ends[first.kind] = start + room
        yield number, Place(start, numel, room)
