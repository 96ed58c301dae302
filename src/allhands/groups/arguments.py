"""The arguments of torch's communication functions: one table, read by the C fast path and by the desync check."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = [
    "ASYNC",
    "GROUP",
    "GROUP_PEER",
    "IN",
    "OP",
    "OTHER",
    "OUT",
    "PEER",
    "TABLE",
    "TAG",
    "Arguments",
    "Function",
    "given",
    "parameters",
    "roles",
]

# What a parameter is to the C fast path: the numbers of `enum role` in csrc/python/fast_call.h.
OUT, IN, OP, GROUP, ASYNC, PEER, GROUP_PEER, TAG, OTHER = range(9)
_ROLES = {"op": OP, "group": GROUP, "async_op": ASYNC, "tag": TAG}
_ROLES |= {"src": PEER, "dst": PEER, "group_src": GROUP_PEER, "group_dst": GROUP_PEER}


class Function(NamedTuple):
    """One of torch's functions that has a fast path.

    ``operation`` is the core's. ``whole``: one tensor, where the operation takes one per rank or any number.
    ``tensors`` are the parameters that hold tensors, by role. The desync check compares the size and type of
    ``compared``, unless the sizes in ``parts`` differ; both may be "".
    """

    operation: str
    whole: bool
    tensors: dict[str, int]
    compared: str = ""
    parts: str = ""


_ONE = {"tensor": OUT}
_OUT_IN = {"output": OUT, "input": IN}
_INTO = {"output_tensor": OUT, "input_tensor": IN}

TABLE: dict[str, Function] = {
    "all_gather": Function("all_gather", False, {"tensor_list": OUT, "tensor": IN}, "tensor", "tensor_list"),
    "all_gather_into_tensor": Function("all_gather", True, _INTO, "input_tensor"),
    "all_gather_single": Function("all_gather", True, _INTO, "input_tensor"),
    "all_reduce": Function("all_reduce", True, _ONE, "tensor"),
    "all_reduce_coalesced": Function("all_reduce", False, {"tensors": OUT}),
    "all_to_all": Function("all_to_all", False, {"output_tensor_list": OUT, "input_tensor_list": IN}),
    "all_to_all_single": Function("all_to_all", True, _OUT_IN),
    "barrier": Function("barrier", False, {}),
    "broadcast": Function("broadcast", False, _ONE, "tensor"),
    "gather": Function("gather", False, {"tensor": IN, "gather_list": OUT}, "tensor"),
    "recv": Function("recv", False, _ONE),
    "reduce": Function("reduce", False, _ONE, "tensor"),
    "reduce_scatter": Function("reduce_scatter", False, {"output": OUT, "input_list": IN}, "output", "input_list"),
    "reduce_scatter_single": Function("reduce_scatter", True, _OUT_IN, "output"),
    "reduce_scatter_tensor": Function("reduce_scatter", True, _OUT_IN, "output"),
    "scatter": Function("scatter", False, {"tensor": OUT, "scatter_list": IN}, "tensor"),
    "send": Function("send", False, _ONE),
}


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of ``function``, interned."""
    return tuple(map(sys.intern, inspect.signature(function).parameters))


def roles(name: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the roles of the parameters ``names`` of the function ``name``."""
    known = _ROLES | TABLE[name].tensors
    return tuple(known.get(each, OTHER) for each in names)


class Arguments(NamedTuple):
    """The arguments of one call by what they are; None where not given or not a parameter."""

    tensor: Any
    parts: Any
    op: Any
    peer: Any
    group_peer: Any
    has_op: bool
    has_peer: bool


@functools.cache
def _of(name: str) -> tuple[tuple[str, ...], frozenset[str]]:
    names = parameters(getattr(dist, name))
    return names, frozenset(names)


def given(name: str, args: tuple[Any, ...], kw: dict[str, Any]) -> Arguments:
    """Return the arguments of a call of torch's function ``name``."""
    names, every = _of(name)
    function, values = TABLE[name], dict(zip(names, args, strict=False)) | kw
    # A peer is a root here: of `src` and `dst` a function has one.
    peer, group_peer = ("src", "group_src") if "src" in every else ("dst", "group_dst")
    return Arguments(
        values.get(function.compared),
        values.get(function.parts),
        values.get("op"),
        values.get(peer),
        values.get(group_peer),
        "op" in every,
        peer in every,
    )
