"""The order of all items of an epoch: a pure function of seed and epoch, independent of ranks."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ...errors import fail

__all__ = ["EpochOrder", "FromSampler", "InOrder", "Shuffled", "Weighted"]


class EpochOrder(Protocol):
    """The items of an epoch. The result of ``items`` can be sliced, and its length is that of the epoch."""

    def items(self, seed: int, epoch: int) -> Any:
        """Return every item of the epoch in order: a tensor of indices, a range, or a list of anything."""

    def length(self) -> int | None:
        """Return the number of items of an epoch, if it is known beforehand."""


class InOrder:
    """The indices of a data set in order. ``size`` is called for each epoch, because data sets may grow."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size

    def items(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the indices from 0."""
        del seed, epoch
        return range(self._size())

    def length(self) -> int:
        """Return the size of the data set."""
        return self._size()


class Shuffled(InOrder):
    """A permutation: that of torch's DistributedSampler for the same seed and epoch."""

    def items(self, seed: int, epoch: int) -> Any:
        """Return the indices, shuffled."""
        return torch.randperm(self._size(), generator=_generator(seed, epoch))


class Weighted:
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
        """Return the indices drawn. torch.multinomial takes at most 2**24 weights."""
        generator = _generator(seed, epoch)
        if self._replacement:
            total = self._weights.cumsum(0)
            points = torch.rand(self._draws, generator=generator, dtype=torch.float64) * total[-1]
            # right=True: an item with weight 0 is never drawn.
            return torch.searchsorted(total, points, right=True).clamp_(max=len(total) - 1)
        # Sorting exponential variables with these rates draws without replacement.
        clocks = torch.empty(len(self._weights), dtype=torch.float64).exponential_(generator=generator)
        return (clocks / self._weights).argsort()[: self._draws]

    def length(self) -> int:
        """Return the number of draws."""
        return self._draws


class FromSampler:
    """The items of a sampler or batch sampler, with every source of randomness it may use seeded for the epoch.

    So each rank gets the same items from its own sampler. Its ``set_epoch`` is called if it has one.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def items(self, seed: int, epoch: int) -> list[Any]:
        """Return all items of the sampler."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with _seeded(self._sampler, seed + epoch):
            return list(self._sampler)

    def length(self) -> int | None:
        """Return the sampler's length, if it has one."""
        return len(self._sampler) if hasattr(self._sampler, "__len__") else None


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + epoch)


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
