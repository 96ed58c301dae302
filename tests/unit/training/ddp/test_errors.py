from __future__ import annotations

import torch

from allhands.errors import TrainingError
from allhands.training.ddp import errors
from allhands.training.ddp.check import _rows, digest


def test_unused_parameters_are_listed_with_their_ranks() -> None:
    """Each name has its ranks, long lists are counted, and the exception has the ranks for programs."""
    problem = errors.unused(0, {f"p{number}": [1, 2, 3] for number in range(20)}, static=False)
    assert isinstance(problem, TrainingError)
    assert problem.slug == "unused-parameters"
    assert "p0 on ranks 1-3" in str(problem)
    assert "and 8 more parameters" in str(problem)
    assert problem.ranks == (1, 2, 3)
    assert "find_unused_parameters=True" in str(problem)
    assert "static_graph" in str(errors.unused(0, {"p": [0]}, static=True))


def test_differences_are_told_by_value_and_rank() -> None:
    """Only what differs is told: with hashes for values, and in words for what a rank does not have."""
    tables = [[("a", "1" * 32), ("b", "2" * 32)], [("a", "1" * 32), ("b", "3" * 32)], [("a", "1" * 32)]]
    rows = _rows(tables, [0, 1, 5], values=True)
    assert rows == {"b": {"hash 222222222222": [0], "hash 333333333333": [1], "missing": [5]}}


def test_another_order_is_told_by_its_place() -> None:
    """The same parameters in another order are named where they first differ."""
    tables = [[("a", "x"), ("b", "y")], [("b", "y"), ("a", "x")]]
    assert _rows(tables, [0, 1], values=False) == {"parameter 0": {"a": [0], "b": [1]}}


def test_a_digest_is_of_the_values() -> None:
    """Strides and devices do not count, single bits do."""
    tensor = torch.randn(4, 6)
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    changed = tensor.clone()
    changed.view(torch.int32)[0, 0] ^= 1
    assert digest(tensor) != digest(changed)
    assert digest(torch.empty(0)) == digest(torch.empty(0, 3))
