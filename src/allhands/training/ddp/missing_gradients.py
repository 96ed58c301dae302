"""Which ranks lack gradients of which parameters, once any does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .mark import Mark
from .model_check import gather_bytes
from .reduction import all_reduce

__all__ = ["ask", "find"]


def find(counts: Sequence[int], needed: Sequence[int], parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the parameters whose gradients came too seldom in a pass, but for frozen ones."""
    pairs = zip(counts, needed, strict=True)
    return [index for index, (count, need) in enumerate(pairs) if count < need and parameters[index].requires_grad]


def ask(missing: list[int], mark: Mark | None, group: Any, device: torch.device) -> dict[int, list[int]]:
    """Return the ranks that lack each gradient, by its number; nothing where nobody lacks any.

    All ranks of ``group`` call this with what they lack. ``mark`` is the sum of what all lack, where that is known.
    On a GPU whoever has too few is told alone, and the others hear of it: reading the mark would stop the device.
    """
    if mark is not None and device.type == "cpu":
        some = mark.read()
        alone = bool(some) and dist.get_world_size(group) == 1
    else:
        some, alone = _count(missing, group, device)
    if not some:
        return {}
    mine = ",".join(map(str, missing)).encode()
    told = {dist.get_rank(): mine}
    if not alone:
        ranks = dist.get_process_group_ranks(group)
        told = dict(zip(ranks, gather_bytes(mine, group, device), strict=True))
    found: dict[int, list[int]] = {}
    for rank, each in told.items():
        for index in filter(None, each.decode().split(",")):
            found.setdefault(int(index), []).append(rank)
    return found


def _count(missing: list[int], group: Any, device: torch.device) -> tuple[float, bool]:
    """Return how many gradients are missing, as far as is known, and whether that is this rank's own count."""
    if dist.get_world_size(group) == 1 or device.type != "cpu":
        return len(missing), True
    count = torch.tensor([len(missing)], device=device)
    all_reduce(count, group)
    return int(count), False
