"""Dealing the items of a stream, which has no indices, to the ranks and to their DataLoader workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...errors import fail
from .loader_position import Ledger
from .rank_share import share

__all__ = ["Shard", "shard_iterable"]

# Of the form of `state_dict`.
_VERSION = 1

# What the workers and the loop tell each other: the epoch of the next pass, the epoch that does not begin at its
# beginning, where it begins, the first epoch that there is anything left of, and whether workers have begun the pass.
_EPOCH, _PARTIAL, _START, _FLOOR, _BEGUN = range(5)


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
        # Shared, so that workers that stay from epoch to epoch see it change.
        self._told: torch.Tensor = torch.tensor([epoch, epoch, start, 0, 0]).share_memory_()  # type: ignore[no-untyped-call]
        # The books of the pass, where this process draws it; workers keep none.
        self._ledger: Ledger | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; the source is told, if it has a set_epoch.

        After `load_state_dict`, the epoch of the state gives what was left of it, and those before it give nothing.
        """
        self._told[_EPOCH] = epoch
        self._told[_BEGUN] = 0
        self._ledger = None

    def __iter__(self) -> Iterator[Any]:
        """Give this rank's items; in a DataLoader's worker, this worker's."""
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        ledger = Ledger()
        if worker is None:
            self._ledger = ledger
        else:
            self._told[_BEGUN] = 1
        epoch = int(self._told[_EPOCH])
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        if epoch >= int(self._told[_FLOOR]):
            for item in self._deal(self._start(), number, workers):
                # In a worker nobody asks for them.
                if worker is None:
                    ledger.draw()
                yield item
        ledger.exhausted = True

    def _start(self) -> int:
        """Return how many items of the stream the next pass leaves out."""
        return int(self._told[_START]) if self._told[_EPOCH] == self._told[_PARTIAL] else 0

    def _deal(self, start: int, number: int, workers: int) -> Iterator[Any]:
        items = itertools.islice(iter(self.source), start, None)
        size, ranks = self.batch_size, self.num_replicas
        for turn in itertools.count():
            # One batch for each rank. Worker w makes the batches w, w + workers, ... of its rank, as DataLoader asks.
            dealt = list(itertools.islice(items, size * ranks))
            if not dealt or (self.drop_last and len(dealt) < size * ranks):
                return
            if turn % workers == number:
                yield from dealt[self.rank * size : (self.rank + 1) * size]

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return where the job stands, for `load_state_dict` with any number of ranks.

        It counts whole batches that the training loop has been given. A DataLoader's workers draw ahead of it and
        cannot know: with them say with ``consumed`` how many items of this pass this rank has trained on. Call it at
        the same step on every rank, or on rank 0 only.
        """
        epoch, start = int(self._told[_EPOCH]), self._start()
        if consumed is None and self._told[_BEGUN]:
            raise fail(
                "invalid-argument",
                "state_dict() cannot tell how far the training loop is",
                who="shard_iterable",
                why="the DataLoader has workers, which draw ahead of the loop",
                fix="say how many items of this epoch this rank has had: state_dict(consumed=steps * batch_size)",
            )
        if consumed is None and self._ledger is not None and self._ledger.complete:
            return {"version": _VERSION, "epoch": epoch + 1, "position": 0}
        taken = consumed if consumed is not None else self._ledger.consumed if self._ledger is not None else 0
        return {
            "version": _VERSION,
            "epoch": epoch,
            "position": start + taken // self.batch_size * self.batch_size * self.num_replicas,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a moment that `state_dict` described. Every rank must load the same state."""
        if state.get("version") != _VERSION:
            raise fail(
                "invalid-argument",
                f"this state of a stream has version {state.get('version')!r}; this allhands reads {_VERSION}",
                who="shard_iterable",
                fix="load what state_dict of the same version of allhands gave",
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        self._told.copy_(torch.tensor([epoch, epoch, position, epoch, 0]))
        self._ledger = None


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
    size, leaves those out: with ``load_state_dict``, or with ``start``, in the pass of ``epoch`` only. Call
    ``set_epoch`` before each pass. At the end some ranks may have less, or nothing: ``drop_last`` leaves out what does
    not suffice for a whole batch each.
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
