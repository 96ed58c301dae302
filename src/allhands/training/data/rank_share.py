"""Whose share of the data: rank and number of ranks, given or the group's."""

from __future__ import annotations

import torch.distributed as dist

from ...errors import fail
from ...groups import collectives

__all__ = ["share"]


def share(who: str, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks and the rank, those of the group where they are not given; ``who`` asks."""
    if num_replicas is None:
        collectives.require_group(f"{who} without num_replicas")
        num_replicas = dist.get_world_size()
    if rank is None:
        collectives.require_group(f"{who} without rank")
        rank = dist.get_rank()
    if not 0 <= rank < num_replicas:
        raise fail(
            "rank-out-of-range",
            f"rank {rank} of {num_replicas} was asked for",
            who=who,
            fix=f"give a rank from 0 to {num_replicas - 1}",
        )
    return num_replicas, rank
