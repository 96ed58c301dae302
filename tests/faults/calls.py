"""Every collective by name, with its arguments as plain data: the calls of ranks.

Imported by ranks and by tests; a call is a JSON object, so that a test can hand the same list to every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["KINDS", "NAMES", "REDUCING", "ROOTED", "Call", "Tensors", "issue", "tensors"]

# What the engine makes of each of torch's functions. Two of one kind are one operation: ranks may mix them.
KINDS = {
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
}
NAMES = tuple(KINDS)
ROOTED = ("reduce", "broadcast", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


class Call(NamedTuple):
    """One collective as one rank calls it. ``root`` is a rank of the group, ``count`` the elements of each tensor."""

    name: str
    dtype: str = "float32"
    count: int = 12
    root: int = 0
    reduce: str = "SUM"


class Tensors(NamedTuple):
    """What a call reads and what it writes; for in-place operations the same."""

    given: list[torch.Tensor]
    taken: list[torch.Tensor]


def tensors(call: Call, rank: int, size: int) -> Tensors:
    """Make the tensors of ``call`` for ``rank`` of a group of ``size``: ones to give, sevens to be overwritten."""
    kind = getattr(torch, call.dtype)

    def full(value: int, number: int = 1) -> torch.Tensor:
        return torch.full((call.count * number,), value).to(kind)

    def several(value: int) -> list[torch.Tensor]:
        return [full(value) for _ in range(size)]

    match call.name:
        case "all_reduce" | "reduce" | "broadcast":
            one = [full(1)]
            return Tensors(one, one)
        case "all_gather":
            return Tensors([full(1)], several(7))
        case "all_gather_into_tensor":
            return Tensors([full(1)], [full(7, size)])
        case "gather":
            return Tensors([full(1)], several(7) if rank == call.root else [])
        case "scatter":
            return Tensors(several(1) if rank == call.root else [], [full(7)])
        case "reduce_scatter":
            return Tensors(several(1), [full(7)])
        case "reduce_scatter_tensor":
            return Tensors([full(1, size)], [full(7)])
        case "all_to_all":
            return Tensors(several(1), several(7))
        case "all_to_all_single":
            return Tensors([full(1, size)], [full(7, size)])
    return Tensors([], [])


def issue(library: Any, call: Call, made: Tensors, group: Any, *, later: bool = False) -> Any:
    """Make ``call`` through ``library`` (allhands or torch.distributed); return its work where ``later``."""
    given, taken = made
    root: dict[str, Any] = {"group_src" if call.name in {"broadcast", "scatter"} else "group_dst": call.root}
    reduction: dict[str, Any] = {"op": getattr(library.ReduceOp, call.reduce)}
    rest: dict[str, Any] = {"group": group, "async_op": later}
    function: Callable[..., Any] = getattr(library, call.name)
    match call.name:
        case "all_reduce":
            return function(given[0], **reduction, **rest)
        case "reduce":
            return function(given[0], **root, **reduction, **rest)
        case "broadcast":
            return function(given[0], **root, **rest)
        case "all_gather":
            return function(taken, given[0], **rest)
        case "gather":
            return function(given[0], taken or None, **root, **rest)
        case "scatter":
            return function(taken[0], given or None, **root, **rest)
        case "reduce_scatter":
            return function(taken[0], given, **reduction, **rest)
        case "reduce_scatter_tensor":
            return function(taken[0], given[0], **reduction, **rest)
        case "all_gather_into_tensor" | "all_to_all_single":
            return function(taken[0], given[0], **rest)
        case "all_to_all":
            return function(taken, given, **rest)
    return function(**rest)
