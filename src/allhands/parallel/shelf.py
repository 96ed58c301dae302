"""Averaging gradients of two ranks as they come, where no core is free to do it beside backward: see csrc/shelf.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _core, _torch
from ..errors import ResourceError
from ..hostgroup import HostGroup
from .bundle import Bundle
from .mark import Mark
from .reduction import Averager

__all__ = ["Shelf"]

# Fewer bytes are still in a cache when backward is over, and one call for all of them takes as long and no memory.
_LEAST_BYTES = 4 << 20

# A larger gradient has gone out of its core's own cache by the time it is whole: laying it on the shelf and taking it
# again then costs more than reducing it at the end (8 layers of 4 MiB: 3.3 and 6.4 ms, against 2.7 and 3.9).
_MOST_BYTES = 2 << 20


class Shelf:
    """Where gradients of two ranks are averaged as they come, if that pays: before it is built nothing is."""

    def __init__(self) -> None:
        self.core: _core.Shelf | None = None
        # Parameters whose gradients came again in some pass, on this rank. They go at the end from then on.
        self._repeated: set[int] = set()

    def build(self, parameters: Sequence[torch.nn.Parameter], averager: Averager) -> None:
        """Make room for the gradients of ``parameters``. Both ranks of the group call this, and have it or not."""
        sizes = tuple(each.nbytes for each in parameters)
        # Whoever comes second averages, so there is one.
        if averager.size != 2 or not isinstance(averager.group, HostGroup) or not _is_swift(averager.group):
            return
        if sum(sizes) < _LEAST_BYTES or max(sizes) > _MOST_BYTES:
            return
        if not all(each.is_floating_point() for each in parameters):
            return
        try:
            # A window has a region for each rank; side by side they are the shelf.
            window = averager.group.window("DistributedDataParallel", -(-_core.Shelf.bytes_for(sizes) // 2))
        except ResourceError:
            return  # On both ranks.
        self.core = _core.Shelf(window, sizes, tuple(_torch.accumulated_hooks(each) for each in parameters))
        self._leave_out()

    def __len__(self) -> int:
        """Return how many gradients were put there in this pass."""
        return 0 if self.core is None else len(self.core)

    def has(self, index: int) -> bool:
        """Tell whether a gradient was put there in this pass."""
        return self.core is not None and self.core.has(index)

    def note(self, counts: Sequence[int], needed: Sequence[int]) -> None:
        """Learn from how often gradients came in a pass."""
        self._repeated.update(index for index, count in enumerate(counts) if count > needed[index])
        self._leave_out()

    def _leave_out(self) -> None:
        if self.core is not None:
            for index in self._repeated:
                self.core.leave_out(index)

    def meet(self, bundles: list[Bundle], mark: Mark | None, averager: Averager) -> list[Bundle]:
        """Meet the other rank at the end of a pass, and return what is left to reduce: all of it without a shelf.

        ``mark``, which the last of ``bundles`` would carry, is averaged on its own then: a call like any other, in
        which ranks are compared and waited for.
        """
        if self.core is None or mark is None:
            return bundles
        self.core.settle()
        averager.average(mark.tensor, None)
        left = frozenset(self.core.end())
        if not left:
            return []
        parts = [[slot for slot in bundle.slots if slot.position in left] for bundle in bundles]
        return [Bundle(slots, tuple(slot.position for slot in slots), None) for slots in parts if slots]


def _is_swift(group: HostGroup) -> bool:
    """Tell whether what a core's own cache drives out goes to one that the other rank's core reads as fast.

    Where it does not, as on Intel's processors, laying and taking cost more than reducing everything at the end.
    """
    return bool(group.engine.segment.swift)
