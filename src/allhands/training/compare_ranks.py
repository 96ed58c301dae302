"""Gather small values from all ranks of a group and report the ranks whose values differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..diagnosis import ranks
from ..errors import fail
from ..groups import collectives

__all__ = ["gather", "gather_text", "raise_if_different"]

_all_gather = collectives.fast_path("all_gather")


def gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return a tensor with one row per rank of ``group``: that rank's ``tensor``. Every rank must call this."""
    rows = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    _all_gather(list(rows.unbind(0)), tensor.contiguous(), group=group)
    return rows


def gather_text(text: str, group: Any, device: torch.device) -> list[str]:
    """Return the ``text`` of each rank of ``group``, without pickling. Every rank must call this."""
    data = text.encode()
    sizes: list[int] = gather(torch.tensor(len(data), device=device), group).tolist()
    if not any(sizes):
        return [""] * len(sizes)
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    rows = gather(padded.to(device), group).cpu()
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def raise_if_different(what: str, values: Sequence[str], group: Any, *, fix: str) -> None:
    """Raise collective-mismatch if the ``values``, one per rank, differ. The minority is blamed."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(dist.get_global_rank(group, rank))
    if len(by_value) < 2:
        return
    ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    raise fail(
        "collective-mismatch",
        f"ranks of one group differ in {what}",
        who=ranks(odd := sorted(rank for _, found in ordered[1:] for rank in found)),
        why="\n".join(f"{ranks(found)}: {value}" for value, found in ordered),
        fix=fix,
        ranks=tuple(odd),
    )
