"""What ranks found about their own samples, put together for all of them, so that evaluation is exact."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ..errors import fail
from ..groups import collectives
from .data.sampler import DistributedSampler
from .ddp import model_check

__all__ = ["gather_metrics"]


def gather_metrics(values: Any, *, sampler: DistributedSampler | None = None, group: Any = None) -> Any:
    """Return ``values`` of all ranks together, on every rank; every rank of ``group`` must call.

    A tensor has one row for each sample that the rank evaluated, and ranks may have different numbers, also none: the
    rows of all ranks come back in one tensor, in order of ranks. A number or a tensor without dimensions becomes a
    tensor with one value for each rank. Lists, tuples and dicts of these come back as such.

    With the ``sampler`` that dealt the samples, rows come back in the sampler's order (that of the data set where
    it does not shuffle), and the padding that made the ranks even is left out: each sample counts once.

    Raises `CollectiveMismatch` where the ranks' values differ in structure, type or shape beyond the first dimension.
    """
    if not dist.is_initialized():
        collectives.require_group("gather_metrics")
    group = dist.group.WORLD if group is None else group
    leaves: list[torch.Tensor] = []
    shape = _described(values, leaves)
    device = _device(leaves, group)
    words = json.dumps(shape)
    said = model_check.exchange(words + "\n" + json.dumps([_rows(leaf) for leaf in leaves]), group, device)
    structures, rows = zip(*(each.split("\n") for each in said), strict=True)
    problem = model_check.difference(
        "what they give to gather_metrics", structures, group, fix="give values of the same structure everywhere"
    )
    if problem is not None:
        raise problem
    counts = [json.loads(each) for each in rows]
    size = None if sampler is None else sampler.dealt
    together = iter(
        [
            _together(leaf.to(device), [each[number] for each in counts], group, size).to(leaf.device)
            for number, leaf in enumerate(leaves)
        ]
    )
    return _filled(values, together)


def _described(values: Any, leaves: list[torch.Tensor]) -> Any:
    """Return the structure of ``values`` in words that ranks can compare; put its tensors into ``leaves``."""
    match values:
        case torch.Tensor():
            leaves.append(values.detach())
            return [str(values.dtype).removeprefix("torch."), list(values.shape[1:]) if values.dim() else "number"]
        case bool() | int() | float():
            kind = torch.float64 if isinstance(values, float) else torch.int64
            leaves.append(torch.tensor(values, dtype=kind))
            return [str(kind).removeprefix("torch."), "number"]
        case dict():
            return {str(key): _described(value, leaves) for key, value in values.items()}
        case list() | tuple():
            return [type(values).__name__, *(_described(value, leaves) for value in values)]
        case _:
            raise TypeError(f"gather_metrics takes tensors, numbers, and lists, tuples and dicts of them: {values!r}")


def _filled(values: Any, together: Any) -> Any:
    match values:
        case dict():
            return {key: _filled(value, together) for key, value in values.items()}
        case tuple() if hasattr(values, "_fields"):
            return type(values)(*(_filled(value, together) for value in values))
        case list() | tuple():
            return type(values)(_filled(value, together) for value in values)
        case _:
            return next(together)


def _rows(leaf: torch.Tensor) -> int:
    return len(leaf) if leaf.dim() else -1


def _device(leaves: list[torch.Tensor], group: Any) -> torch.device:
    """Return where tensors must be for ``group``: NCCL moves none of a CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return leaves[0].device if leaves else torch.device("cpu")


def _together(leaf: torch.Tensor, counts: list[int], group: Any, size: int | None) -> torch.Tensor:
    """Return the rows of all ranks; the first ``size`` in the order of dealing where that is given."""
    if counts[0] < 0:
        return model_check.gather(leaf, group)
    if size is not None and sum(counts) < size:
        raise fail(
            "invalid-argument",
            f"{sum(counts)} rows were given for {size} samples",
            who="gather_metrics",
            why="rows can be put into the sampler's order only if each sample has one",
            fix="give the rows of the whole pass, or leave out sampler=",
        )
    most = max(counts)
    # Groups of torch's own move tensors of one shape only. Bytes, because not every engine moves every type.
    room = leaf.new_zeros((most, *leaf.shape[1:]))
    room[: len(leaf)] = leaf
    if not room.numel():
        return leaf.new_empty((sum(counts), *leaf.shape[1:]))
    rows = model_check.gather(room.contiguous().view(torch.uint8), group).view(leaf.dtype)
    if size is None:
        return torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
    # Row j of rank r is item j * n + r of those dealt; ranks without a row j stand at the end.
    return rows.transpose(0, 1).flatten(0, 1)[:size]
