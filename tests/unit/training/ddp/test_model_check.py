from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from allhands.errors import AllhandsError
from allhands.training.ddp.model_check import ModuleWatch, _differences, digest


def test_differences_by_value_and_rank() -> None:
    """Only names that differ are returned: with hashes of values, and "missing" for a rank without the name."""
    tables = [[("a", "1" * 32), ("b", "2" * 32)], [("a", "1" * 32), ("b", "3" * 32)], [("a", "1" * 32)]]
    rows = _differences(tables, [0, 1, 5], values=True)
    assert rows == {"b": {"hash 222222222222": [0], "hash 333333333333": [1], "missing": [5]}}


def test_another_order_is_reported_by_position() -> None:
    """The same parameters in another order are named where they first differ."""
    tables = [[("a", "x"), ("b", "y")], [("b", "y"), ("a", "x")]]
    assert _differences(tables, [0, 1], values=False) == {"parameter 0": {"a": [0], "b": [1]}}


def test_digest_depends_on_values_only() -> None:
    """Strides and devices do not count, single bits do."""
    tensor = torch.randn(4, 6)
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    changed = tensor.clone()
    changed.view(torch.int32)[0, 0] ^= 1
    assert digest(tensor) != digest(changed)
    assert digest(torch.empty(0)) == digest(torch.empty(0, 3))


def test_replaced_parameter_is_detected_even_at_the_same_address() -> None:
    """An object that was freed is not confused with a new one that the allocator puts in its place."""
    module = nn.Linear(2, 2, bias=False)
    watch = ModuleWatch(module, frozenset())
    address = id(module.weight)
    module._parameters.clear()
    gc.collect()
    others = [nn.Parameter(torch.zeros(2, 2)) for _ in range(1000)]
    # Without a reference in the watch, one of these would have the address of the first.
    module.weight = next((other for other in others if id(other) == address), others[0])
    with pytest.raises(AllhandsError, match="replaced: weight"):
        watch.check(0)


def test_added_removed_and_replaced_parameters_are_named() -> None:
    """The error is raised in every pass as long as the module is another one."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch = ModuleWatch(module, frozenset())
    watch.check(0)
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    module.append(nn.Linear(2, 2))
    for _ in range(2):
        with pytest.raises(AllhandsError, match=r"new: 2\.weight and 2\.bias\n.*replaced: 0\.weight") as caught:
            watch.check(0)
        assert caught.value.slug == "module-changed"


def test_modules_without_parameters_may_be_added() -> None:
    """The parameters are the same; later changes are detected in the new module too."""
    module = nn.Sequential(nn.Linear(2, 2))
    watch = ModuleWatch(module, frozenset())
    module.append(nn.Tanh())
    watch.check(0)
    module[1].weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(AllhandsError, match=r"new: 1\.weight"):
        watch.check(0)


def test_long_lists_of_changed_parameters_are_cut() -> None:
    """With the number of the others; a kind of change without parameters is not listed."""
    module = nn.ParameterDict({"q": torch.zeros(1)})
    watch = ModuleWatch(module, frozenset())
    module["q"] = nn.Parameter(torch.ones(1))
    for number in range(20):
        module[f"p{number}"] = nn.Parameter(torch.ones(1))
    with pytest.raises(AllhandsError) as caught:
        watch.check(0)
    assert "new: p0, p1" in str(caught.value)
    assert "p11 and 8 more" in str(caught.value)
    assert "replaced: q" in str(caught.value)
    assert "gone" not in str(caught.value)
