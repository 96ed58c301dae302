"""The table of arguments: the fast path and the desync check read the same calls alike."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from allhands.groups import arguments

X = torch.ones(4)
PARTS = [torch.empty(4), torch.empty(4)]


@pytest.mark.parametrize("name", [name for name in arguments.TABLE if hasattr(dist, name)])
def test_the_table_names_parameters_that_torch_has(name: str) -> None:
    """Every tensor, the compared one and the list of parts are parameters of torch's function."""
    entry, names = arguments.TABLE[name], set(inspect.signature(getattr(dist, name)).parameters)
    assert set(entry.tensors) <= names
    assert {entry.compared, entry.parts} - {""} <= set(entry.tensors)
    found = arguments.roles(name, arguments.parameters(getattr(dist, name)))
    assert found.count(arguments.OUT) == list(entry.tensors.values()).count(arguments.OUT)
    assert arguments.GROUP in found


def test_arguments_are_read_by_position_and_by_name() -> None:
    """Both ways of calling give the same; what is not given is None."""
    for given in (
        arguments.given("reduce", (X, 1, dist.ReduceOp.MAX), {}),
        arguments.given("reduce", (), {"tensor": X, "dst": 1, "op": dist.ReduceOp.MAX}),
    ):
        assert given.tensor is X
        assert (given.peer, given.op, given.has_op, given.has_peer) == (1, dist.ReduceOp.MAX, True, True)
    assert arguments.given("broadcast", (X,), {"group_src": 2})[3:5] == (None, 2)


def test_the_compared_tensor_is_the_one_of_this_rank() -> None:
    """Of a gather it is what the rank gives, of a scatter what it gets; lists are there to find uneven parts."""
    assert arguments.given("all_gather", (PARTS, X), {})[:2] == (X, PARTS)
    assert arguments.given("scatter", (X, PARTS, 0), {}).tensor is X
    assert arguments.given("reduce_scatter", (X, PARTS), {})[:2] == (X, PARTS)
    assert arguments.given("all_to_all_single", (X, X), {}).tensor is None
    assert arguments.given("barrier", (), {})[:3] == (None, None, None)
