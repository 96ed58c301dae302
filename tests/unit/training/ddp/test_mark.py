"""The element that carries how many gradients are missing."""

from __future__ import annotations

import pytest
import torch

from allhands.training.ddp.mark import Mark


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_it_is_the_element_of_its_tensor(dtype: torch.dtype) -> None:
    """What is written stands in the tensor, what becomes of the tensor is read, and its neighbours stay as they are."""
    whole = torch.full((3,), 7.0, dtype=dtype)
    mark = Mark(whole[1])
    mark.write(5)
    assert whole.tolist() == [7, 5, 7]
    whole.mul_(0.5)
    assert mark.read() == 2.5
    assert not mark.is_clear()
    mark.write(0)
    assert mark.read() == 0
    # Of the others nobody knows before they are read.
    assert mark.is_clear() == (dtype in {torch.float32, torch.float64})
    assert whole.tolist() == [3.5, 0, 3.5]


def test_it_holds_its_memory() -> None:
    """The tensor that it is part of may be forgotten."""
    mark = Mark(torch.zeros(1 << 20)[-1])
    mark.write(3)
    torch.full((1 << 20,), 9.0)
    assert mark.read() == 3
