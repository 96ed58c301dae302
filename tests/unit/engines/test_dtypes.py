from __future__ import annotations

from functools import reduce

import pytest
import torch

from allhands.engines.dtypes import REDUCTION_NAMES, reduce_rows

NUMBER = {name: number for number, name in enumerate(REDUCTION_NAMES)}
MODELS = {
    "SUM": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": min,
    "MAX": max,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def wrapped(value: int, kind: torch.dtype) -> int:
    """Return ``value`` as an integer of that width keeps it."""
    bits = torch.iinfo(kind).bits
    value %= 1 << bits
    return value - (1 << bits) if torch.iinfo(kind).min < 0 and value >> (bits - 1) else value


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_integers(kind: torch.dtype, name: str) -> None:
    """Integers of every width are reduced as Python would, wrapped to the width; the rows stay as they are."""
    limits = torch.iinfo(kind)
    values = [[0, 1, limits.max, limits.min, 77], [3, limits.max, limits.max, 5, 77], [limits.max, 2, 1, 9, 13]]
    rows = [torch.tensor(row, dtype=kind) for row in values]
    found = reduce_rows(rows, NUMBER[name])
    assert found.dtype == kind
    assert found.tolist() == [wrapped(reduce(MODELS[name], column), kind) for column in zip(*values, strict=True)]
    assert [row.tolist() for row in rows] == values


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_round_once(kind: torch.dtype) -> None:
    """What each step would round away is there in the end."""
    rows = [torch.tensor([2048.0], dtype=kind), *[torch.tensor([1.0], dtype=kind)] * 16]
    assert reduce_rows(rows, NUMBER["SUM"]).item() == torch.tensor(2064.0).to(kind).item()
    assert reduce_rows(rows[:2], NUMBER["AVG"]).item() == torch.tensor(2049.0 / 2).to(kind).item()


def test_floats_go_in_rank_order() -> None:
    """The order is that of the ranks: the same bits as the C core's."""
    rows = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    assert reduce_rows(rows, NUMBER["SUM"]).item() == ((rows[0] + rows[1]) + rows[2]).item()
    assert reduce_rows([torch.tensor([3.0]), torch.tensor([4.0])], NUMBER["AVG"]).item() == 3.5


def test_truth_is_added_by_or_and_multiplied_by_and() -> None:
    """On bool every reduction has its logical meaning."""
    rows = [torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])]
    for names, want in (
        (("SUM", "MAX", "BOR"), [False, True, True, True]),
        (("PRODUCT", "MIN", "BAND"), [False, False, False, True]),
        (("BXOR",), [False, True, True, False]),
    ):
        for name in names:
            assert reduce_rows(rows, NUMBER[name]).tolist() == want
