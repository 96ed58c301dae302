"""The layout of buckets, a pure function of sizes and order, and the `GradBucket` that communication hooks receive."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

__all__ = ["FIRST_BYTES", "GradBucket", "ItemSize", "Region", "assign", "place"]

# torch's size of the first bucket: small, so that the first reduction starts early in backward.
FIRST_BYTES = 1 << 20

# Buckets start on cache lines of their own: ranks write adjacent slices at the same time.
_LINE_BYTES = 64


class ItemSize(NamedTuple):
    """The size of one gradient. Gradients share a bucket if ``kind`` (dtype and device) is equal and none is sparse."""

    numel: int
    element_bytes: int
    kind: Hashable
    sparse: bool = False


class Region(NamedTuple):
    """The elements of a bucket in the memory of its kind; ``reserved`` includes one counter element and padding."""

    start: int
    numel: int
    reserved: int


def assign(items: Sequence[ItemSize], order: Iterable[int], caps_bytes: Sequence[int]) -> list[list[int]]:
    """Assign ``items`` to buckets in ``order``. Returns the indices in each bucket, in the order of reduction.

    A bucket is closed once it reaches its cap in ``caps_bytes``, which has one cap per bucket of a kind; the last cap
    is that of all further ones. Buckets that are still open at the end follow in the order of their last gradient.
    """
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    for index in order:
        item = items[index]
        if item.sparse:
            closed.append([index])
            continue
        # Reinsert at the end: the kind of the last gradient is complete last.
        bucket = open_buckets.pop(item.kind, [])
        open_buckets[item.kind] = bucket
        bucket.append(index)
        filled[item.kind] = filled.get(item.kind, 0) + item.numel * item.element_bytes
        number = count.get(item.kind, 0)
        if filled[item.kind] >= caps_bytes[min(number, len(caps_bytes) - 1)]:
            closed.append(open_buckets.pop(item.kind))
            filled[item.kind] = 0
            count[item.kind] = number + 1
    return [*closed, *open_buckets.values()]


def place(items: Sequence[ItemSize], buckets: Sequence[Sequence[int]]) -> Iterator[tuple[int, Region]]:
    """Yield the number and region of each dense bucket.

    The memory that a kind needs does not depend on the order of its gradients, except for padding.
    """
    ends: dict[Hashable, int] = {}
    for number, indices in enumerate(buckets):
        first = items[indices[0]]
        if first.sparse:
            continue
        numel = sum(items[index].numel for index in indices)
        line = max(1, _LINE_BYTES // first.element_bytes)
        reserved = -(-(numel + 1) // line) * line
        start = ends.get(first.kind, 0)
        ends[first.kind] = start + reserved
        yield number, Region(start, numel, reserved)


class GradBucket:
    """The gradients of one bucket, flattened in `buffer`; has the methods of `torch.distributed.GradBucket`."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        *,
        last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._last = last

    def index(self) -> int:
        """Return the number of the bucket; buckets are reduced in ascending order."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor, or the sparse gradient."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients: views of `buffer` in the shapes of their parameters."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the gradients."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward pass."""
        return self._last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace `buffer`."""
        self._buffer = buffer
