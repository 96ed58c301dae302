"""Batches of items of similar length: little padding, and similar work for the ranks of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from ...errors import fail

__all__ = ["LengthGroupedBatches"]

# Batches per window that is sorted by length. Larger windows make neighbours more similar and epochs less random.
_WINDOW = 64


class LengthGroupedBatches(Sampler[list[int]]):
    """A batch sampler: items are shuffled, sorted by length within windows, and divided into batches.

    It is independent of ranks: give ``DistributedSampler(LengthGroupedBatches(...))`` to
    ``DataLoader(batch_sampler=)``. The ranks of one step get adjacent batches, so no rank waits long for the others.
    The first batch has the longest item of the epoch, so that a lack of memory shows at once.

    ``lengths`` has one number for each item. Batches have ``batch_size`` items; with ``most``, fewer if the items
    padded to the longest of them would exceed that in all.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        most: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        window: int = _WINDOW,
    ) -> None:
        if batch_size < 1 or window < 1:
            raise fail("invalid-argument", "batch_size and window must be at least 1", who="LengthGroupedBatches")
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64)
        if most is not None and len(self._lengths) and int(self._lengths.max()) > most:
            raise fail(
                "invalid-argument",
                f"an item of length {int(self._lengths.max())} fits into no batch of at most {most}",
                who="LengthGroupedBatches",
                fix="raise most=, or shorten the items",
            )
        self.batch_size = batch_size
        self.most = most
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.window = window
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order; DistributedSampler calls this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the batches of the epoch."""
        return iter(self._batches())

    def __len__(self) -> int:
        """Return the number of batches of the epoch."""
        return len(self._batches())

    def _batches(self) -> list[list[int]]:
        count = len(self._lengths)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        # One stable sort: by window, then by descending length.
        longest = int(self._lengths.max()) if count else 0
        window = torch.arange(count) // (self.batch_size * self.window)
        order = order[(window * (longest + 1) + longest - self._lengths[order]).argsort(stable=True)]
        batches: list[list[int]] = []
        for index, length in zip(order.tolist(), self._lengths[order].tolist(), strict=True):
            batch = batches[-1] if batches else []
            longest = max(length, int(self._lengths[batch[0]])) if batch else length
            too_long = self.most is not None and longest * (len(batch) + 1) > self.most
            if not batch or len(batch) >= self.batch_size or too_long:
                batches.append([index])
            else:
                batch.append(index)
        if self.drop_last and batches and self.most is None and len(batches[-1]) < self.batch_size:
            batches.pop()
        if batches:
            first = max(range(len(batches)), key=lambda batch: int(self._lengths[batches[batch]].max()))
            batches.insert(0, batches.pop(first))
        return batches
