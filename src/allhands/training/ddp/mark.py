"""The element that is averaged with the last gradients: how many are missing on some rank, so that all hear of it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["Mark"]

# Read and written as memory: by way of torch each takes 10 to 30 us when a training step has filled the caches.
_KINDS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


class Mark:
    """One element of ``tensor``, all of which it is. On a GPU it can be written, and reading it stops the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        kind = _KINDS.get(tensor.dtype) if tensor.is_cpu else None
        self._memory = None if kind is None else kind.from_address(tensor.data_ptr())

    def write(self, count: int) -> None:
        """Say that ``count`` gradients are missing here."""
        if self._memory is None:
            self.tensor.fill_(count)
        else:
            self._memory.value = count

    def is_clear(self) -> bool:
        """Tell whether nobody misses any, as far as that can be read as memory: the usual case, in every pass."""
        return self._memory is not None and not self._memory.value

    def read(self) -> float:
        """Return what became of all ranks' counts: 0 where nobody misses any."""
        return float(self.tensor) if self._memory is None else float(self._memory.value)
