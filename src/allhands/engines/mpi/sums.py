"""Reductions of a few rows of memory in rank order, straight into place: what `fold` does, without its copies.

numpy does the types that it has, torch's `fold` the 16-bit floats. The rules are those of the C core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import shm
from ..fold import fold

__all__ = ["Sum"]

_TYPES: dict[torch.dtype, Any] = {
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.uint16: np.uint16,
    torch.int16: np.int16,
    torch.uint32: np.uint32,
    torch.int32: np.int32,
    torch.uint64: np.uint64,
    torch.int64: np.int64,
    torch.bool: np.bool_,
    torch.float32: np.float32,
    torch.float64: np.float64,
}

# PREMUL_SUM: each rank has multiplied its own part already.
_STEPS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_ON_BOOL = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}

_CODES = {code: dtype for dtype, code in shm.DTYPES.items()}


class Sum:
    """One reduction of one type, for rows of memory that are all of one size."""

    def __init__(self, dtype: int, reduction: int) -> None:
        """Take the core's numbers for the type and the reduction."""
        self._dtype = _CODES[dtype & ~shm.COMPLEX]
        self._reduction = reduction
        name = shm.REDUCTION_NAMES[reduction]
        name = _ON_BOOL.get(name, name) if self._dtype is torch.bool else name
        self._kind = _TYPES.get(self._dtype)
        self._step = _STEPS[name]
        self._mean = name == "AVG"
        self.itemsize = self._dtype.itemsize

    def __call__(self, rows: Sequence[Any], out: Any, spare: Any) -> None:
        """Reduce ``rows``, one buffer for each rank, into ``out``, which may be one of them; ``spare`` is overwritten.

        No other row is changed.
        """
        if self._kind is None or len(rows) == 1:
            made = fold([torch.frombuffer(row, dtype=self._dtype) for row in rows], self._reduction)
            torch.frombuffer(out, dtype=self._dtype).copy_(made)
            return
        arrays = [np.frombuffer(row, self._kind) for row in rows]
        target, total = np.frombuffer(out, self._kind), arrays[0]
        between = np.frombuffer(spare, self._kind, len(target)) if len(rows) > 2 else target
        # Overflow and NaN are the caller's values and no news.
        with np.errstate(all="ignore"):
            for row in arrays[1:-1]:
                total = self._step(total, row, out=between)
            self._step(total, arrays[-1], out=target)
            if self._mean:
                np.divide(target, len(rows), out=target)
