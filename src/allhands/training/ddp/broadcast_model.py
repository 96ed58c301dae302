"""Broadcast one rank's tensors (parameters at the start, buffers before each pass) with few collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ... import _torch
from .model_check import TableWatch
from .reduction import broadcast

__all__ = ["BufferBroadcast", "CoalescedBroadcast", "broadcast_tensors"]

# Tensors of at least this many bytes are broadcast by themselves, without a copy; smaller ones are copied into one flat
# tensor, because the latency of a broadcast of few bytes is about the time that this many take.
_LARGE_BYTES = 1 << 18

# Start of each tensor in the flat one: a multiple of every dtype's size.
_ALIGNMENT = 16


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: Any, source: int) -> None:
    """Broadcast ``tensors`` from the rank ``source`` of ``group``. All ranks call this."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    for each in by_device.values():
        CoalescedBroadcast(each, group).send(source)


class BufferBroadcast:
    """Broadcasts the present buffers of ``modules``, except those whose ids are in ``ignored``."""

    def __init__(self, modules: Iterable[torch.nn.Module], ignored: set[int]) -> None:
        self._watch = TableWatch(_torch.own_buffers(module) for module in modules)
        self._ignored = ignored
        self._buffers: list[torch.Tensor] | None = None
        self._broadcast: CoalescedBroadcast | None = None

    def buffers(self) -> list[torch.Tensor]:
        """Return each buffer once; modules may have replaced some since the last pass."""
        if self._buffers is None or self._watch.changed():
            self._watch.record()
            found = {id(each): each for each in self._watch.values if each is not None}
            self._buffers = [each for key, each in found.items() if key not in self._ignored]
            self._broadcast = None
        return self._buffers

    def send(self, group: Any, source: int) -> None:
        """Broadcast the buffers from the rank ``source`` of ``group``. All ranks call this."""
        buffers = self.buffers()
        if len({each.device for each in buffers}) > 1:
            broadcast_tensors(buffers, group, source)
            return
        if self._broadcast is None:
            self._broadcast = CoalescedBroadcast(buffers, group)
        self._broadcast.send(source)


class CoalescedBroadcast:
    """Tensors of one device that are broadcast together, any number of times."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: Any) -> None:
        self._group = group
        self._large = [each for each in tensors if each.nbytes >= _LARGE_BYTES and each.is_contiguous()]
        large = {id(each) for each in self._large}
        self._small = [each for each in tensors if id(each) not in large and each.numel()]
        sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in self._small]
        self._flat = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device if tensors else None)
        self._views = [
            part[: each.nbytes].view(each.dtype).view(each.shape)
            for part, each in zip(torch.split(self._flat, sizes), self._small, strict=True)
        ]

    @torch.no_grad()
    def send(self, source: int) -> None:
        """Broadcast the tensors from the group rank ``source``. All ranks call this."""
        for each in self._large:
            broadcast(each, self._group, source)
        if not self._small:
            return
        sends = self._group.rank() == source
        if sends:
            _torch.foreach_copy(self._views, self._small)
        broadcast(self._flat, self._group, source)
        if not sends:
            _torch.foreach_copy(self._small, self._views)
