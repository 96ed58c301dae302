"""Average one bucket or list of gradients over a group: by the engine, a communication hook, or as sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...engines.shm import engine as shm
from ...groups import collectives
from ...groups.process_group import HostGroup
from .bucket import Bucket

__all__ = ["Averager", "all_reduce", "broadcast"]


def _coalesced(tensors: list[torch.Tensor], op: Any, group: Any, async_op: bool) -> Any:
    """Call the group directly: torch's function warns of its deprecation each time and does not return the Work."""
    opts = dist.AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = op, async_op
    work = group.allreduce_coalesced(tensors, opts)
    if async_op:
        return work
    work.wait()
    return None


all_reduce = collectives.quick("all_reduce")
broadcast = collectives.quick("broadcast")
_all_reduce_coalesced = collectives.quick("all_reduce_coalesced", _coalesced)


class Averager:
    """Averages tensors over ``group``, in the order of the calls."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.hook: Callable[[Any, Any], Any] | None = None
        self.state: Any = None

    def can_overlap(self) -> bool:
        """Return whether reductions should run during backward. All ranks of the group call this and get the same.

        Our own engine reduces on the ranks' cores. If all are busy with backward, reductions only slow it down, and
        ranks wait until each other's threads are scheduled.
        """
        if not isinstance(self.group, HostGroup) or self.size == 1:
            return True
        no_spare_core = torch.tensor([shm.cores() <= self.size], dtype=torch.uint8)
        all_reduce(no_spare_core, dist.ReduceOp.MAX, self.group)
        return not bool(no_spare_core)

    def can_reduce_in_place(self) -> bool:
        """Return whether the group reduces several tensors as one, wherever they are in memory."""
        return isinstance(self.group, HostGroup) and self.group.engine.capabilities.tensor_lists

    def start(self, tensors: list[torch.Tensor], divisor: float | None, *, wait: bool) -> Callable[[], Any]:
        """Start to average dense ``tensors``, all of one dtype, in place. Returns a function that waits.

        Sums are divided by ``divisor``, by default the number of ranks. ``wait`` is a hint that the caller waits at
        once: synchronous calls skip the engine's thread.
        """
        if self.size == 1 and divisor is None:
            return _done
        if isinstance(self.group, HostGroup) and divisor is None and tensors[0].is_floating_point():
            # Our own engine divides while it reduces; with other backends each rank divides first, as torch's DDP does.
            op = dist.ReduceOp.AVG
        else:
            op = dist.ReduceOp.SUM
            for tensor in tensors:
                tensor.mul_(1 / (divisor or self.size))
        later = not (wait and tensors[0].is_cpu)
        if len(tensors) == 1:
            work = all_reduce(tensors[0], op, self.group, later)
        else:
            work = _all_reduce_coalesced(tensors, op, self.group, later)
        return work.wait if later else _done

    def start_sparse(self, gradient: torch.Tensor, divisor: float | None) -> Callable[[], torch.Tensor]:
        """Start to average a sparse ``gradient``. Returns a function that waits for the result."""
        gradient = (gradient * (1 / (divisor or self.size))).coalesce()
        if self.size == 1:
            return lambda: gradient
        return _waiter(all_reduce(gradient, group=self.group, async_op=True).wait, gradient)

    def start_bucket(self, bucket: Bucket, divisor: float | None, *, wait: bool) -> Callable[[], torch.Tensor]:
        """Start to average ``bucket``, with the communication hook if there is one; otherwise as `start`."""
        if self.hook is not None:
            future = self.hook(self.state, bucket)
            return lambda: _first_tensor(future.wait())
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self.start_sparse(buffer, divisor)
        return _waiter(self.start([buffer], divisor, wait=wait), buffer)


def _done() -> None:
    """Wait for nothing."""


def _waiter(wait: Callable[[], Any], result: torch.Tensor) -> Callable[[], torch.Tensor]:
    def wait_for_result() -> torch.Tensor:
        wait()
        return result

    return wait_for_result


def _first_tensor(value: Any) -> torch.Tensor:
    """Return the result of a communication hook: a tensor, or a list of one."""
    tensor: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return tensor
