"""Giving one rank's tensors (parameters at the start, buffers before each pass) to all, in few broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import _torch
from .reduction import broadcast

__all__ = ["Spread", "buffers_of", "spread"]

# Tensors of at least this many bytes go by themselves, where they are; smaller ones are put together first, because a
# broadcast of a few bytes takes as long as one of this many.
_ALONE_BYTES = 1 << 18

# Every type's elements begin on a multiple of this.
_ALIGNED = 16


def spread(tensors: Iterable[torch.Tensor], group: Any, source: int) -> None:
    """Give everyone the ``tensors`` of the rank ``source`` of ``group``. All ranks call this."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    for each in by_device.values():
        Spread(each, group).send(source)


def buffers_of(modules: Iterable[torch.nn.Module], ignored: set[int]) -> list[torch.Tensor]:
    """Return the buffers of ``modules`` as they are now, each once; modules put new ones in their places."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        for buffer in _torch.own_buffers(module).values():
            if buffer is not None and id(buffer) not in ignored:
                found[id(buffer)] = buffer
    return list(found.values())


class Spread:
    """Tensors of one device that are broadcast together, again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: Any) -> None:
        self.tensors = list(tensors)
        self._group = group
        self._alone = [each for each in tensors if each.nbytes >= _ALONE_BYTES and each.is_contiguous()]
        alone = {id(each) for each in self._alone}
        self._small = [each for each in tensors if id(each) not in alone and each.numel()]
        places, end = [], 0
        for each in self._small:
            places.append(end)
            end += -(-each.nbytes // _ALIGNED) * _ALIGNED
        device = tensors[0].device if tensors else None
        self._bytes = torch.empty(end, dtype=torch.uint8, device=device)
        self._views = [
            self._bytes[at : at + each.nbytes].view(each.dtype).view(each.shape)
            for at, each in zip(places, self._small, strict=True)
        ]

    @torch.no_grad()
    def send(self, source: int) -> None:
        """Give everyone the tensors of the rank ``source``."""
        for each in self._alone:
            broadcast(each, self._group, source)
        if not self._small:
            return
        mine = self._group.rank() == source
        if mine:
            _torch.foreach_copy(self._views, self._small)
        broadcast(self._bytes, self._group, source)
        if not mine:
            _torch.foreach_copy(self._small, self._views)
