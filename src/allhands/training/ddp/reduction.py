"""How one bucket is averaged over the ranks of a group: by the engine, by a communication hook, or sparse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ... import _core
from ...engines.shm import engine as shm
from ...groups import collectives
from ...groups.hostgroup import HostGroup
from .gradbucket import GradBucket

__all__ = ["Averager", "all_reduce", "all_reduce_bundle", "broadcast"]


@functools.cache
def _function(name: str) -> Any:
    """Return a function of torch.distributed whose failures are explained, with its short way where it has one."""
    return collectives.quick(name) if name in collectives.QUICK else collectives.guarded(name)


def all_reduce(tensor: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM, *, later: bool = False) -> Any:
    """Reduce ``tensor`` over ``group``; with ``later`` return the Work."""
    return _function("all_reduce")(tensor, op, group, later)


def all_reduce_bundle(tensors: list[torch.Tensor], group: Any, op: Any, *, later: bool = False) -> Any:
    """Reduce ``tensors``, which are of one type and of the same sizes on every rank, as one; ``later`` as above."""
    return _together()(tensors, op, group, later)


def _coalesced(tensors: list[torch.Tensor], op: Any, group: Any, async_op: bool) -> Any:
    """Do what torch's function does, which warns of its end each time and hides the Work."""
    opts = dist.AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = op, async_op
    work = group.allreduce_coalesced(tensors, opts)
    if async_op:
        return work
    work.wait()
    return None


@functools.cache
def _together() -> Any:
    return collectives.quick("all_reduce_coalesced", _coalesced)


def broadcast(tensor: torch.Tensor, group: Any, source: int = 0) -> None:
    """Give everyone the tensor of the rank ``source`` of ``group``."""
    _function("broadcast")(tensor, group_src=source, group=group)


class Averager:
    """Averages buckets over ``group``, in the order in which they are given."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.hook: Callable[[Any, Any], Any] | None = None
        self.state: Any = None
        # Our own engine divides where it reduces; elsewhere each rank divides first, as torch's DDP does.
        self._divides = isinstance(group, HostGroup)

    def has_cores(self) -> bool:
        """Tell whether the group's thread finds a core to reduce on while those of all ranks compute.

        Our own engine reduces with the ranks' cores. Without one to spare it would take them from backward, and ranks
        would wait for each other's threads to get their turn. All ranks of the group call this, and are told the same:
        it decides in which order they make their calls.
        """
        if not isinstance(self.group, HostGroup) or self.size == 1:
            return True
        lacks = torch.tensor([shm.cores() <= self.size], dtype=torch.uint8)
        all_reduce(lacks, self.group, dist.ReduceOp.MAX)
        return not bool(lacks)

    def can_bundle(self) -> bool:
        """Tell whether tensors of the group can be reduced together wherever they lie."""
        return isinstance(self.group, HostGroup) and isinstance(self.group.engine.segment, _core.Segment)

    def start(
        self, bucket: GradBucket, marked: torch.Tensor | None, divisor: float | None, *, wait: bool
    ) -> Callable[[], torch.Tensor]:
        """Begin to average ``bucket``; return what waits for the result.

        ``marked`` is the buffer with an element more that is averaged with it. With ``divisor`` sums are divided by it
        and not by the number of ranks. With ``wait`` the caller waits anyway.
        """
        if self.hook is not None:
            return self._hooked(bucket)
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self._sparse(buffer, divisor)
        target = buffer if marked is None else marked
        if wait and buffer.is_cpu:
            # Not handed to another thread and back.
            self.average(target, divisor)
            return lambda: buffer
        if self.size == 1 and divisor is None:
            return lambda: buffer
        work = all_reduce(target, self.group, self._divided(target, divisor), later=True)

        def done() -> torch.Tensor:
            work.wait()
            return buffer

        return done

    def start_bundle(self, tensors: list[torch.Tensor], divisor: float | None, *, wait: bool) -> Callable[[], Any]:
        """Begin to average ``tensors``, all of one type, where they lie; return what waits for it. Else as `start`."""
        if wait:
            self.average_bundle(tensors, divisor)
            return lambda: None
        if self.size == 1 and divisor is None:
            return lambda: None
        work = all_reduce_bundle(tensors, self.group, self._divided_bundle(tensors, divisor), later=True)
        return work.wait  # type: ignore[no-any-return]  # a Work

    def average_bundle(self, tensors: list[torch.Tensor], divisor: float | None) -> None:
        """Average ``tensors``, all of one type, where they lie, and wait for it; ``divisor`` as for `start`."""
        if self.size > 1 or divisor is not None:
            all_reduce_bundle(tensors, self.group, self._divided_bundle(tensors, divisor))

    def average(self, tensor: torch.Tensor, divisor: float | None) -> None:
        """Average ``tensor``, which is dense, and wait for it; ``divisor`` as for `start`."""
        if self.size > 1 or divisor is not None:
            all_reduce(tensor, self.group, self._divided(tensor, divisor))

    def _divided(self, tensor: torch.Tensor, divisor: float | None) -> Any:
        """Return the reduction that averages ``tensor``, which is divided here if the engine does not do that."""
        if self._can_divide(tensor, divisor):
            return dist.ReduceOp.AVG
        tensor.mul_(1 / (divisor or self.size))
        return dist.ReduceOp.SUM

    def _divided_bundle(self, tensors: list[torch.Tensor], divisor: float | None) -> Any:
        """Do what `_divided` does with each of ``tensors``."""
        op = dist.ReduceOp.AVG
        if not self._can_divide(tensors[0], divisor):
            with torch.no_grad():
                for tensor in tensors:
                    op = self._divided(tensor, divisor)
        return op

    def _can_divide(self, tensor: torch.Tensor, divisor: float | None) -> bool:
        """Tell whether the engine divides ``tensor``."""
        return self._divides and divisor is None and tensor.is_floating_point()

    def _sparse(self, gradient: torch.Tensor, divisor: float | None) -> Callable[[], torch.Tensor]:
        gradient = (gradient * (1 / (divisor or self.size))).coalesce()
        if self.size == 1:
            return lambda: gradient
        work = all_reduce(gradient, self.group, later=True)

        def done() -> torch.Tensor:
            work.wait()
            return gradient

        return done

    def _hooked(self, bucket: GradBucket) -> Callable[[], torch.Tensor]:
        if self.hook is None:
            raise ValueError("there is no hook")
        future = self.hook(self.state, bucket)

        def done() -> torch.Tensor:
            value = future.wait()
            result: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
            return result

        return done
