"""Gradients that are reduced where they lie, in no bucket, on our own engine: nothing is copied before or after.

The few that cannot be (there is none, it is sparse, another one shares its memory) lie in their buckets meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import _core
from ...groups.staging import extents
from . import bucket_memory
from .storage import Bucket, Slot

__all__ = ["Bundle", "Gathered", "tie"]


class Gathered(NamedTuple):
    """What one rank gives to a reduction: a tensor for each gradient and the mark, and which lie in their buckets."""

    tensors: list[torch.Tensor]
    moved: list[Slot]


class Bundle(NamedTuple):
    """The gradients of one type, and an element more that is averaged with them, where it is the last to go."""

    slots: list[Slot]
    order: tuple[int, ...]
    mark: torch.Tensor | None

    def gather(self, intake: _core.Intake, names: Sequence[str], rank: int) -> Gathered:
        """Return what is to be reduced. Raises module-changed, with the name and ``rank``, where one does not fit."""
        found: list[torch.Tensor] | None = intake.gather(self.order)
        moved: list[Slot] = []
        if found is None:
            staying = {slot.position: each for slot in self.slots if (each := _staying(slot)) is not None}
            if staying and not _core.apart(extents([*staying.values()])):
                staying = {}
            moved = [slot for slot in self.slots if slot.position not in staying]
            with torch.no_grad():
                bucket_memory.lay(moved, names, rank)
            found = [_line(staying.get(slot.position, slot.view)) for slot in self.slots]
        if self.mark is not None:
            found.append(self.mark)
        return Gathered(found, moved)

    def zeros(self) -> list[torch.Tensor]:
        """Return what a rank without inputs gives."""
        made = [torch.zeros(slot.parameter.numel(), dtype=slot.parameter.dtype) for slot in self.slots]
        return made if self.mark is None else [*made, torch.zeros_like(self.mark)]


def tie(buckets: Sequence[Bucket], mark: torch.Tensor | None, *, together: bool) -> list[Bundle]:
    """Return a bundle for the gradients of each bucket, or with ``together`` one for each type.

    ``mark`` goes with the last one, and that is the one with the last bucket. Gradients that came last are first: they
    are most likely still in a cache.
    """
    parts: dict[Any, list[Slot]] = {}
    for number, bucket in enumerate(buckets):
        key = bucket.slots[0].parameter.dtype if together else number
        parts[key] = [*parts.pop(key, []), *bucket.slots]
    tied = [Bundle(slots[::-1], tuple(slot.position for slot in slots[::-1]), None) for slots in parts.values()]
    tied[-1] = tied[-1]._replace(mark=mark)
    return tied


def _staying(slot: Slot) -> torch.Tensor | None:
    """Return a gradient that is in memory as it would be in its bucket, and in whose values nobody else has a say."""
    gradient, view = slot.parameter.grad, slot.view
    if gradient is None or view is None or type(gradient) is not torch.Tensor or not slot.parameter.requires_grad:
        return None
    if gradient.layout is not torch.strided or not gradient.is_cpu or gradient.requires_grad:
        return None
    if gradient.is_conj() or gradient.is_neg():
        return None
    alike = (gradient.dtype, gradient.shape, gradient.stride()) == (view.dtype, view.shape, view.stride())
    return gradient if alike else None


def _line(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the elements of ``tensor``, which fill their memory, in the order in which they lie there."""
    if tensor is None:
        raise ValueError("a dense gradient has a place in a bucket")
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
