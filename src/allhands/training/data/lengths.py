"""Batches of items of similar length, so that little is padded and the ranks of one step have similar work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from ...errors import fail

__all__ = ["LengthGroupedBatches"]

# Batches that are sorted together. More make neighbours more alike, and the batches of an epoch less random.
_WINDOW = 64


class LengthGroupedBatches(Sampler[list[int]]):
    """A batch sampler: items are shuffled, sorted by length within windows, and cut into batches.

    It knows nothing of ranks: give ``DistributedSampler(LengthGroupedBatches(...))`` to ``DataLoader(batch_sampler=)``.
    Neighbouring batches go to the ranks of one step, so nobody waits long for the longest. The first batch holds the
    longest item of the epoch, so that memory that does not suffice shows at once.

    ``lengths`` has one number for each item. Batches have ``batch_size`` items; with ``most``, fewer where the items
    padded to the longest of them would be longer than that in all.
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
        """Choose the order; DistributedSampler calls it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Give the batches of the epoch."""
        return iter(self._batches())

    def __len__(self) -> int:
        """Return the number of batches of the epoch."""
        return len(self._batches())

    def _batches(self) -> list[list[int]]:
        count = len(self._lengths)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        # One sort for all windows: by window, then longest first; the shuffled order decides among equals.
        longest = int(self._lengths.max()) if count else 0
        window = torch.arange(count) // (self.batch_size * self.window)
        order = order[(window * (longest + 1) + longest - self._lengths[order]).argsort(stable=True)]
        batches: list[list[int]] = []
        for index, length in zip(order.tolist(), self._lengths[order].tolist(), strict=True):
            if batches and self._room(batches[-1], length):
                batches[-1].append(index)
            else:
                batches.append([index])
        if self.drop_last and batches and self.most is None and len(batches[-1]) < self.batch_size:
            batches.pop()
        if batches:
            # A stable beginning for memory: the batch with the longest item comes first.
            first = max(range(len(batches)), key=lambda batch: int(self._lengths[batches[batch]].max()))
            batches.insert(0, batches.pop(first))
        return batches

    def _room(self, batch: list[int], length: int) -> bool:
        if len(batch) >= self.batch_size:
            return False
        longest = max(length, int(self._lengths[batch[0]]))
        return self.most is None or longest * (len(batch) + 1) <= self.most
