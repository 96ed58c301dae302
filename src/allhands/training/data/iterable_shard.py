"""Divide the items of a stream, which has no indices, among the ranks and their DataLoader workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...errors import fail
from .loader_position import LoaderPosition
from .sampler import VERSION, check_version, size_and_rank

__all__ = ["IterableShard", "shard_iterable"]

# Indices of the state that the loop shares with its workers: the epoch of the next pass, the epoch that starts in the
# middle, the position where it starts, the first epoch with items left, and whether workers have started the pass.
_EPOCH, _PARTIAL, _START, _FIRST_EPOCH, _STARTED = range(5)


@dataclass(eq=False, repr=False)
class IterableShard(IterableDataset[Any]):
    """One rank's part of a stream, the result of `shard_iterable`."""

    source: Iterable[Any]
    num_replicas: int
    rank: int
    batch_size: int
    drop_last: bool
    epoch: InitVar[int]
    start: InitVar[int]

    def __post_init__(self, epoch: int, start: int) -> None:
        # In shared memory, so that persistent workers see changes.
        self._state: torch.Tensor = torch.tensor([epoch, epoch, start, 0, 0]).share_memory_()  # type: ignore[no-untyped-call]
        # The position of the pass if this process iterates; workers have none.
        self._position: LoaderPosition | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; calls ``set_epoch`` of the source if it has one.

        After `load_state_dict`, the epoch of the state has only the items that were left, and earlier ones have none.
        """
        self._state[_EPOCH] = epoch
        self._state[_STARTED] = 0
        self._position = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's items; in a DataLoader's worker, this worker's."""
        worker = get_worker_info()
        epoch = int(self._state[_EPOCH])
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        over = epoch < int(self._state[_FIRST_EPOCH])
        if worker is not None:
            self._state[_STARTED] = 1
            return iter(()) if over else self._own_items(self._start(), worker.id, worker.num_workers)
        self._position = LoaderPosition()
        return self._position.follow(() if over else self._own_items(self._start(), 0, 1))

    def _start(self) -> int:
        """Return how many items of the stream the next pass skips."""
        return int(self._state[_START]) if self._state[_EPOCH] == self._state[_PARTIAL] else 0

    def _own_items(self, start: int, number: int, workers: int) -> Iterator[Any]:
        items = itertools.islice(iter(self.source), start, None)
        size, ranks = self.batch_size, self.num_replicas
        for step in itertools.count():
            # One batch for each rank. DataLoader reads batch w, w + workers, ... of a rank from worker w.
            step_items = list(itertools.islice(items, size * ranks))
            if not step_items or (self.drop_last and len(step_items) < size * ranks):
                return
            if step % workers == number:
                yield from step_items[self.rank * size : (self.rank + 1) * size]

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position of the job, for `load_state_dict` with any number of ranks.

        It counts whole batches that the training loop has received. With DataLoader workers, which prefetch, pass the
        number of items of this pass that this rank has trained on as ``consumed``. Call it at the same step on every
        rank, or on rank 0 only.
        """
        epoch, start = int(self._state[_EPOCH]), self._start()
        if consumed is None:
            if self._state[_STARTED]:
                raise fail(
                    "invalid-argument",
                    "state_dict() cannot determine the position of the training loop",
                    who="shard_iterable",
                    why="the DataLoader has workers, which prefetch",
                    fix="pass the number of items of this epoch that this rank has received: "
                    "state_dict(consumed=steps * batch_size)",
                )
            if self._position is not None and self._position.complete:
                return {"version": VERSION, "epoch": epoch + 1, "position": 0}
            consumed = 0 if self._position is None else self._position.consumed
        position = start + consumed // self.batch_size * self.batch_size * self.num_replicas
        return {"version": VERSION, "epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of `state_dict`. Every rank must load the same state."""
        check_version(state, "shard_iterable")
        epoch, position = int(state["epoch"]), int(state["position"])
        self._state.copy_(torch.tensor([epoch, epoch, position, epoch, 0]))
        self._position = None


def shard_iterable(
    source: Iterable[Any],
    num_replicas: int | None = None,
    rank: int | None = None,
    *,
    batch_size: int = 1,
    drop_last: bool = False,
    epoch: int = 0,
    start: int = 0,
) -> IterableShard:
    """Return this rank's part of ``source``, an IterableDataset or anything that can be iterated anew each epoch.

    Every rank and worker reads the whole stream and returns its own items, which suits items that are cheap to read;
    the stream must be the same everywhere. Rank and size are those of the group by default.

    Pass the DataLoader's ``batch_size``: the stream is then divided in whole batches, and after k steps the ranks
    together have received the first ``k * batch_size * num_replicas`` items, with any number of workers. A later job,
    of any size, skips those: with ``load_state_dict``, or with ``start``, in the pass of ``epoch`` only. Call
    ``set_epoch`` before each pass. At the end some ranks may have fewer items or none; with ``drop_last`` items are
    dropped that do not fill a batch for each rank.
    """
    num_replicas, rank = size_and_rank("shard_iterable", num_replicas, rank)
    if batch_size < 1 or start < 0:
        raise fail("invalid-argument", "batch_size must be at least 1, and start at least 0", who="shard_iterable")
    return IterableShard(source, num_replicas, rank, batch_size, drop_last, epoch, start)
