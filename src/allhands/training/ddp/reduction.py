"""Average one bucket or list of gradients over a group: by the engine, a communication hook, or as sparse tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...engines.shm import engine as shm
from ...groups import collectives
from ...groups.process_group import Group
from .bucket import GradBucket

__all__ = ["Averager", "all_reduce", "broadcast"]


@functools.cache
def _function(name: str) -> Any:
    """Return a function of torch.distributed that raises our errors; its fast path if it has one."""
    if name == "all_reduce_coalesced":
        return collectives.quick(name, _all_reduce_coalesced)
    return collectives.quick(name) if name in collectives.QUICK else collectives.guarded(name)


def _all_reduce_coalesced(tensors: list[torch.Tensor], op: Any, group: Any, async_op: bool) -> Any:
    """Call the group directly: torch's function warns of its deprecation each time and does not return the Work."""
    opts = dist.AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = op, async_op
    work = group.allreduce_coalesced(tensors, opts)
    if async_op:
        return work
    work.wait()
    return None


def all_reduce(tensor: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM, *, async_op: bool = False) -> Any:
    """Reduce ``tensor`` over ``group``; with ``async_op`` return the Work."""
    return _function("all_reduce")(tensor, op, group, async_op)


def broadcast(tensor: torch.Tensor, group: Any, source: int = 0) -> None:
    """Broadcast ``tensor`` from the rank ``source`` of ``group``."""
    _function("broadcast")(tensor, group_src=source, group=group)


class Averager:
    """Averages buckets over ``group``, in the order of the calls."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.hook: Callable[[Any, Any], Any] | None = None
        self.state: Any = None
        # Our own engine divides while it reduces; with other backends each rank divides first, as torch's DDP does.
        self._engine_divides = isinstance(group, Group)

    def can_overlap(self) -> bool:
        """Return whether reductions should run during backward. All ranks of the group call this and get the same.

        Our own engine reduces on the ranks' cores. If all are busy with backward, reductions only slow it down, and
        ranks wait until each other's threads are scheduled.
        """
        if not isinstance(self.group, Group) or self.size == 1:
            return True
        no_spare_core = torch.tensor([shm.cores() <= self.size], dtype=torch.uint8)
        all_reduce(no_spare_core, self.group, dist.ReduceOp.MAX)
        return not bool(no_spare_core)

    def can_reduce_in_place(self) -> bool:
        """Return whether the group reduces several tensors as one, wherever they are in memory."""
        return isinstance(self.group, Group) and self.group.engine.capabilities.tensor_lists

    def start(
        self, bucket: GradBucket, counted: torch.Tensor | None, divisor: float | None, *, wait: bool
    ) -> Callable[[], torch.Tensor]:
        """Start to average ``bucket``. Returns a function that waits for the result.

        ``counted`` is the buffer with the counter element, which is then averaged too. Sums are divided by ``divisor``,
        by default the number of ranks. ``wait`` is a hint that the caller waits at once.
        """
        if self.hook is not None:
            return functools.partial(_first_tensor, self.hook(self.state, bucket))
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self._start_sparse(buffer, divisor)
        target = buffer if counted is None else counted
        if wait and buffer.is_cpu:
            # Synchronous calls skip the engine's thread.
            self._average([target], divisor)
            return lambda: buffer
        if self.size == 1 and divisor is None:
            return lambda: buffer
        return _waiter(all_reduce(target, self.group, self._divide([target], divisor), async_op=True), buffer)

    def start_list(self, tensors: list[torch.Tensor], divisor: float | None, *, wait: bool) -> Callable[[], Any]:
        """Start to average ``tensors``, all of one dtype, in place; arguments and result as for `start`."""
        if wait:
            self._average(tensors, divisor)
            return lambda: None
        if self.size == 1 and divisor is None:
            return lambda: None
        op = self._divide(tensors, divisor)
        return _function("all_reduce_coalesced")(tensors, op, self.group, True).wait  # type: ignore[no-any-return]

    def _average(self, tensors: list[torch.Tensor], divisor: float | None) -> None:
        """Average ``tensors`` in place."""
        if self.size == 1 and divisor is None:
            return
        op = self._divide(tensors, divisor)
        if len(tensors) == 1:
            all_reduce(tensors[0], self.group, op)
        else:
            _function("all_reduce_coalesced")(tensors, op, self.group, False)

    def _divide(self, tensors: list[torch.Tensor], divisor: float | None) -> Any:
        """Return the reduction that averages ``tensors``; divides them here if the engine cannot."""
        if self._engine_divides and divisor is None and tensors[0].is_floating_point():
            return dist.ReduceOp.AVG
        for tensor in tensors:
            tensor.mul_(1 / (divisor or self.size))
        return dist.ReduceOp.SUM

    def _start_sparse(self, gradient: torch.Tensor, divisor: float | None) -> Callable[[], torch.Tensor]:
        gradient = (gradient * (1 / (divisor or self.size))).coalesce()
        if self.size == 1:
            return lambda: gradient
        return _waiter(all_reduce(gradient, self.group, async_op=True), gradient)


def _waiter(work: Any, result: torch.Tensor) -> Callable[[], torch.Tensor]:
    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait


def _first_tensor(future: Any) -> torch.Tensor:
    """Wait for the future of a communication hook, whose value is a tensor or a list of one."""
    value = future.wait()
    tensor: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return tensor
