"""Average gradients during backward: hooks on parameters, buckets, and a callback at the end of the pass.

A backward pass is synchronized from the gradient of an output of the wrapped module on (from the first gradient of a
parameter if no output could be watched). autograd calls `Reducer.finish` at its end, which finds missing gradients.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ... import _core, _torch
from ...errors import AllhandsError
from ...groups import collectives
from ..compare_ranks import gather_bytes
from . import bucket_memory, ddp_failures
from .bucket import FIRST_BYTES, GradBucket
from .bucket_memory import Bucket, BucketMemory, BucketPart, tensor_lists
from .reduction import Averager, all_reduce, broadcast

__all__ = ["Reducer"]

# torch's bucket size: large enough for the engine's full bandwidth, small enough to overlap with backward.
_CAP_BYTES = 25 << 20


@dataclass(slots=True)
class _BackwardPass:
    """The state of one backward pass."""

    # How often each gradient arrived, and how many gradients each bucket still needs.
    counts: list[int]
    pending: list[int]
    # Whether gradients of this pass are reduced.
    synchronized: bool = False
    # The callback at its end. Only autograd's queue holds it: if it dies without a call, an exception ended the pass.
    end: weakref.ref[Callable[[], None]] | None = None
    # Whether the C core counts the gradients (see `Reducer._count_in_core`).
    in_core: bool = False
    # Leading buckets that are complete, and those of them whose reduction was started.
    ready: int = 0
    launched: int = 0
    waits: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    # Gradients that could not be reduced in place.
    copied: list[BucketPart] = field(default_factory=list)
    # The indices of gradients in the order of arrival, unless the core counts them.
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
        # Whether collectives of others (SyncBatchNorm's) run during backward: the order of calls must not depend on
        # which gradients a rank has.
        self.at_the_end = at_the_end
        self.views = views
        # The divisor of sums if it is not the number of ranks (see join).
        self.divisor: float | None = None
        self.passes = 0
        self.rebuilt = False
        # Whether the next backward pass is reduced even if no watched output announces it.
        self.armed = False
        # Whether every backward pass is reduced, without a forward pass that announces it.
        self.always = always
        self._group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self._device = self.parameters[0].device
        # Whether buckets are reduced during backward, or all of them by its own thread at the end.
        self._overlap = self.averager.can_overlap() or self._device.type != "cpu"
        self._used = [0] * len(self.parameters)
        # How often each gradient arrives in a pass; counted in the first pass of a static graph.
        self._needed = [1] * len(self.parameters)
        self._lock = threading.RLock()
        # Views of buckets cannot be reduced in place, and neither can gradients that must be unchanged if no rank used
        # the parameter, which is known only afterwards.
        plain = not (views or find_unused or any(sparse)) and all(each.is_cpu for each in self.parameters)
        self._can_reduce_in_place = plain and self.averager.can_reduce_in_place()
        self._memory = BucketMemory(self.parameters, sparse, group, caps_bytes)
        self._order: list[int] = []
        self._first_order: Sequence[int] = ()
        self._unused: frozenset[int] = frozenset()
        self.buckets: list[Bucket] = []
        self._trained: list[bool] = []
        self._pending: list[int] = []
        self._grad_hook = self._make_grad_hook()
        self._arrange(list(reversed(range(len(self.parameters)))))
        self._next_pass()
        self._has_optimizers = False
        handles = [
            each.register_post_accumulate_grad_hook(functools.partial(self._grad_hook.on_gradient, index))  # type: ignore[no-untyped-call]
            for index, each in enumerate(self.parameters)
        ]
        self.remove = weakref.finalize(self, _remove, handles)

    # Layout --------------------------------------------------------------------------------------------------------

    def _arrange(self, order: list[int]) -> None:
        views = {id(part.view) for bucket in self.buckets for part in bucket.parts}
        for parameter in self.parameters:
            if parameter.grad is not None and id(parameter.grad) in views:
                # Its memory may become that of another gradient.
                parameter.grad = parameter.grad.clone()
        self._order = order
        self.buckets = self._memory.arrange(order, fallback=self._in_place)
        self._of = {
            part.position: (number, part) for number, bucket in enumerate(self.buckets) for part in bucket.parts
        }
        places = [self._of[index] for index in range(len(self.parameters))]
        layouts = tuple(part.view for _, part in places)
        views_to_fill = layouts if self.views else (None,) * len(layouts)
        # In place, gradients are checked when they are gathered, not when they arrive.
        self._grad_hook.set_places(
            tuple(number for number, _ in places), None if self._can_reduce_in_place else views_to_fill, layouts
        )
        self._trained = []
        # The last bucket is complete when all others are, so its counter can carry the number of missing gradients.
        counted = self.buckets[-1].counted
        self._last_element = counted[-1] if counted is not None and not self.find_unused else None
        self._lists = (
            tensor_lists(self.buckets, self._last_element, merge=not self._overlap) if self._can_reduce_in_place else []
        )

    @property
    def _in_place(self) -> bool:
        """Whether gradients are reduced in their own memory."""
        return self._can_reduce_in_place and not self.static and self.averager.hook is None

    @property
    def _counter(self) -> torch.Tensor | None:
        """The element that is averaged with the last bucket; None with a hook, which would not expect it."""
        return self._last_element if self.averager.hook is None else None

    @property
    def in_segment(self) -> bool:
        """Whether the buckets are in shared memory."""
        return self._memory.in_segment

    def rebuild(self) -> bool:
        """Arrange the buckets, once, in the order in which gradients arrived. All ranks call this at the same time."""
        if self.rebuilt or not self.passes:
            return False
        self.rebuilt = True
        arrived = set(self._first_order)
        # Those that did not arrive are last, so that no other gradient waits for them.
        order = [*self._first_order, *(index for index in self._order if index not in arrived)]
        decided = torch.tensor(order, dtype=torch.int64, device=self._device)
        if self.averager.size > 1:
            broadcast(decided, self._group)
        self._arrange(decided.tolist())
        self._next_pass()
        return True

    def _next_pass(self, *, check_trained: bool = True) -> None:
        """Prepare for the next pass; without ``check_trained`` the trained parameters are those of the last one."""
        trained = [each.requires_grad for each in self.parameters] if check_trained else self._trained
        if trained != self._trained or not self._pending:
            # Neither frozen parameters nor those that a static graph does not use get gradients.
            self._pending = [
                sum(trained[part.position] and self._needed[part.position] > 0 for part in bucket.parts)
                for bucket in self.buckets
            ]
            self._trained = trained
        self._now = _BackwardPass([0] * len(self.parameters), self._pending.copy(), synchronized=self.always)
        self._grad_hook.disable()

    # Gradients arrive ----------------------------------------------------------------------------------------------

    def _make_grad_hook(self) -> _core.GradHook:
        """Return the hook of all parameters. It holds no reference to the reducer, whose end removes the hooks."""
        reference = weakref.ref(self)

        def on_gradient(index: int) -> None:
            reducer = reference()
            if reducer is not None:
                reducer.on_gradient(index)

        def on_bucket() -> None:
            reducer = reference()
            if reducer is not None:
                reducer.on_bucket()

        def on_output_gradient(_: torch.Tensor) -> None:
            reducer = reference()
            if reducer is not None:
                reducer.start_pass()

        self.on_output_gradient = on_output_gradient
        return _core.GradHook(collectives.way(), tuple(self.parameters), on_gradient, on_bucket)

    def _count_in_core(self) -> None:
        """Let the core count the gradients of this pass; it calls `on_gradient` for unusual ones.

        Not in the first pass, whose order and, in a static graph, counts are recorded.
        """
        now = self._now
        if self.passes and now.synchronized and not now.in_core and now.end is not None:
            now.in_core = True
            self._grad_hook.begin_pass(now.end, now.counts, now.pending, self._used, self._needed)

    def start_pass(self) -> None:
        """Reduce the gradients of the backward pass that calls this."""
        with self._lock:
            self._queue_finish()
            self._now.synchronized = True
            self._count_in_core()

    def _queue_finish(self) -> None:
        """Queue `finish` for the end of the present backward pass."""
        if self._was_interrupted():
            self._reset()
        if self._now.end is None:
            end = functools.partial(self.finish)
            self._now.end = weakref.ref(end)
            _torch.queue_callback(end)

    def _was_interrupted(self) -> bool:
        """Return whether an exception ended the last backward pass."""
        return self._now.end is not None and self._now.end() is None

    def _reset(self) -> None:
        now = self._now
        if now.ready:
            raise ddp_failures.backward_unfinished(self.rank, now.ready, len(self.buckets))
        if now.end is None and (not self._overlap or self._grad_hook.trained_as(self._trained)):
            # No gradient has arrived since it was prepared. If all are reduced at the end, trained parameters are
            # checked there.
            now.synchronized = self.always
        else:
            self._next_pass()

    def on_gradient(self, index: int) -> None:
        """Count a gradient that arrived. The core does the same for usual ones."""
        with self._lock:
            # autograd may call hooks without a gradient, if it is known to be zero.
            self._used[index] |= self.parameters[index].grad is not None
            if not self._now.synchronized and not self.armed:
                return
            self._queue_finish()
            self._count_in_core()
            now = self._now
            if not self._needed[index]:
                raise ddp_failures.graph_changed(self.rank, self.names[index])
            now.counts[index] += 1
            count, needed = now.counts[index], self._needed[index]
            if count == 1:
                now.order.append(index)
            number, part = self._of[index]
            if self.views and number >= now.launched:
                bucket_memory.move_in(part)
            if count > needed and number < now.ready:
                raise ddp_failures.gradient_twice(self.rank, self.names[index], static=self.static)
            if count == needed:
                now.pending[number] -= 1
                self.on_bucket()

    def on_bucket(self) -> None:
        """Start the reduction of the leading buckets that are complete, unless all wait for the end of the pass."""
        with self._lock:
            now = self._now
            # Counts are unknown in the first pass of a static graph.
            if not now.synchronized or (self.static and not self.passes) or (self.at_the_end and self.find_unused):
                return
            while now.ready < len(self.buckets) and not now.pending[now.ready]:
                now.ready += 1
                if self._overlap:
                    self._launch(now.ready - 1)

    def expect(self, *, watched: bool) -> None:
        """Prepare for a backward pass. Without ``watched`` outputs its first gradient starts it."""
        with self._lock:
            # Not during a pass: checkpointing runs a forward pass again.
            if self._now.end is None or self._was_interrupted():
                self._reset()
            self.armed = True
            if not watched:
                self._now.synchronized = True

    def skip(self) -> None:
        """Leave the gradients of the next backward pass local, unless a watched output starts it."""
        with self._lock:
            self.armed = False
            if self._now.end is None or self._was_interrupted():
                self._reset()

    def set_always(self, *, always: bool) -> None:
        """Reduce every backward pass from now on, or only those that a forward pass announces."""
        with self._lock:
            self.always = always
            self._next_pass()

    # Buckets are reduced -------------------------------------------------------------------------------------------

    def _launch(self, number: int, missing: int = 0) -> None:
        """Start the reduction of a bucket or list; the last one carries the number of ``missing`` gradients."""
        now, in_place = self._now, self._in_place
        last = number == len(self._lists if in_place else self.buckets) - 1
        now.launched = number + 1
        with torch.no_grad():
            start: Callable[..., Callable[[], Any]]
            if in_place:
                found = self._lists[number].gather(self._grad_hook, self.names, self.rank)
                now.copied += found.copied
                start = functools.partial(self.averager.start_list, found.tensors)
            else:
                bucket = self.buckets[number]
                counted = bucket.counted if last and self._counter is not None else None
                start = functools.partial(self.averager.start, self._fill(number, last=last), counted)
            if last and self._counter is not None:
                self._counter.fill_(missing)
            try:
                now.waits.append(start(self.divisor, wait=last or not self._overlap))
            except AllhandsError:
                # The group has failed; the next call reports why.
                now.ready = now.launched = 0
                raise

    def _fill(self, number: int, *, last: bool) -> GradBucket:
        """Copy the gradients of a bucket to its memory."""
        bucket = self.buckets[number]
        if bucket.flat is None:
            parameter = bucket.parts[0].parameter
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
            buffer = gradient if gradient.is_sparse else gradient.to_sparse()
        else:
            bucket_memory.copy_in(bucket.parts, self.names, self.rank)
            buffer = bucket.flat
        return _grad_bucket(number, buffer, bucket, last=last)

    # The end of a pass ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reduce the remaining buckets, wait, and set the parameters' gradients. autograd calls this after a pass."""
        try:
            with self._lock:
                # torch.autograd.grad leaves no gradients in parameters; there is nothing to average.
                if any(self._now.counts):
                    self._now.synchronized = True
                    self._complete()
        finally:
            # If all gradients arrived, the next forward pass checks which parameters are trained.
            self._next_pass(check_trained=self.always or any(self._now.pending))
            self.armed = False
        if self.always:
            self.rebuild()

    def _complete(self) -> None:
        now, in_place = self._now, self._in_place
        learning = self.static and self.passes == 0
        if learning:
            self._needed, self._pending = list(now.counts), []
        checked = not (self.find_unused or learning)
        missing = self._missing() if checked and now.counts != self._needed else []
        for number in range(now.launched, len(self._lists if in_place else self.buckets)):
            self._launch(number, len(missing))
        results = [wait() for wait in now.waits]
        if checked:
            self._raise_if_missing(missing, self._counter)
        elif learning or not self.static:
            self._agree_on_unused()
        with torch.no_grad():
            if in_place:
                bucket_memory.copy_out(now.copied, views=False)
            else:
                self._set_gradients(results)
        if self.passes == 0:
            self._first_order = tuple(now.order)
        self._used = [0] * len(self.parameters)
        self.passes += 1
        self._step_optimizers()

    def _set_gradients(self, results: Sequence[torch.Tensor]) -> None:
        """Set the gradients of parameters to their averages, except those that no rank used."""
        for bucket, result in zip(self.buckets, results, strict=True):
            used = [part for part in bucket.parts if part.position not in self._unused]
            if bucket.flat is None:
                for part in used:
                    part.parameter.grad = result
                continue
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result.view(-1))
            bucket_memory.copy_out(used, views=self.views)

    def _missing(self) -> list[int]:
        """Return the trained parameters whose gradients arrived too seldom."""
        pairs = zip(self._now.counts, self._needed, strict=True)
        found = [index for index, (count, needed) in enumerate(pairs) if count < needed]
        return [index for index in found if self.parameters[index].requires_grad]

    def _raise_if_missing(self, missing: list[int], counter: torch.Tensor | None) -> None:
        """Raise unused-parameters on every rank if any rank is ``missing`` gradients.

        ``counter`` is the average of all ranks' numbers. On a GPU a rank only checks its own gradients, because reading
        the counter would synchronize the device; the others fail with it.
        """
        size = self.averager.size
        if self._device.type != "cpu" or size == 1:
            by_rank = {self.rank: missing}
        else:
            if counter is None:
                counter = torch.tensor([len(missing)])
                all_reduce(counter, self._group)
            if not float(counter):
                return
            text = ",".join(map(str, missing)).encode()
            found = gather_bytes(text, self._group, self._device)
            by_rank = {
                rank: [int(index) for index in each.decode().split(",") if index]
                for rank, each in zip(self.ranks, found, strict=True)
            }
        where: dict[str, list[int]] = {}
        for rank, indices in by_rank.items():
            for index in indices:
                where.setdefault(self.names[index], []).append(rank)
        if where:
            raise ddp_failures.unused_parameters(self.rank, where, static=self.static)

    def _agree_on_unused(self) -> None:
        """Find the parameters that no rank used, whose gradients stay as they are; of a static graph, for good."""
        used = torch.tensor(self._used, dtype=torch.uint8, device=self._device)
        if self.averager.size > 1:
            all_reduce(used, self._group, dist.ReduceOp.MAX)
        self._unused = frozenset((used == 0).nonzero().flatten().tolist())

    def take_over_optimizers(self) -> None:
        """Step optimizers that were fused into backward after the reduction instead of before it."""
        for parameter in self.parameters:
            if _torch.optimizers_in_backward(parameter):
                self._has_optimizers = True
                _torch.take_over_optimizers(parameter)

    def _step_optimizers(self) -> None:
        for parameter in self.parameters if self._has_optimizers else ():
            found = _torch.optimizers_in_backward(parameter)
            for optimizer in found:
                optimizer.step()
            if found:
                parameter.grad = None

    # A rank without inputs -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_zeros(self) -> None:
        """Contribute zeros to the reductions of one backward pass of other ranks, and drop the results."""
        waits: list[Callable[[], Any]] = []
        counter = None
        for number, each in enumerate(self._lists if self._in_place else ()):
            zeros = each.zeros()
            counter = zeros[-1]
            waits.append(self.averager.start_list(zeros, self.divisor, wait=number == len(self._lists) - 1))
        for number, bucket in enumerate(() if self._in_place else self.buckets):
            last = number == len(self.buckets) - 1
            zero = bucket_memory.zeros(bucket)
            counted = zero.counted if last and self._counter is not None else None
            counter = None if counted is None else counted[-1]
            buffer = zero.flat if zero.flat is not None else zero.parts[0].view
            made = _grad_bucket(number, buffer, zero, last=last)
            waits.append(self.averager.start(made, counted, self.divisor, wait=last))
        for wait in waits:
            wait()
        learning = self.static and self.passes == 0
        if not (self.find_unused or learning):
            self._raise_if_missing([], None if self._counter is None else counter)
        elif learning or not self.static:
            self._used = [0] * len(self.parameters)
            self._agree_on_unused()
        self.passes += 1


def _grad_bucket(number: int, buffer: torch.Tensor | None, bucket: Bucket, *, last: bool) -> GradBucket:
    """Return the argument of a communication hook; ``buffer`` is the only gradient of a sparse ``bucket``."""
    if buffer is None:
        raise ValueError("a bucket has a buffer")
    gradients = [buffer if part.view is None else part.view for part in bucket.parts]
    return GradBucket(number, buffer, gradients, [part.parameter for part in bucket.parts], last=last)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
