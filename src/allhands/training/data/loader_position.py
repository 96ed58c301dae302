"""Count the items of a pass that the training loop has received: fewer than DataLoader workers have prefetched."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from ... import _torch

__all__ = ["LoaderPosition"]

# A DataLoader is a few frames above the sampler that it calls (batch sampler, its own methods); further up is the
# training loop.
_MAX_FRAMES = 12


class LoaderPosition:
    """The position of one pass over a sampler: items drawn, and those in batches that the loader has returned."""

    def __init__(self) -> None:
        self.drawn = 0
        # Whether the sampler's iterator has ended.
        self.exhausted = False
        # The attributes of the DataLoader's iterator. They outlive it until its end is recorded; the iterator itself
        # is not referenced, because its end stops its workers.
        self._loader_state: dict[str, Any] | None = None
        self._loader: weakref.ref[Any] | None = None
        # For each batch that was requested and not yet returned: how many items were drawn up to its end.
        self._ends: dict[int, int] = {}
        self._returned = 0
        self._pending = 0

    def follow(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the ``items`` of the pass, and count them."""
        # The first item is requested here: search the call stack for the DataLoader's iterator.
        loader = _torch.loader_iterator(sys._getframe(1), _MAX_FRAMES)  # noqa: SLF001  # torch passes no reference
        if loader is not None:
            self._loader_state = vars(loader)
            self._loader = weakref.ref(loader, self._on_loader_end)
            # This frame lives as long as the pass.
            del loader
        for item in items:
            self.drawn += 1
            if self._loader_state is not None:
                self._ends[_torch.batches_asked_for(self._loader_state)] = self.drawn
            yield item
        self.exhausted = True

    @property
    def consumed(self) -> int:
        """How many items the training loop has received: whole batches with a DataLoader, else all drawn."""
        if self._loader is None:
            return self.drawn
        self._update()
        return self._returned

    @property
    def complete(self) -> bool:
        """Whether the loop has received the whole pass, not counting a last batch that the loader drops."""
        if self._loader is not None:
            self._update()
        return self.exhausted and not self._pending

    def _update(self) -> None:
        """Read how many batches the loader has returned, and how many are prefetched."""
        if self._loader_state is None:
            return
        returned = _torch.batches_handed_out(self._loader_state)
        for batch in [batch for batch in self._ends if batch < returned]:
            self._returned = self._ends.pop(batch)
        self._pending = _torch.batches_asked_for(self._loader_state) - returned

    def _on_loader_end(self, _: Any) -> None:
        """Record the position when the loop drops the loader's iterator."""
        self._update()
        self._loader_state = None
