"""`_core.reduce`, which adds several sources in one pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allhands.engines.dtypes import DTYPES

_core = pytest.importorskip("allhands._core", reason="the C core is built on Linux only")

SUM, AVG = _core.REDUCTIONS["SUM"], _core.REDUCTIONS["AVG"]

# Empty, less than a vector, more than a block, and several blocks with a remainder.
SIZES = [0, 1, 7, 4099, 12301]


def in_order(rows: list[np.ndarray], reduction: int) -> np.ndarray:
    """Return the sum or mean of ``rows``, added one after the other and divided last."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total / rows[0].dtype.type(len(rows)) if reduction == AVG else total


@pytest.mark.parametrize("reduction", [SUM, AVG])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", range(1, 12))
def test_floats_are_added_in_the_order_of_the_ranks(dtype: str, number: int, reduction: int) -> None:
    """The bits are those of adding one source after the other, whichever memory the result is written to."""
    random = np.random.default_rng(number)
    for size in SIZES:
        rows = [random.standard_normal(size).astype(dtype) for _ in range(number)]
        expected = in_order(rows, reduction)
        for place in range(-1, number):
            given = [row.copy() for row in rows]
            out = np.empty_like(rows[0]) if place < 0 else given[place]
            addresses = tuple(row.ctypes.data for row in given)
            _core.reduce(DTYPES[getattr(torch, dtype)], reduction, out.ctypes.data, addresses, out.nbytes)
            assert out.tobytes() == expected.tobytes(), (size, place)
            others = [index for index in range(number) if index != place]
            assert all(given[index].tobytes() == rows[index].tobytes() for index in others), (size, place)
