"""Dealing the items of a stream, which has no indices, to the ranks and to their DataLoader workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import fail
from .share import share

__all__ = ["Shard", "shard_iterable"]


class Shard(IterableDataset[Any]):
    """One rank's part of a stream; what `shard_iterable` returns."""

    def __init__(
        self,
        source: Iterable[Any],
        *,
        num_replicas: int,
        rank: int,
        batch_size: int,
        drop_last: bool,
        epoch: int,
        start: int,
    ) -> None:
        super().__init__()
        self.source = source
        self.num_replicas = num_replicas
        self.rank = rank
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._start = (epoch, start)
        # Shared, so that workers that stay from epoch to epoch see it change.
        self._epoch: torch.Tensor = torch.tensor(epoch).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; the source is told, if it has a set_epoch."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Give this rank's items; in a DataLoader's worker, this worker's."""
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(int(self._epoch))
        epoch, start = self._start
        items = itertools.islice(iter(self.source), start if int(self._epoch) == epoch else 0, None)
        size, ranks = self.batch_size, self.num_replicas
        for turn in itertools.count():
            # One batch for each rank. Worker w makes the batches w, w + workers, ... of its rank, as DataLoader asks.
            dealt = list(itertools.islice(items, size * ranks))
            if not dealt or (self.drop_last and len(dealt) < size * ranks):
                return
            if turn % workers == number:
                yield from dealt[self.rank * size : (self.rank + 1) * size]


def shard_iterable(
    source: Iterable[Any],
    num_replicas: int | None = None,
    rank: int | None = None,
    *,
    batch_size: int = 1,
    drop_last: bool = False,
    epoch: int = 0,
    start: int = 0,
) -> Shard:
    """Return this rank's part of ``source``, an IterableDataset or anything that can be iterated anew each epoch.

    Every rank and worker reads the whole stream and passes on its own items, which is right where items are cheap to
    read; the stream must be the same everywhere. Rank and size are the group's where they are not given.

    Give the DataLoader's ``batch_size``: the stream is then dealt in whole batches, and after k steps the ranks
    together have had the first ``k * batch_size * num_replicas`` items, with any number of workers. A later job, of any
    size, leaves those out with ``start``, in the pass of ``epoch`` only: call ``set_epoch`` before each. At the end
    some ranks may have less, or nothing: ``drop_last`` leaves out what does not suffice for a whole batch each.
    """
    num_replicas, rank = share("shard_iterable", num_replicas, rank)
    if batch_size < 1 or start < 0:
        raise fail("invalid-argument", "batch_size must be at least 1, and start at least 0", who="shard_iterable")
    return Shard(
        source,
        num_replicas=num_replicas,
        rank=rank,
        batch_size=batch_size,
        drop_last=drop_last,
        epoch=epoch,
        start=start,
    )
