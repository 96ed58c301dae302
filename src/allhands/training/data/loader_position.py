"""How many items of a pass the training loop has, which is less than what workers have fetched ahead."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from ... import _torch

__all__ = ["Ledger"]

# A DataLoader stands a few frames above the sampler that it asks (batch sampler, its own methods); what is further up
# is the training.
_MOST_FRAMES = 12


class Ledger:
    """The books of one pass over a sampler: items drawn, by which DataLoader iterator, for which of its batches."""

    def __init__(self) -> None:
        self.drawn = 0
        # Whether whoever draws has been told that there is no more.
        self.exhausted = False
        self._looked = False
        # The attributes of the DataLoader's iterator. They outlive it until its end is noted; the iterator itself is
        # not held, because its end is what ends its workers.
        self._books: dict[str, Any] | None = None
        self._reader: weakref.ref[Any] | None = None
        # For each batch that was asked for and not yet handed out: how many items were drawn up to its end.
        self._ends: dict[int, int] = {}
        self._handed = 0
        self._left = 0

    def draw(self) -> None:
        """Note that one item is handed to whoever asks. Called by the sampler's iterator as it gives it."""
        if not self._looked:
            # Once in a pass: the frames of whoever asks first.
            self._looked = True
            reader = _torch.loader_iterator(sys._getframe(1), _MOST_FRAMES)  # noqa: SLF001  # no other way to know who asks
            if reader is not None:
                self._books = vars(reader)
                self._reader = weakref.ref(reader, self._closed)
        self.drawn += 1
        if self._books is not None:
            self._ends[_torch.batches_asked_for(self._books)] = self.drawn

    @property
    def consumed(self) -> int:
        """How many items have reached the training loop: whole batches where a DataLoader draws, else all drawn."""
        if self._reader is None:
            return self.drawn
        self._look()
        return self._handed

    @property
    def complete(self) -> bool:
        """Whether the loop has had all of the pass; a last batch that the loader drops does not keep it open."""
        if self._reader is not None:
            self._look()
        return self.exhausted and not self._left

    def _look(self) -> None:
        """Read how many batches the loader has handed out by now, and how many are under way."""
        if self._books is None:
            return
        handed = _torch.batches_handed_out(self._books)
        for batch in [batch for batch in self._ends if batch < handed]:
            self._handed = self._ends.pop(batch)
        self._left = _torch.batches_asked_for(self._books) - handed

    def _closed(self, _: Any) -> None:
        """Note where the loop stood when it let go of the loader's iterator."""
        self._look()
        self._books = None
