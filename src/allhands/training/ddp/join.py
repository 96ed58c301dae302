"""Ranks with fewer inputs than others: once theirs are used up, they take part in the others' reductions with zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from .reduction import all_reduce

__all__ = ["Shadow", "common_rank", "syncs"]


class Shadow(JoinHook):
    """Makes the collectives that a forward and backward pass of ``ddp`` makes, in the same order."""

    def __init__(self, ddp: Any, *, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self._ddp = ddp
        ddp.divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """Take part in one pass of those who still have inputs."""
        ddp = self._ddp
        ddp.reducer.rebuild()
        ddp.sync_buffers(joined=True)
        ddp.require_forward_param_sync = syncs(ddp, mine=False)
        if ddp.require_forward_param_sync:
            # The divisor of those who have inputs is theirs; zeros are zeros by any. What counts is that we divide too.
            ddp.reducer.divisor = float(ddp.reducer.averager.size)
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of whoever was last."""
        self._ddp.reducer.divisor = None
        self._ddp.spread_model(common_rank(self._ddp, candidate=is_last_joiner))


def syncs(ddp: Any, *, mine: bool) -> bool:
    """Tell whether any rank reduces in this pass. All ranks of ``ddp`` call this."""
    flag = torch.tensor([int(mine)], device=ddp.device)
    all_reduce(flag, ddp.process_group)
    return bool(flag)


def common_rank(ddp: Any, *, candidate: bool) -> int:
    """Return the highest group rank that is a ``candidate``. All ranks of ``ddp`` call this."""
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    all_reduce(rank, ddp.process_group, torch.distributed.ReduceOp.MAX)
    return int(rank)
