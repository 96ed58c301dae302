"""Dealing the items of an epoch to the ranks, so that a job can go on from any moment with any number of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from ...errors import fail
from .epoch_order import Given, InOrder, Order, Shuffled, Weighted
from .loader_position import Ledger
from .rank_share import share

__all__ = ["DistributedSampler"]

_log = logging.getLogger("allhands")

# The form of a state dict; a later form has another number.
_VERSION = 1

# A position behind the items of any epoch; still a number that torch can slice with.
_BEHIND_ALL = 2**62

_told = False


class DistributedSampler(Sampler[Any]):
    """Deals the items of ``dataset`` to the ranks; torch's signature, and by default torch's indices.

    ``dataset`` may be a data set, or any sampler or batch sampler, whose items (indices, or batches of them) are then
    dealt. Give a batch sampler that is wrapped so to ``DataLoader(batch_sampler=...)``.

    Beyond torch's arguments:

    * ``pad=False``: no item is given twice to make ranks even; the first ranks may have one more. For evaluation.
    * ``weights``: items are drawn with probabilities proportional to these, ``draws`` of them in an epoch (as many as
      there are weights by default), with ``replacement`` or without.
    * ``advance``: each pass is a new epoch where ``set_epoch`` is not called in between; rank 0 says so once where it
      changes the order. ``advance=False`` repeats the order, as torch does.

    `state_dict` tells where the job stands in the epoch; after `load_state_dict` the next pass gives what is left,
    whatever the number of ranks was and is. Nothing here communicates.
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
        num_replicas, rank = share("DistributedSampler", num_replicas, rank)
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
        # Where the present pass began in the order of the epoch, or the next will.
        self._start = 0
        # The moment that was loaded: no pass goes behind it.
        self._floor = (0, 0)
        # The pass under way or just over; None where the next one is the first of its epoch.
        self._ledger: Ledger | None = None
        self._size: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass: what is left of the epoch after `load_state_dict`, else an epoch."""
        if self._ledger is not None:
            self._next_epoch()
        items = self._order.items(self.seed, self.epoch)
        self._size = len(items)
        ledger = self._ledger = Ledger()
        return self._pass(ledger, self._own(items))

    @staticmethod
    def _pass(ledger: Ledger, own: list[Any]) -> Iterator[Any]:
        for item in own:
            ledger.draw()
            yield item
        ledger.exhausted = True

    def _own(self, items: Any) -> list[Any]:
        """Return this rank's share of what is left of ``items``."""
        size, share = len(items), self._share(len(items), self._start)
        first = self._start + self.rank
        own = items[first : min(size, first + share * self.num_replicas) : self.num_replicas]
        own = list(own) if isinstance(own, range | list) else own.tolist()
        while len(own) < share:
            # As torch pads: with the order from its beginning, as often as it takes.
            item = items[(first + len(own) * self.num_replicas - size) % size]
            own.append(item.item() if hasattr(item, "item") else item)
        return own

    def _share(self, size: int, start: int) -> int:
        """Return how many items this rank gets of an epoch of ``size`` from ``start`` on."""
        left = max(0, size - start)
        if self.drop_last:
            return left // self.num_replicas
        if self.pad:
            return -(-left // self.num_replicas)
        return max(0, -(-(left - self.rank) // self.num_replicas))

    def __len__(self) -> int:
        """Return how many items this rank gets in the pass under way; between passes, in the next."""
        size = self._size if self._ledger is not None else self._order.length()
        if size is None:
            raise TypeError(f"{type(self.dataset).__name__} does not know its length")
        return self._share(size, 0 if self._over() else self._start)

    def _over(self) -> bool:
        """Tell whether the loop has had all of the last pass."""
        if self._ledger is None or self._size is None:
            return False
        return self._ledger.complete or self._ledger.consumed >= self._share(self._size, self._start)

    @property
    def num_samples(self) -> int:
        """How many items this rank gets in the pass; torch's name for it."""
        return len(self)

    @property
    def total_size(self) -> int:
        """How many items all ranks together get in the pass, were they all given as many; torch's name for it."""
        return len(self) * self.num_replicas

    @property
    def dealt(self) -> int:
        """How many items all ranks together get in the pass, padding not counted."""
        size = self._size if self._size is not None else self._order.length()
        left = max(0, (size or 0) - self._start)
        return left - left % self.num_replicas if self.drop_last else left

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass.

        After `load_state_dict`, the epoch of the state gives what was left of it, and those before it give nothing: a
        loop that counts epochs from 0 comes to the right place.
        """
        if self._ledger is not None or epoch != self.epoch:
            self._start = 0
        if (epoch, 0) < self._floor:
            self._start = self._floor[1] if epoch == self._floor[0] else _BEHIND_ALL
            if self.rank == 0 and epoch < self._floor[0]:
                _log.warning(
                    "DistributedSampler: epoch %d was over in the state that was loaded, and gives nothing", epoch
                )
        self._ledger = None
        self.epoch = epoch

    def _next_epoch(self) -> None:
        """Begin a new epoch where nobody called `set_epoch`."""
        global _told  # noqa: PLW0603  # once in a process is enough
        self._ledger, self._start = None, 0
        if not self._advance:
            return
        self.epoch += 1
        if not _told and self.rank == 0 and type(self._order) is not InOrder:
            _told = True
            _log.warning(
                "DistributedSampler: set_epoch was not called, so the epoch advances by itself with each pass "
                "(%d now); advance=False repeats the order instead",
                self.epoch,
            )

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return where the job stands, for `load_state_dict` with any number of ranks.

        It counts what the training loop has been given: batches that a DataLoader of torch's has handed out, not those
        that its workers fetched ahead. Where something else draws ahead of the loop, say with ``consumed`` how many
        items of this pass this rank has trained on. Call it at the same step on every rank, or on rank 0 only, which
        has most where ranks differ by one item.
        """
        at = (self.epoch, self._start)
        if self._ledger is not None and self._size is not None:
            taken = self._ledger.consumed if consumed is None else consumed
            over = self._over() if consumed is None else taken >= self._share(self._size, self._start)
            at = (self.epoch + self._advance, 0) if over else (self.epoch, self._start + taken * self.num_replicas)
        epoch, position = max(at, self._floor)
        length = self._size if self._size is not None else self._order.length()
        return {"version": _VERSION, "epoch": epoch, "position": position, "length": length, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a moment that `state_dict` described. Every rank must load the same state."""
        length = self._order.length()
        if state.get("version") != _VERSION:
            raise fail(
                "invalid-argument",
                f"this state of a sampler has version {state.get('version')!r}; this allhands reads {_VERSION}",
                who="DistributedSampler",
                fix="load what DistributedSampler.state_dict of the same version of allhands gave",
            )
        if None not in {length, state["length"]} and length != state["length"]:
            raise fail(
                "invalid-argument",
                f"the state is of an epoch of {state['length']} items; this one has {length}",
                who="DistributedSampler",
                why="what is left of an epoch is known only for the data that it was begun with",
                fix="resume with the same data set, or begin a new epoch with set_epoch",
            )
        self._floor = (self.epoch, self._start) = (state["epoch"], state["position"])
        self.seed = state["seed"]
        self._ledger, self._size = None, None


def _order(dataset: Any, shuffle: bool, weights: Any, draws: int | None, replacement: bool) -> Order:
    """Return the order that the arguments ask for."""
    wraps = isinstance(dataset, Sampler) or not hasattr(dataset, "__getitem__")
    if weights is not None:
        if wraps or len(weights) != len(dataset):
            raise fail(
                "invalid-argument",
                "weights need a data set with one item for each of them",
                who="DistributedSampler",
                why="a sampler was given" if wraps else f"{len(weights)} weights, {len(dataset)} items",
            )
        return Weighted(weights, draws, replacement=replacement)
    if wraps:
        return Given(dataset)
    return Shuffled(dataset.__len__) if shuffle else InOrder(dataset.__len__)
