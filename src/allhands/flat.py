"""Tensors as the shared-memory engine takes them: contiguous, for the length of a call."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from .engines import shm

__all__ = ["Flat", "Flats", "dense"]


def dense(*tensors: torch.Tensor) -> bool:
    """Tell whether the shared-memory engine takes ``tensors``."""
    return all(tensor.device.type == "cpu" and tensor.layout is torch.strided for tensor in tensors)


class Flats:
    """Contiguous stand-ins of tensors; with ``back``, what was written to a stand-in is copied back at the end."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, back: bool = True) -> None:
        self._given = tensors
        self._back = back
        self.tensors = [tensor.contiguous() for tensor in tensors]

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses and sizes, as the core takes them."""
        return shm.parts(self.tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None or not self._back:
            return
        for given, tensor in zip(self._given, self.tensors, strict=True):
            if given is not tensor and given.data_ptr() != tensor.data_ptr():
                given.copy_(tensor)


class Flat(Flats):
    """A contiguous stand-in of one tensor."""

    def __init__(self, tensor: torch.Tensor, *, back: bool = True) -> None:
        super().__init__([tensor], back=back)

    @property
    def tensor(self) -> torch.Tensor:
        """The stand-in."""
        return self.tensors[0]

    @property
    def place(self) -> tuple[int, ...]:
        """Its address and size."""
        return self.places
