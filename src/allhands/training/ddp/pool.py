"""Averages that lie once in memory for all ranks of a host, which see them as their own gradients: see csrc/pool.h."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ... import _core
from ...errors import ResourceError
from ...groups import collectives
from ...groups.hostgroup import HostGroup
from .reduction import Averager, all_reduce
from .tensor_list import Bundle, Gathered

__all__ = ["Pool"]

# Of all ranks together. Fewer bytes stay in the caches, where copying them out costs less than the look at the state of
# each page of the pool that comes before every pass (2 ranks: MLP of 7.1 MiB 1.05 with it and 0.8 ms without it,
# transformer of 14 MiB 1.1 and 2.7 ms).
_LEAST_BYTES = 24 << 20

# A page that a rank writes to becomes its own, which takes longer than to copy it (14 MiB: 7.7 ms). Once may be an
# accident; whoever scales gradients does it in every pass, and then they go as if there were no pool.
_MOST_WRITTEN = 2

# After so many passes in a row in which some rank was not done with the last averages, nobody keeps memory for more.
_MOST_IDLE = 16


class Pool:
    """Where the averages of one bundle go, if every rank lets them: before it is built they stay where they lie."""

    def __init__(self) -> None:
        self._core: _core.Pool | None = None
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._written = 0
        self._idle = 0

    def build(self, bundle: Bundle, averager: Averager) -> Bundle:
        """Make room for the averages of ``bundle``, and return the one whose averages go there.

        That is ``bundle`` itself where there is to be no room. Every rank of the group calls this, and has it or not.
        """
        likes = tuple(slot.view for slot in bundle.slots if slot.view is not None)
        if averager.size == 1 or bundle.mark is None or len(likes) < len(bundle.slots):
            return bundle
        if not isinstance(averager.group, HostGroup) or not bundle.mark.is_floating_point():
            return bundle
        if sum(like.nbytes for like in likes) * averager.size < _LEAST_BYTES:
            return bundle
        try:
            self._core = averager.group.pool(collectives.way(), likes)
        except ResourceError:
            return bundle  # On every rank.
        except OSError:
            self._core = None  # This one cannot tell what becomes of its pages.
        # Where one has none, nobody's averages would ever go there.
        lacks = torch.tensor([self._core is None], dtype=torch.uint8)
        all_reduce(lacks, averager.group, dist.ReduceOp.MAX)
        if self._core is None or bool(lacks):
            self._core = None
            return bundle
        self._parameters = tuple(slot.parameter for slot in bundle.slots)
        mark = torch.frombuffer(self._core, dtype=bundle.mark.dtype, count=1)[0]
        return bundle._replace(mark=mark)

    def average(self, found: Gathered, averager: Averager, divisor: float | None) -> None:
        """Average ``found``, which comes of the bundle, and make the averages gradients if they went to the pool."""
        if self._core is None:
            averager.average_bundle(found.tensors, divisor)
            return
        if not found.moved:
            self._offer(self._core)
        averager.average_bundle(found.tensors, divisor)
        self._idle = 0 if self._core.give(self._parameters) else self._idle + 1
        if self._idle >= _MOST_IDLE:
            self._core.close()
            self._core = None

    def _offer(self, core: _core.Pool) -> None:
        """Let the averages of this pass go to the pool, if this rank is done with those of the last one."""
        if self._written >= _MOST_WRITTEN or not core.is_free():
            return
        if core.is_clean():
            core.offer()
        else:
            self._written += 1
