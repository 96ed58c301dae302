"""Giving one rank's tensors (parameters at the start, buffers before each pass) to all, in few broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ... import _core, _torch
from .reduction import broadcast

__all__ = ["Buffers", "Spread", "spread"]

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


class Buffers:
    """The buffers of ``modules`` but for those that are ``ignored``, as they are at any time."""

    def __init__(self, modules: Iterable[torch.nn.Module], ignored: set[int]) -> None:
        self._tables = [_torch.own_buffers(module) for module in modules]
        self._ignored = ignored
        self._stand: bytes | None = None
        self._found: list[torch.Tensor] = []
        self._spread: Spread | None = None

    def now(self) -> list[torch.Tensor]:
        """Return each of them once; modules put new ones in their places."""
        stand = _core.inhabitants(self._tables)
        if stand != self._stand:
            each = (buffer for table in self._tables for buffer in table.values() if buffer is not None)
            self._found = [*{id(buffer): buffer for buffer in each if id(buffer) not in self._ignored}.values()]
            self._stand, self._spread = stand, None
        return self._found

    def send(self, group: Any, source: int) -> None:
        """Give everyone those of the rank ``source`` that `now` found."""
        if len({each.device for each in self._found}) > 1:
            spread(self._found, group, source)
            return
        if self._spread is None:
            self._spread = Spread(self._found, group)
        self._spread.send(source)


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
        # Copied as memory where they can be: by way of torch that takes 0.1 ms when a training step filled the caches.
        self._places = _places(self._views) if all(map(_is_memory, self._small)) else None

    def send(self, source: int) -> None:
        """Give everyone the tensors of the rank ``source``."""
        theirs = self._memory()
        if theirs is not None and not self._alone:
            self._send(source, theirs)
            return
        with torch.no_grad():
            self._send(source, theirs)

    def _memory(self) -> tuple[int, ...] | None:
        """Return where the small ones lie, if they can be copied from there: they may have been given other memory."""
        if self._places is None or not all(each.is_cpu and each.is_contiguous() for each in self._small):
            return None
        return _places(self._small)

    def _send(self, source: int, theirs: tuple[int, ...] | None) -> None:
        for each in self._alone:
            broadcast(each, self._group, source)
        if not self._small:
            return
        mine = self._group.rank() == source
        if mine:
            self._put_together(theirs)
        broadcast(self._bytes, self._group, source)
        if not mine:
            self._take_apart(theirs)

    def _put_together(self, theirs: tuple[int, ...] | None) -> None:
        if theirs is None or self._places is None:
            _torch.foreach_copy(self._views, self._small)
        else:
            _core.copy(self._places, theirs)

    def _take_apart(self, theirs: tuple[int, ...] | None) -> None:
        if theirs is None or self._places is None:
            _torch.foreach_copy(self._small, self._views)
        else:
            _core.copy(theirs, self._places)
            # As torch notes what it writes: autograd refuses what it has saved and finds changed.
            torch.autograd.graph.increment_version(self._small)


def _is_memory(tensor: torch.Tensor) -> bool:
    """Tell whether the values of ``tensor`` are what lies in its memory, one after the other."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer} or tensor.layout is not torch.strided:
        return False
    return (
        tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj() or tensor.is_inference())
    )


def _places(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return address and bytes of each; all are contiguous."""
    return tuple(number for each in tensors for number in (each.data_ptr(), each.nbytes))
