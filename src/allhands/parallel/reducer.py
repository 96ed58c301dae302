"""From gradients to their averages: hooks on parameters, buckets that are reduced while backward goes on, and its end.

A backward pass opens with the gradient of an output of the wrapped module (or the first gradient of a parameter where
no output could be watched), and is finished by a callback at its very end, in which whatever is missing is noticed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch
from ..errors import AllhandsError
from . import faults
from .bucket import FIRST_BYTES
from .gradbucket import GradBucket
from .reduction import Averager, all_reduce, broadcast, gather_bytes
from .storage import Bucket, Slot, Storage

__all__ = ["Reducer"]

# torch's: large enough for the engine's full speed, small enough for several in a model that is worth distributing.
_CAP_BYTES = 25 << 20


@dataclass(slots=True)
class _Pass:
    """One backward pass as far as it has come."""

    counts: list[int]
    left: list[int]
    queued: bool = False
    opened: bool = False
    launched: int = 0
    waits: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)


class Reducer:
    """Averages the gradients of ``parameters`` over ``group``. All ranks make it with the same arguments.

    ``caps_bytes`` are the sizes of the buckets; the last one is that of all further ones.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        group: Any,
        *,
        caps_bytes: Sequence[int] = (FIRST_BYTES, _CAP_BYTES),
        views: bool = False,
        find_unused: bool = False,
        static: bool = False,
        at_the_end: bool = False,
        always: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.averager = Averager(group)
        self.find_unused = find_unused
        self.static = static
        # Whether collectives of others (SyncBatchNorm's) stand between those of the buckets, in an order that must not
        # depend on which gradients a rank has.
        self.at_the_end = at_the_end
        self.views = views
        # What sums are divided by where it is not the number of ranks (see join).
        self.divisor: float | None = None
        self.passes = 0
        self.rebuilt = False
        # Whether gradients that no watched output announced are to be reduced.
        self.armed = False
        # Whether every backward pass is reduced, with no forward pass to announce it.
        self.always = always
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._device = self.parameters[0].device
        self._used = [0] * len(self.parameters)
        self._needed = [1] * len(self.parameters)
        self._unused_anywhere: frozenset[int] = frozenset()
        self._lock = threading.RLock()
        self._storage = Storage(self.parameters, sparse, group, caps_bytes)
        self._order: list[int] = []
        self.buckets: list[Bucket] = []
        self._arrange(list(reversed(range(len(self.parameters)))))
        self._now = self._fresh()
        self._optimizers = False
        handles = [self._listen(index) for index in range(len(self.parameters))]
        self.remove = weakref.finalize(self, _remove, handles)

    # What is reduced where ---------------------------------------------------------------------------------------

    def _arrange(self, order: list[int]) -> None:
        memory = {id(slot.view): slot.parameter for bucket in self.buckets for slot in bucket.slots}
        for parameter in self.parameters:
            if parameter.grad is not None and id(parameter.grad) in memory:
                # It lies where another gradient may lie from now on.
                parameter.grad = parameter.grad.clone()
        self._order = order
        self.buckets = self._storage.arrange(order)
        self._of = {slot.position: number for number, bucket in enumerate(self.buckets) for slot in bucket.slots}
        # Whoever is last in line comes when everything else has come, and can carry how many gradients are missing.
        self._marks = self.buckets[-1].marked is not None and not self.find_unused

    def rebuild(self) -> bool:
        """Arrange the buckets in the order in which gradients came, once. All ranks call this at the same time."""
        if self.rebuilt or not self.passes:
            return False
        self.rebuilt = True
        came = set(self._came)
        # Those that did not come are last, so that nothing waits for them.
        order = [*self._came, *(index for index in self._order if index not in came)]
        decided = torch.tensor(order, dtype=torch.int64, device=self._device)
        if self.averager.size > 1:
            broadcast(decided, self._group)
        self._arrange(decided.tolist())
        self._now = self._fresh()
        return True

    _came: Sequence[int] = ()

    def _fresh(self) -> _Pass:
        # Frozen parameters, and those that a static graph does not use, are not waited for.
        left = [
            sum(slot.parameter.requires_grad and slot.position not in self._unused_anywhere for slot in bucket.slots)
            for bucket in self.buckets
        ]
        return _Pass([0] * len(self.parameters), left, opened=self.always)

    # Gradients come ------------------------------------------------------------------------------------------------

    def _listen(self, index: int) -> Any:
        me = weakref.ref(self)

        def came(_: torch.Tensor) -> None:
            reducer = me()
            if reducer is not None:
                reducer.came(index)

        return self.parameters[index].register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Note that a backward pass begins whose gradients are to be reduced. Called from inside it."""
        with self._lock:
            self._now.opened = True
            self._queue()

    def _queue(self) -> None:
        if not self._now.queued:
            self._now.queued = True
            _torch.queue_callback(self._finish)

    def came(self, index: int) -> None:
        """Note that the gradient of a parameter is there."""
        with self._lock:
            self._used[index] = 1
            now = self._now
            if not now.opened and not self.armed:
                return
            self._queue()
            if index in self._unused_anywhere:
                raise faults.graph_changed(self._rank, self.names[index])
            now.counts[index] += 1
            count, needed = now.counts[index], self._needed[index]
            if count == 1:
                now.order.append(index)
            number = self._of[index]
            if count > needed and number < now.launched:
                raise faults.twice(self._rank, self.names[index], static=self.static)
            if count == needed:
                now.left[number] -= 1
                if not self._waits_for_the_end():
                    self._launch_complete()

    def _waits_for_the_end(self) -> bool:
        # In the first pass of a static graph nobody knows how often each gradient comes.
        return not self._now.opened or (self.static and not self.passes) or (self.at_the_end and self.find_unused)

    def _launch_complete(self) -> None:
        now = self._now
        while now.launched < len(self.buckets) and not now.left[now.launched]:
            self._launch(now.launched)

    def expect(self, *, watched: bool) -> None:
        """Make ready for a backward pass. Without ``watched`` outputs the first gradient opens it."""
        with self._lock:
            if _torch.graph_task() < 0:
                if self._now.launched:
                    raise faults.unfinished(self._rank, self._now.launched, len(self.buckets))
                self._now = self._fresh()
            self.armed = True
            if not watched:
                self._now.opened = True

    def rest(self) -> None:
        """Leave the gradients of the next backward pass to each rank, unless a watched output opens it."""
        with self._lock:
            self.armed = False
            if _torch.graph_task() < 0 and not self._now.launched:
                self._now = self._fresh()

    def listen(self, *, always: bool) -> None:
        """Reduce every backward pass from now on, or only those that a forward pass announces."""
        with self._lock:
            self.always = always
            self._now = self._fresh()

    @property
    def in_segment(self) -> bool:
        """Whether the buckets lie in memory that the ranks share."""
        return self._storage.in_segment

    # Buckets go ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _launch(self, number: int, missing: int = 0) -> None:
        bucket, now = self.buckets[number], self._now
        last = number == len(self.buckets) - 1
        now.launched = number + 1
        buffer = self._fill(bucket)
        marked = None
        if last and self._is_marked():
            marked = bucket.marked
            if marked is not None:
                marked[-1] = missing
        gradients = [slot.view if slot.view is not None else buffer for slot in bucket.slots]
        made = GradBucket(number, buffer, gradients, [slot.parameter for slot in bucket.slots], last=last)
        try:
            now.waits.append(self.averager.start(made, marked, self.divisor, wait=last))
        except AllhandsError:
            # The group is over, and whatever is called next says why.
            now.launched = 0
            raise

    def _is_marked(self) -> bool:
        """Tell whether the last bucket carries how many gradients are missing; a hook would not know it for one."""
        return self._marks and self.averager.hook is None

    def _fill(self, bucket: Bucket) -> torch.Tensor:
        """Copy the gradients of ``bucket`` to where they are reduced; return that."""
        targets, sources = [], []
        for slot in bucket.slots:
            gradient = slot.parameter.grad
            if slot.view is None:
                return _sparse(slot)
            if gradient is None:
                slot.view.zero_()
            elif gradient is not slot.view:
                if gradient.shape != slot.view.shape or gradient.dtype != slot.view.dtype:
                    raise faults.retyped(self._rank, self.names[slot.position], slot.view, gradient)
                targets.append(slot.view)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        _torch.foreach_copy(targets, sources)
        if bucket.flat is None:
            raise ValueError("a bucket of dense gradients has memory")
        return bucket.flat

    # The end of a pass ---------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Reduce what is left, wait for everything, and give parameters their gradients. The end of backward."""
        try:
            with self._lock:
                if any(self._now.counts):
                    self._now.opened = True
                    self._complete()
        finally:
            self._now = self._fresh()
            self.armed = False
            if self.always:
                self.rebuild()

    def _complete(self) -> None:
        now = self._now
        first, learns = self.passes == 0, self.static and self.passes == 0
        if learns:
            self._needed = [max(1, count) for count in now.counts]
        missing = [
            index
            for index, (count, needed) in enumerate(zip(now.counts, self._needed, strict=True))
            if count < needed and index not in self._unused_anywhere and self.parameters[index].requires_grad
        ]
        fatal = 0 if self.find_unused or learns else len(missing)
        for number in range(now.launched, len(self.buckets)):
            self._launch(number, missing=fatal)
        results = [wait() for wait in now.waits]
        if not (self.find_unused or learns):
            self._tell_missing(missing, self.buckets[-1].marked if self._is_marked() else None)
        elif learns or not self.static:
            self._agree_on_used(learns=learns)
        with torch.no_grad():
            for bucket, result in zip(self.buckets, results, strict=True):
                self._hand_out(bucket, result)
        self._used = [0] * len(self.parameters)
        self.passes += 1
        if first:
            self._came = tuple(now.order)
        self._step_optimizers()

    def _tell_missing(self, missing: list[int], mark: torch.Tensor | None) -> None:
        """Raise on every rank where any rank has too few gradients; ``mark`` came with the last bucket."""
        if self.averager.size == 1:
            some: float = len(missing)
        elif mark is not None:
            some = float(mark[-1])
        else:
            count = torch.tensor([len(missing)], device=self._device)
            all_reduce(count, self._group)
            some = int(count)
        if not some:
            return
        mine = ",".join(map(str, missing)).encode()
        told = [mine] if self.averager.size == 1 else gather_bytes(mine, self._group, self._device)
        where: dict[str, list[int]] = {}
        for rank, each in zip(self._ranks, told, strict=True):
            for index in filter(None, each.decode().split(",")):
                where.setdefault(self.names[int(index)], []).append(rank)
        raise faults.unused(self._rank, where, static=self.static)

    def _agree_on_used(self, *, learns: bool) -> None:
        """Find out which parameters no rank used: their gradients are left alone."""
        used = torch.tensor(self._used, dtype=torch.uint8, device=self._device)
        if self.averager.size > 1:
            all_reduce(used, self._group, dist.ReduceOp.MAX)
        self._unused_now = frozenset((used == 0).nonzero().flatten().tolist())
        if learns:
            self._unused_anywhere = self._unused_now

    _unused_now: frozenset[int] = frozenset()

    def _hand_out(self, bucket: Bucket, result: torch.Tensor) -> None:
        if bucket.flat is None:
            bucket.slots[0].parameter.grad = result
            return
        if result.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(result.view(-1))
        targets, sources = [], []
        for slot in bucket.slots:
            parameter, view = slot.parameter, slot.view
            if view is None or slot.position in self._unused_now or not parameter.requires_grad:
                continue
            gradient = parameter.grad
            if gradient is view:
                continue
            if self.views:
                parameter.grad = view
            elif gradient is None or gradient.is_sparse:
                parameter.grad = view.clone()
            else:
                targets.append(gradient)
                sources.append(view)
        _torch.foreach_copy(targets, sources)

    def take_over_optimizers(self) -> None:
        """Step optimizers that were fused into backward after the reduction and not before it."""
        for parameter in self.parameters:
            if _torch.optimizers_in_backward(parameter):
                self._optimizers = True
                _torch.take_over_optimizers(parameter)

    def _step_optimizers(self) -> None:
        for parameter in self.parameters if self._optimizers else ():
            found = _torch.optimizers_in_backward(parameter)
            for optimizer in found:
                optimizer.step()
            if found:
                parameter.grad = None

    # A rank without inputs -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def shadow(self) -> None:
        """Take part in the reductions of one backward pass with zeros, and keep nothing of them."""
        waits, mark = [], None
        for number, bucket in enumerate(self.buckets):
            last = number == len(self.buckets) - 1
            parameters = [slot.parameter for slot in bucket.slots]
            marked = None
            if bucket.marked is None:
                buffer = _nothing(parameters[0])
                parts = [buffer]
            else:
                marked = torch.zeros_like(bucket.marked)
                buffer, parts = marked[:-1], []
                for parameter in parameters:
                    at = sum(part.numel() for part in parts)
                    parts.append(buffer[at : at + parameter.numel()].view(parameter.shape))
                mark = marked if last and self._is_marked() else None
            made = GradBucket(number, buffer, parts, parameters, last=last)
            waits.append(self.averager.start(made, mark, self.divisor, wait=last))
        for wait in waits:
            wait()
        learns = self.static and self.passes == 0
        if not (self.find_unused or learns):
            self._tell_missing([], mark)
        elif learns or not self.static:
            self._used = [0] * len(self.parameters)
            self._agree_on_used(learns=learns)
        self.passes += 1


def _nothing(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of nothing."""
    return torch.zeros_like(parameter, layout=torch.sparse_coo)


def _sparse(slot: Slot) -> torch.Tensor:
    gradient = slot.parameter.grad
    if gradient is None:
        return _nothing(slot.parameter)
    return gradient if gradient.is_sparse else gradient.to_sparse()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
