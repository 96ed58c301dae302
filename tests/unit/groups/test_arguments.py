"""The table of arguments: the fast path and the desync check read the same calls alike."""

from __future__ import annotations

import inspect
from typing import Any

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
    assert found.count(arguments.ROLES.index("out")) == list(entry.tensors.values()).count("out")
    assert arguments.ROLES.index("group") in found


def test_arguments_are_read_by_position_and_by_name() -> None:
    """Both ways of calling give the same; what is not given is None."""
    for given in (
        arguments.given("reduce", (X, 1, dist.ReduceOp.MAX), {}),
        arguments.given("reduce", (), {"tensor": X, "dst": 1, "op": dist.ReduceOp.MAX}),
    ):
        assert given["tensor"] is X
        assert (given["dst"], given["op"], given["group_dst"]) == (1, dist.ReduceOp.MAX, None)
    given = arguments.given("broadcast", (X,), {"group_src": 2})
    assert (given["src"], given["group_src"], "op" in given) == (None, 2, False)


def test_the_compared_tensor_is_the_one_of_this_rank() -> None:
    """Of a gather it is what the rank gives, of a scatter what it gets; lists are there to find uneven parts."""

    def compared(name: str, *args: Any) -> tuple[Any, Any]:
        given, entry = arguments.given(name, args, {}), arguments.TABLE[name]
        return given.get(entry.compared), given.get(entry.parts)

    assert compared("all_gather", PARTS, X) == (X, PARTS)
    assert compared("scatter", X, PARTS, 0)[0] is X
    assert compared("reduce_scatter", X, PARTS) == (X, PARTS)
    assert compared("all_to_all_single", X, X) == (None, None)
    assert compared("barrier") == (None, None)
