"""Tensors that live in memory which all ranks of a group share, so that collectives reach them without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import fail
from .process_group import Group

__all__ = ["empty", "register"]


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, group: Any = None) -> torch.Tensor:
    """Return an uninitialised tensor that the other ranks of ``group`` can reach where it is.

    Every rank of the group calls this, with the same size, and gets a tensor of its own. An `all_reduce` of it takes no
    copy where all ranks give the tensor (or the same part of it) that they got from the same call; used otherwise it is
    a tensor like any other. Its memory is given back once the tensor and its views are gone.

    In a group that is not in shared memory (another backend, several hosts) this is `torch.empty`.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    dtype = dtype or torch.get_default_dtype()
    group = group if group is not None else dist.group.WORLD
    if not isinstance(group, Group) or not group.engine.capabilities.shared_tensors:
        return torch.empty(shape, dtype=dtype)
    elements = math.prod(shape)
    window = group.window(elements * dtype.itemsize)
    if window is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(window, dtype=dtype, count=elements).view(shape)


def register(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Move ``tensor`` into memory that the other ranks of ``group`` can reach, as `empty` has it; return it.

    Every rank of the group calls this, with a tensor of the same size. The tensor keeps its values and its identity (a
    parameter stays the one that the optimizer knows); views that were taken of it before keep the old memory.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise fail(
            "invalid-argument",
            f"register: a {tensor.layout} tensor on {tensor.device} cannot live in shared memory",
            who="this rank",
            fix="give an ordinary tensor of the CPU",
        )
    moved = empty(tensor.shape, dtype=tensor.dtype, group=group)
    moved.copy_(tensor.detach())
    tensor.data = moved
    return tensor
