"""Seeing that all ranks of a group say the same of something, before data moves that would not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...diagnosis import ranks
from ...errors import AllhandsError, fail
from ...groups import collectives

__all__ = ["difference", "exchange", "gather", "gather_bytes"]

_all_gather = collectives.quick("all_gather")


def gather(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return each rank's ``tensor``, one row for each rank of ``group``. Every rank of it must call."""
    found = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    _all_gather(list(found.unbind(0)), tensor.contiguous(), group=group)
    return found


def gather_bytes(data: bytes, group: Any, device: torch.device) -> list[bytes]:
    """Return the ``data`` of each rank of ``group``. Nothing is unpickled. Every rank of it must call."""
    sizes = [int(size) for size in gather(torch.tensor(len(data), device=device), group)]
    room = torch.zeros(max(sizes), dtype=torch.uint8)
    if data:
        room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if not len(room):
        return [b""] * len(sizes)
    rows = gather(room.to(device), group).cpu()
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]


def exchange(words: str, group: Any, device: torch.device) -> list[str]:
    """Return the ``words`` of each rank of ``group``. Every rank of it must call."""
    return [each.decode() for each in gather_bytes(words.encode(), group, device)]


def difference(what: str, said: Sequence[str], group: Any, *, fix: str) -> AllhandsError | None:
    """Return the error where ranks ``said`` different things about ``what``; those that most did not say are blamed."""
    parties: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        parties.setdefault(words, []).append(dist.get_global_rank(group, rank))
    if len(parties) < 2:
        return None
    ordered = sorted(parties.items(), key=lambda party: (-len(party[1]), party[1]))
    return fail(
        "collective-mismatch",
        f"ranks of one group differ in {what}",
        who=ranks(odd := sorted(rank for _, members in ordered[1:] for rank in members)),
        why="\n".join(f"{ranks(members)}: {words}" for words, members in ordered),
        fix=fix,
        ranks=tuple(odd),
    )
