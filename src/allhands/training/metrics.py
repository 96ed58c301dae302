"""Combine the per-sample results of all ranks, so that an evaluation counts each sample once."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ..errors import fail
from ..groups import collectives
from . import compare_ranks
from .data.sampler import DistributedSampler
from .ddp.ddp import map_leaves

__all__ = ["gather_metrics"]


def gather_metrics(values: Any, *, sampler: DistributedSampler | None = None, group: Any = None) -> Any:
    """Return ``values`` of all ranks together, on every rank; every rank of ``group`` must call.

    A tensor has one row for each sample that the rank evaluated, and ranks may have different numbers, also none: the
    rows of all ranks are returned in one tensor, in order of ranks. A number or a tensor without dimensions becomes a
    tensor with one value for each rank. Lists, tuples and dicts of these are returned as such.

    With the ``sampler`` that chose the samples, rows are in the sampler's order (that of the data set if it does not
    shuffle), and the padding that made the ranks even is left out: each sample counts once.

    Raises `CollectiveMismatch` if the ranks' values differ in structure, dtype or shape beyond the first dimension.
    """
    collectives.require_group("gather_metrics")
    group = dist.group.WORLD if group is None else group
    leaves: list[torch.Tensor] = []

    def describe(value: Any) -> str:
        match value:
            case torch.Tensor():
                leaves.append(value.detach())
            case bool() | int() | float():
                leaves.append(torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64))
            case _:
                raise TypeError(
                    f"gather_metrics takes tensors, numbers, and lists, tuples and dicts of them: {value!r}"
                )
        shape = list(leaves[-1].shape[1:]) if leaves[-1].dim() else "number"
        return f"{str(leaves[-1].dtype).removeprefix('torch.')} {shape}"

    structure = map_leaves(describe, values)
    device = leaves[0].device if leaves else torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        # NCCL does not move tensors of a CPU.
        device = torch.device("cuda", torch.cuda.current_device())
    rows = [len(leaf) if leaf.dim() else -1 for leaf in leaves]
    found = compare_ranks.gather_text(f"{structure}\n{json.dumps(rows)}", group, device)
    structures, _, row_counts = zip(*(each.rpartition("\n") for each in found), strict=True)
    compare_ranks.raise_if_different(
        "the values passed to gather_metrics", structures, group, fix="pass values of the same structure on every rank"
    )
    counts = [json.loads(each) for each in row_counts]
    size = None if sampler is None else sampler.dealt
    gathered = iter(
        _gather_rows(leaf.to(device), [each[number] for each in counts], group, size).to(leaf.device)
        for number, leaf in enumerate(leaves)
    )
    return map_leaves(lambda _: next(gathered), values)


def _gather_rows(leaf: torch.Tensor, counts: list[int], group: Any, size: int | None) -> torch.Tensor:
    """Return the rows of all ranks; with ``size`` the first so many in the sampler's order."""
    if counts[0] < 0:
        return compare_ranks.gather(leaf, group)
    if size is not None and sum(counts) < size:
        raise fail(
            "invalid-argument",
            f"{sum(counts)} rows were given for {size} samples",
            who="gather_metrics",
            why="rows can be put into the sampler's order only if each sample has one",
            fix="give the rows of the whole pass, or leave out sampler=",
        )
    # torch's own backends gather tensors of equal shape only, and not every engine moves every dtype: padded bytes.
    padded = leaf.new_zeros((max(counts), *leaf.shape[1:]))
    padded[: len(leaf)] = leaf
    if not padded.numel():
        return leaf.new_empty((sum(counts), *leaf.shape[1:]))
    rows = compare_ranks.gather(padded.contiguous().view(torch.uint8), group).view(leaf.dtype)
    if size is None:
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
    # Row j of rank r is item j * n + r of the sampler; the last row of a rank may be padding.
    return rows.transpose(0, 1).flatten(0, 1)[:size]
