"""Divide the items of an epoch among the ranks; a job can continue from any position with any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ...errors import fail
from ...groups import collectives
from .loader_position import LoaderPosition

__all__ = ["VERSION", "DistributedSampler", "check_version", "size_and_rank"]

_log = logging.getLogger("allhands")

# The version of the state dicts.
VERSION = 1

# A position after the items of any epoch that torch can still slice with.
_AFTER_ALL = 2**62

_warned = False


class DistributedSampler(Sampler[Any]):
    """Divides the items of ``dataset`` among the ranks; torch's signature, and by default torch's indices.

    ``dataset`` may be a data set, or any sampler or batch sampler, whose items (indices, or batches of them) are then
    divided. Pass a wrapped batch sampler to ``DataLoader(batch_sampler=...)``.

    Beyond torch's arguments:

    * ``pad=False``: no item is repeated to make ranks even; the first ranks may have one more. For evaluation.
    * ``weights``: items are drawn with probabilities proportional to these, ``draws`` of them in an epoch (as many as
      there are weights by default), with ``replacement`` or without.
    * ``advance``: each pass is a new epoch if ``set_epoch`` is not called in between; rank 0 logs this once if it
      changes the order. ``advance=False`` repeats the order, as torch does.

    `state_dict` returns the position of the job in the epoch; after `load_state_dict` the next pass has the remaining
    items, whatever the number of ranks was and is. Nothing here communicates.
    """

    def __init__(  # noqa: PLR0917  # torch's signature
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        weights: Any = None,
        draws: int | None = None,
        replacement: bool = True,
        advance: bool = True,
    ) -> None:
        num_replicas, rank = size_and_rank("DistributedSampler", num_replicas, rank)
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0
        self._advance = advance
        self._order = _order(dataset, shuffle, weights, draws, replacement)
        # Where the present pass started in the order of the epoch, or the next will.
        self._start = 0
        # Epoch and position of the loaded state: no pass starts before it.
        self._loaded = (0, 0)
        # The present or last pass; None if the next one is the first of its epoch.
        self._position: LoaderPosition | None = None
        self._size: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Start a pass: the rest of the epoch after `load_state_dict`, else an epoch."""
        if self._position is not None:
            self._next_epoch()
        items = self._order.items(self.seed, self.epoch)
        self._size = len(items)
        self._position = LoaderPosition()
        return self._position.follow(self._own_items(items))

    def _own_items(self, items: Any) -> list[Any]:
        """Return this rank's share of the remaining ``items``."""
        size, first = len(items), self._start + self.rank
        end = first + self._count(size, self._start) * self.num_replicas
        # Modulo: torch's padding is the order from its beginning, repeated as needed.
        if isinstance(items, torch.Tensor):
            return items[torch.arange(first, end, self.num_replicas) % max(size, 1)].tolist()
        return [items[index % size] for index in range(first, end, self.num_replicas)]

    def _count(self, size: int, start: int) -> int:
        """Return the number of this rank's items of an epoch of ``size`` from ``start`` on."""
        left = max(0, size - start)
        if self.drop_last:
            return left // self.num_replicas
        if self.pad:
            return -(-left // self.num_replicas)
        return max(0, -(-(left - self.rank) // self.num_replicas))

    def __len__(self) -> int:
        """Return the number of this rank's items in the present pass; between passes, in the next."""
        size = self._size if self._position is not None else self._order.length()
        if size is None:
            raise TypeError(f"{type(self.dataset).__name__} does not know its length")
        return self._count(size, 0 if self._pass_is_over() else self._start)

    def _pass_is_over(self) -> bool:
        """Return whether the loop has received all of the last pass."""
        if self._position is None or self._size is None:
            return False
        return self._position.complete or self._position.consumed >= self._count(self._size, self._start)

    @property
    def num_samples(self) -> int:
        """The number of this rank's items in the pass; torch's name."""
        return len(self)

    @property
    def total_size(self) -> int:
        """The number of items of all ranks in the pass if all have as many as this one; torch's name."""
        return len(self) * self.num_replicas

    @property
    def dealt(self) -> int:
        """The number of items of all ranks in the pass, without padding."""
        size = self._size if self._size is not None else self._order.length()
        left = max(0, (size or 0) - self._start)
        return left - left % self.num_replicas if self.drop_last else left

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        After `load_state_dict`, the epoch of the state has only the items that were left, and earlier ones have none: a
        loop that counts epochs from 0 continues at the right position.
        """
        if self._position is not None or epoch != self.epoch:
            self._start = 0
        if (epoch, 0) < self._loaded:
            self._start = self._loaded[1] if epoch == self._loaded[0] else _AFTER_ALL
            if self.rank == 0 and epoch < self._loaded[0]:
                _log.warning("DistributedSampler: epoch %d was over in the loaded state; it has no items left", epoch)
        self._position = None
        self.epoch = epoch

    def _next_epoch(self) -> None:
        """Start a new epoch without a call of `set_epoch`."""
        global _warned  # noqa: PLW0603  # once per process
        self._position, self._start = None, 0
        if not self._advance:
            return
        self.epoch += 1
        if not _warned and self.rank == 0 and type(self._order) is not _InOrder:
            _warned = True
            _log.warning(
                "DistributedSampler: set_epoch was not called, so the epoch advances by itself with each pass "
                "(%d now); advance=False repeats the order instead",
                self.epoch,
            )

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position of the job, for `load_state_dict` with any number of ranks.

        It counts the items that the training loop has received: batches that torch's DataLoader has returned, not those
        that its workers have prefetched. If something else prefetches, pass the number of items of this pass that this
        rank has trained on as ``consumed``. Call it at the same step on every rank, or on rank 0 only, which has most
        items if ranks differ by one.
        """
        now = (self.epoch, self._start)
        if self._position is not None and self._size is not None:
            count = self._position.consumed if consumed is None else consumed
            over = self._pass_is_over() if consumed is None else count >= self._count(self._size, self._start)
            now = (self.epoch + self._advance, 0) if over else (self.epoch, self._start + count * self.num_replicas)
        epoch, position = max(now, self._loaded)
        length = self._size if self._size is not None else self._order.length()
        return {"version": VERSION, "epoch": epoch, "position": position, "length": length, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of `state_dict`. Every rank must load the same state."""
        check_version(state, "DistributedSampler")
        length = self._order.length()
        if None not in {length, state["length"]} and length != state["length"]:
            raise fail(
                "invalid-argument",
                f"the state is of an epoch of {state['length']} items; this one has {length}",
                who="DistributedSampler",
                why="the rest of an epoch is only defined for the data that it was started with",
                fix="resume with the same data set, or begin a new epoch with set_epoch",
            )
        self._loaded = (self.epoch, self._start) = (state["epoch"], state["position"])
        self.seed = state["seed"]
        self._position, self._size = None, None


def _order(dataset: Any, shuffle: bool, weights: Any, draws: int | None, replacement: bool) -> _InOrder:
    """Return the order that the arguments select."""
    is_sampler = isinstance(dataset, Sampler) or not hasattr(dataset, "__getitem__")
    if weights is not None:
        if is_sampler or len(weights) != len(dataset):
            raise fail(
                "invalid-argument",
                "weights need a data set with one item for each of them",
                who="DistributedSampler",
                why="a sampler was given" if is_sampler else f"{len(weights)} weights, {len(dataset)} items",
            )
        return _Weighted(weights, draws, replacement=replacement)
    if is_sampler:
        return _FromSampler(dataset)
    return _Shuffled(dataset) if shuffle else _InOrder(dataset)


class _InOrder:
    """The order of all items of an epoch, a pure function of seed and epoch: here the indices of a data set."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def items(self, seed: int, epoch: int) -> Any:
        """Return every item of the epoch: a tensor of indices, a range, or a list of anything."""
        del seed, epoch
        return range(len(self._dataset))

    def length(self) -> int | None:
        """Return the number of items of an epoch, if it is known beforehand; data sets may grow."""
        return len(self._dataset) if hasattr(self._dataset, "__len__") else None


class _Shuffled(_InOrder):
    """A permutation: that of torch's DistributedSampler for the same seed and epoch."""

    def items(self, seed: int, epoch: int) -> Any:
        return torch.randperm(len(self._dataset), generator=torch.Generator().manual_seed(seed + epoch))


class _Weighted(_InOrder):
    """Indices drawn with probabilities proportional to weights, ``draws`` of them (by default one per weight)."""

    def __init__(self, weights: Any, draws: int | None, *, replacement: bool) -> None:
        self._weights = torch.as_tensor(weights, dtype=torch.float64).flatten()
        self._draws = len(self._weights) if draws is None else draws
        self._replacement = replacement
        positive = int((self._weights > 0).sum())
        wrong = ""
        if not bool(torch.isfinite(self._weights).all()) or bool((self._weights < 0).any()):
            wrong = "a weight is negative or not finite"
        elif not positive:
            wrong = "no weight is positive"
        elif not replacement and self._draws > positive:
            wrong = f"{self._draws} draws without replacement, but only {positive} weights are positive"
        if wrong:
            raise fail("invalid-argument", "these weights cannot be drawn from", who="DistributedSampler", why=wrong)

    def items(self, seed: int, epoch: int) -> Any:
        # torch.multinomial takes at most 2**24 weights.
        generator = torch.Generator().manual_seed(seed + epoch)
        if self._replacement:
            total = self._weights.cumsum(0)
            points = torch.rand(self._draws, generator=generator, dtype=torch.float64) * total[-1]
            # right=True: an item with weight 0 is never drawn.
            return torch.searchsorted(total, points, right=True).clamp_(max=len(total) - 1)
        # Sorting exponential variables with these rates draws without replacement.
        clocks = torch.empty(len(self._weights), dtype=torch.float64).exponential_(generator=generator)
        return (clocks / self._weights).argsort()[: self._draws]

    def length(self) -> int:
        return self._draws


class _FromSampler(_InOrder):
    """The items of a sampler or batch sampler, with every source of randomness it may use seeded for the epoch.

    So each rank gets the same items from its own sampler. Its ``set_epoch`` is called if it has one.
    """

    def items(self, seed: int, epoch: int) -> list[Any]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        with _seeded(self._dataset, seed + epoch):
            return list(self._dataset)


@contextlib.contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Seed the global generators of torch, Python and NumPy, and the sampler's own, for a block.

    The global ones are restored: drawing an order does not change the random numbers of the training.
    """
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        own = getattr(sampler, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)
        # A batch sampler contains a sampler.
        sampler = getattr(sampler, "sampler", None)
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def check_version(state: Mapping[str, Any], caller: str) -> None:
    """Raise invalid-argument if ``state`` is of another version than this one; the message names the ``caller``."""
    if state.get("version") != VERSION:
        raise fail(
            "invalid-argument",
            f"this state has version {state.get('version')!r}; this allhands reads {VERSION}",
            who=caller,
            fix="load a state_dict of the same version of allhands",
        )


def size_and_rank(caller: str, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and the rank, by default those of the group; messages name the ``caller``."""
    if num_replicas is None:
        collectives.require_group(f"{caller} without num_replicas")
        num_replicas = dist.get_world_size()
    if rank is None:
        collectives.require_group(f"{caller} without rank")
        rank = dist.get_rank()
    if not 0 <= rank < num_replicas:
        raise fail(
            "rank-out-of-range",
            f"rank {rank} of {num_replicas} was asked for",
            who=caller,
            fix=f"give a rank from 0 to {num_replicas - 1}",
        )
    return num_replicas, rank
