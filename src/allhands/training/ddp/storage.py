"""The memory that gradients are reduced in: one tensor for each type and device, in the segment where there is one.

Buckets are parts of it, so that another order of the buckets needs no other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...errors import ResourceError
from ...groups import registered
from ...groups.hostgroup import HostGroup
from .bucket import ItemSize, Place, assign, place

__all__ = ["Bucket", "Slot", "Storage", "view_like"]


class Slot(NamedTuple):
    """One parameter of a bucket, and where its gradient lies there; a sparse one lies nowhere."""

    position: int
    parameter: torch.nn.Parameter
    view: torch.Tensor | None


class Bucket(NamedTuple):
    """Gradients that are reduced together. ``flat`` is all of them, ``marked`` that and one element more."""

    slots: list[Slot]
    flat: torch.Tensor | None
    marked: torch.Tensor | None


class Storage:
    """The buckets of ``parameters``. All ranks of the group make it with the same parameters, and call `arrange`."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        sparse: Sequence[bool],
        group: Any,
        caps_bytes: Sequence[int],
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._caps_bytes = caps_bytes
        self._items = [
            ItemSize(each.numel(), each.element_size(), (each.dtype, each.device), alone)
            for each, alone in zip(parameters, sparse, strict=True)
        ]
        self._memory: dict[Any, torch.Tensor] = {}
        self._spare = False
        self.in_segment = False
        # All buckets of a type, with the mark of the last one, as one tensor; the type of the last bucket is the last.
        # None where sparse gradients stand between.
        self.wholes: list[torch.Tensor] = []

    def arrange(self, order: Sequence[int], *, spare: bool = False) -> list[Bucket]:
        """Return the buckets for gradients that come in ``order``. What lay in the former ones is lost.

        ``spare`` ones are for exceptions: ordinary memory, which costs nothing until something is written to it.
        """
        if self._spare and not spare:
            self._memory.clear()
        self._spare = spare
        buckets = assign(self._items, order, self._caps_bytes)
        places = dict(place(self._items, buckets))
        needs: dict[Any, int] = {}
        ends: dict[Any, int] = {}
        for number, found in places.items():
            kind = self._items[buckets[number][0]].kind
            needs[kind] = found.start + found.room
            ends.pop(kind, None)
            ends[kind] = found.start + found.numel + 1
        for kind, need in needs.items():
            if kind not in self._memory or self._memory[kind].numel() < need:
                self._memory[kind] = self._make(kind, need)
        dense = len(places) == len(buckets)
        self.wholes = [self._memory[kind][:end] for kind, end in ends.items()] if dense else []
        return [self._bucket(members, places.get(number)) for number, members in enumerate(buckets)]

    def _make(self, kind: tuple[torch.dtype, torch.device], numel: int) -> torch.Tensor:
        dtype, device = kind
        # Spare lines, so that an order that wastes more of them fits too.
        numel += 16 * len(self._items)
        if device.type == "cpu" and isinstance(self._group, HostGroup) and not self._spare:
            try:
                made = registered.empty(numel, dtype=dtype, group=self._group)
            except ResourceError:
                # No room for it, which every rank is told: ordinary memory goes through the slots.
                return torch.zeros(numel, dtype=dtype)
            self.in_segment = True
            return made
        return torch.empty(numel, dtype=dtype, device=device)

    def _bucket(self, members: Sequence[int], found: Place | None) -> Bucket:
        if found is None:
            return Bucket([Slot(index, self._parameters[index], None) for index in members], None, None)
        memory = self._memory[self._items[members[0]].kind]
        slots, at = [], found.start
        for index in members:
            parameter = self._parameters[index]
            slots.append(Slot(index, parameter, view_like(memory, at, parameter)))
            at += parameter.numel()
        end = found.start + found.numel
        return Bucket(slots, memory[found.start : end], memory[found.start : end + 1])


def view_like(memory: torch.Tensor, at: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of ``memory`` from ``at`` on with the shape, and if it can be the strides, of ``parameter``.

    Gradients with the strides of their parameters are what optimizers are fastest with (channels_last).
    """
    if parameter.is_contiguous() or not _is_dense(parameter):
        return memory[at : at + parameter.numel()].view(parameter.shape)
    return memory.as_strided(parameter.shape, parameter.stride(), memory.storage_offset() + at)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements of ``tensor`` fill their memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
