"""The arguments of torch's communication functions: one table, read by the C fast path and by the desync check."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["ROLES", "TABLE", "Function", "given", "parameters", "roles"]

# What a parameter is to the C fast path, by its number in `enum role` of csrc/python/fast_path.c.
ROLES = ("out", "in", "op", "group", "async_op", "peer", "group_peer", "tag", "other")
_ROLES = {"op": "op", "group": "group", "async_op": "async_op", "tag": "tag"}
_ROLES |= {"src": "peer", "dst": "peer", "group_src": "group_peer", "group_dst": "group_peer"}


class Function(NamedTuple):
    """One of torch's functions that has a fast path.

    ``operation`` is the core's. ``whole``: one tensor, where the operation takes one per rank or any number.
    ``tensors`` are the parameters that hold tensors, by role. The desync check compares the size and type of
    ``compared``, unless the sizes in ``parts`` differ; both may be "".
    """

    operation: str
    whole: bool
    tensors: dict[str, str]
    compared: str = ""
    parts: str = ""


_ONE = {"tensor": "out"}
_OUT_IN = {"output": "out", "input": "in"}
_INTO = {"output_tensor": "out", "input_tensor": "in"}

TABLE: dict[str, Function] = {
    "all_gather": Function("all_gather", False, {"tensor_list": "out", "tensor": "in"}, "tensor", "tensor_list"),
    "all_gather_into_tensor": Function("all_gather", True, _INTO, "input_tensor"),
    "all_gather_single": Function("all_gather", True, _INTO, "input_tensor"),
    "all_reduce": Function("all_reduce", True, _ONE, "tensor"),
    "all_reduce_coalesced": Function("all_reduce", False, {"tensors": "out"}),
    "all_to_all": Function("all_to_all", False, {"output_tensor_list": "out", "input_tensor_list": "in"}),
    "all_to_all_single": Function("all_to_all", True, _OUT_IN),
    "barrier": Function("barrier", False, {}),
    "broadcast": Function("broadcast", False, _ONE, "tensor"),
    "gather": Function("gather", False, {"tensor": "in", "gather_list": "out"}, "tensor"),
    "recv": Function("recv", False, _ONE),
    "reduce": Function("reduce", False, _ONE, "tensor"),
    "reduce_scatter": Function("reduce_scatter", False, {"output": "out", "input_list": "in"}, "output", "input_list"),
    "reduce_scatter_single": Function("reduce_scatter", True, _OUT_IN, "output"),
    "reduce_scatter_tensor": Function("reduce_scatter", True, _OUT_IN, "output"),
    "scatter": Function("scatter", False, {"tensor": "out", "scatter_list": "in"}, "tensor"),
    "send": Function("send", False, _ONE),
}


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of ``function``, interned."""
    return tuple(map(sys.intern, inspect.signature(function).parameters))


def roles(name: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of the roles of the parameters ``names`` of the function ``name``."""
    known = _ROLES | TABLE[name].tensors
    return tuple(ROLES.index(known.get(each, "other")) for each in names)


@functools.cache
def _names(name: str) -> tuple[str, ...]:
    return parameters(getattr(dist, name))


def given(name: str, args: tuple[Any, ...], kw: dict[str, Any]) -> dict[str, Any]:
    """Return the value of each parameter in a call of torch's function ``name``; None where none is given."""
    names = _names(name)
    return dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kw
