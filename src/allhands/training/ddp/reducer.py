"""Average gradients during backward: hooks on parameters, buckets, and a callback at the end of the pass.

A backward pass is synchronized from the gradient of an output of the wrapped module on (from the first gradient of a
parameter if no output could be watched). autograd calls `Reducer.finish` at its end, which finds missing gradients.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ... import _core, _torch
from ...diagnosis import ranks
from ...engines.shm import engine as shm
from ...errors import AllhandsError, fail
from ...groups import collectives
from ...groups.process_group import Group
from ..compare_ranks import gather_text
from . import bucket

__all__ = ["Averager", "Reducer", "all_reduce", "broadcast", "unused_parameters"]

# A message names at most this many parameters and counts the others.
_MAX_NAMES = 12


def _coalesced(tensors: list[torch.Tensor], op: Any, group: Any, async_op: bool) -> Any:
    """Call the group directly: torch's function warns of its deprecation each time and does not return the Work."""
    opts = dist.AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = op, async_op
    work = group.allreduce_coalesced(tensors, opts)
    if async_op:
        return work
    work.wait()
    return None


all_reduce = collectives.fast_path("all_reduce")
broadcast = collectives.fast_path("broadcast")
_all_reduce_coalesced = collectives.fast_path("all_reduce_coalesced", _coalesced)


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
        if not isinstance(self.group, Group) or self.size == 1:
            return True
        no_spare_core = torch.tensor([shm.cores() <= self.size], dtype=torch.uint8)
        all_reduce(no_spare_core, dist.ReduceOp.MAX, self.group)
        return not bool(no_spare_core)

    def start(self, tensors: list[torch.Tensor], divisor: float | None, *, wait: bool) -> Callable[[], Any]:
        """Start to average dense ``tensors``, all of one dtype, in place. Returns a function that waits.

        Sums are divided by ``divisor``, by default the number of ranks. ``wait`` is a hint that the caller waits at
        once: synchronous calls skip the engine's thread.
        """
        if self.size == 1 and divisor is None:
            return _done
        if isinstance(self.group, Group) and divisor is None and tensors[0].is_floating_point():
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

    def start_sparse(self, gradient: torch.Tensor, divisor: float | None) -> tuple[torch.Tensor, Callable[[], Any]]:
        """Start to average a sparse ``gradient``. Returns the result, and a function that waits for it."""
        gradient = (gradient * (1 / (divisor or self.size))).coalesce()
        if self.size == 1:
            return gradient, _done
        return gradient, all_reduce(gradient, group=self.group, async_op=True).wait

    def start_bucket(self, unit: bucket.Bucket, divisor: float | None, *, wait: bool) -> Callable[[], Any]:
        """Start to average the buffer of ``unit``, as `start` does or with the communication hook if there is one."""
        if self.hook is None and unit.flat is None:
            gradient, finish = self.start_sparse(unit.buffer(), divisor)
            unit.set_buffer(gradient)
            return finish
        if self.hook is None:
            return self.start([unit.buffer()], divisor, wait=wait)
        future = self.hook(self.state, unit)

        def finish_hook() -> None:
            value = future.wait()
            unit.set_buffer(value[0] if isinstance(value, list | tuple) else value)

        return finish_hook


def _done() -> None:
    """Wait for nothing."""


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
    # Leading buckets that are complete, and those of them whose reduction was started.
    ready: int = 0
    launched: int = 0
    waits: list[Callable[[], Any]] = field(default_factory=list)
    # Buckets whose gradients could not be reduced in place.
    copied: list[bucket.Bucket] = field(default_factory=list)
    # The indices of gradients in the order of arrival, unless the core counts them.
    order: list[int] = field(default_factory=list)


class Reducer:
    """Averages the gradients of the parameters in ``named`` over ``group``. All ranks make it with the same arguments.

    ``sparse`` has the ids of parameters with sparse gradients. ``caps_bytes`` are the sizes of the buckets; the last
    one is that of all further ones. ``at_the_end``: no bucket is reduced during backward. ``always``: every backward
    pass is reduced, without a forward pass that announces it.
    """

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        sparse: Container[int],
        group: Any,
        *,
        caps_bytes: Sequence[int],
        views: bool = False,
        find_unused: bool = False,
        static: bool = False,
        at_the_end: bool = False,
        always: bool = False,
    ) -> None:
        self.names = list(named)
        self.parameters = list(named.values())
        self.averager = Averager(group)
        self.find_unused = find_unused
        self.static = static
        self._at_the_end = at_the_end
        self.views = views
        self.always = always
        # The divisor of sums if it is not the number of ranks (see join).
        self.divisor: float | None = None
        self.passes = 0
        self.rebuilt = False
        # Whether the next backward pass is reduced even if no watched output announces it.
        self.armed = False
        self.rank = dist.get_rank()
        self._device = self.parameters[0].device
        # Whether buckets are reduced during backward, or all of them by its own thread at the end.
        self._overlap = self.averager.can_overlap() or self._device.type != "cpu"
        self._used = [0] * len(self.parameters)
        # How often each gradient arrives in a pass; counted in the first pass of a static graph.
        self._needed = [1] * len(self.parameters)
        self._lock = threading.RLock()
        is_sparse = [id(each) in sparse for each in self.parameters]
        # Views of buckets cannot be reduced in place, and neither can gradients that must be unchanged if no rank used
        # the parameter, which is known only afterwards.
        plain = not (views or find_unused or any(is_sparse)) and all(each.is_cpu for each in self.parameters)
        self._can_reduce_in_place = plain and isinstance(group, Group) and group.engine.capabilities.tensor_lists
        self._memory = bucket.BucketMemory(self.parameters, is_sparse, group, caps_bytes)
        # The order in which gradients arrive, as far as it is known.
        self._order = list(reversed(range(len(self.parameters))))
        self._unused: frozenset[int] = frozenset()
        self.buckets: list[bucket.Bucket] = []
        self._trained: list[bool] = []
        self._pending: list[int] = []
        self.on_output_gradient = _weakly(self._start_pass)
        # The hook of all parameters, in the core.
        self._grad_hook = _core.GradHook(
            collectives.torch_facts(), tuple(self.parameters), _weakly(self._on_gradient), _weakly(self._on_bucket)
        )
        self._arrange()
        # Parameters with the optimizers that were fused into backward.
        self._optimizers: list[tuple[torch.nn.Parameter, list[Any]]] = []
        handles = contextlib.ExitStack()
        for index, each in enumerate(self.parameters):
            hook = functools.partial(self._grad_hook.on_gradient, index)
            handles.callback(each.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
        self.remove = weakref.finalize(self, handles.close)

    # Layout --------------------------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        views = {id(part.view) for each in self.buckets for part in each.parts}
        for parameter in self.parameters:
            if parameter.grad is not None and id(parameter.grad) in views:
                # Its memory may become that of another gradient.
                parameter.grad = parameter.grad.clone()
        self.buckets = self._memory.arrange(self._order, fallback=self._in_place)
        self.in_segment = self._memory.in_segment
        self._of = {part.position: (each.index(), part) for each in self.buckets for part in each.parts}
        places = [self._of[index] for index in range(len(self.parameters))]
        layouts = tuple(part.view for _, part in places)
        views_to_fill = layouts if self.views else (None,) * len(layouts)
        # In place, gradients are checked when they are gathered, not when they arrive.
        self._grad_hook.set_places(
            tuple(number for number, _ in places), None if self._can_reduce_in_place else views_to_fill, layouts
        )
        self._trained = []
        self._next_pass()

    @property
    def _in_place(self) -> bool:
        """Whether gradients are reduced in their own memory."""
        return self._can_reduce_in_place and not self.static and self.averager.hook is None

    def rebuild(self) -> None:
        """Arrange the buckets, once, in the order in which gradients arrived. All ranks call this at the same time."""
        if self.rebuilt or not self.passes:
            return
        self.rebuilt = True
        decided = torch.tensor(self._order, dtype=torch.int64, device=self._device)
        if self.averager.size > 1:
            broadcast(decided, group_src=0, group=self.averager.group)
        self._order = decided.tolist()
        self._arrange()

    def _next_pass(self) -> None:
        """Prepare for the next pass."""
        trained = [each.requires_grad for each in self.parameters]
        if trained != self._trained or not self._pending:
            # Neither frozen parameters nor those that a static graph does not use get gradients.
            self._pending = [
                sum(trained[part.position] and self._needed[part.position] > 0 for part in each.parts)
                for each in self.buckets
            ]
            self._trained = trained
        self._now = _BackwardPass([0] * len(self.parameters), self._pending.copy(), synchronized=self.always)
        self._grad_hook.disable()

    # Gradients arrive ----------------------------------------------------------------------------------------------

    def _count_in_core(self) -> None:
        """Let the core count the gradients of this pass; it calls `_on_gradient` for unusual ones.

        Not in the first pass, whose order and, in a static graph, counts are recorded.
        """
        now = self._now
        if self.passes and now.synchronized and now.end is not None:
            self._grad_hook.begin_pass(now.end, now.counts, now.pending, self._used, self._needed)

    def _start_pass(self, _: torch.Tensor) -> None:
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
        if self._now.ready:
            raise fail(
                "backward-unfinished",
                f"the last backward pass stopped after {self._now.ready} of {len(self.buckets)} buckets were complete",
                who=_this_rank(self.rank),
                why="an exception ended it and was caught, while the other ranks wait for its other gradients: any "
                "further reduction would mix gradients of different passes",
                fix="do not catch exceptions around backward() on single ranks; let them end the job, or destroy the "
                "group and form a new one on all ranks",
                ranks=(self.rank,),
            )
        self._next_pass()

    def _on_gradient(self, index: int) -> None:
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
                raise fail(
                    "gradient-twice",
                    f"{self.names[index]} got a gradient, although it had none in the first backward pass",
                    who=_this_rank(self.rank),
                    why="static_graph=True promises that every backward pass uses the same parameters",
                    fix="leave out static_graph=True; find_unused_parameters=True allows for what changes",
                    ranks=(self.rank,),
                )
            now.counts[index] += 1
            count, needed = now.counts[index], self._needed[index]
            if count == 1:
                now.order.append(index)
            number, part = self._of[index]
            if self.views and number >= now.launched:
                bucket.move_in(part)
            if count > needed and number < now.ready:
                raise fail(
                    "gradient-twice",
                    f"{self.names[index]} got a gradient again after its bucket was complete",
                    who=_this_rank(self.rank),
                    why="a backward pass inside this one computed it: activation checkpointing with use_reentrant=True "
                    "that uses the parameter several times, or a call of backward() in a hook",
                    fix="leave out static_graph=True where the graph changes, or checkpoint with use_reentrant=False"
                    if self.static
                    else "checkpoint with use_reentrant=False; or pass static_graph=True if every pass uses the same "
                    "parameters",
                    ranks=(self.rank,),
                )
            if count == needed:
                now.pending[number] -= 1
                self._on_bucket()

    def _on_bucket(self) -> None:
        """Start the reduction of the leading buckets that are complete, unless all wait for the end of the pass."""
        with self._lock:
            now = self._now
            # Counts are unknown in the first pass of a static graph.
            if not now.synchronized or self._learning or self._at_the_end:
                return
            while now.ready < len(self.buckets) and not now.pending[now.ready]:
                now.ready += 1
                if self._overlap:
                    self._launch(now.ready - 1)

    def prepare(self, *, armed: bool, synchronized: bool = False) -> None:
        """Prepare for a backward pass, which is reduced if a watched output starts it.

        With ``armed`` it is reduced in any case: with ``synchronized`` from its first gradient on, else at its end.
        """
        with self._lock:
            # Not during a pass: checkpointing runs a forward pass again.
            if self._now.end is None or self._was_interrupted():
                self._reset()
            self.armed = armed
            self._now.synchronized |= synchronized

    # Buckets are reduced -------------------------------------------------------------------------------------------

    def _launch(self, number: int) -> None:
        """Start the reduction of a bucket."""
        now, unit = self._now, self.buckets[number]
        now.launched = number + 1
        wait = unit.is_last() or not self._overlap
        with torch.no_grad():
            tensors = self._grad_hook.gather(unit.order) if self._in_place else None
            if tensors is None:
                unit.fill(self.names, self.rank)
                if self._in_place:
                    # A gradient is missing, sparse, not contiguous, or shares memory. The call is the same.
                    now.copied.append(unit)
                    tensors = unit.flats()
            try:
                if tensors is None:
                    now.waits.append(self.averager.start_bucket(unit, self.divisor, wait=wait))
                else:
                    now.waits.append(self.averager.start(tensors, self.divisor, wait=wait))
            except AllhandsError:
                # The group has failed; the next call reports why.
                now.ready = now.launched = 0
                raise

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
            self._next_pass()
            self.armed = False
        if self.always:
            self.rebuild()

    @property
    def _learning(self) -> bool:
        """Whether this is the first pass of a static graph, which finds how often each gradient arrives."""
        return self.static and not self.passes

    def _complete(self) -> None:
        now = self._now
        if self._learning:
            self._needed, self._pending = list(now.counts), []
        missing: list[int] = []
        if now.counts != self._needed and not self.find_unused:
            # The trained parameters whose gradients arrived too seldom.
            pairs = zip(now.counts, self._needed, strict=True)
            found = [index for index, (count, needed) in enumerate(pairs) if count < needed]
            missing = [index for index in found if self.parameters[index].requires_grad]
        for number in range(now.launched, len(self.buckets)):
            self._launch(number)
        for wait in now.waits:
            wait()
        self._check_used(missing)
        with torch.no_grad():
            for unit in now.copied if self._in_place else self.buckets:
                unit.copy_out(self._unused, views=self.views)
        if self.passes == 0:
            # Those that did not arrive are last, so that no other gradient waits for them.
            self._order = list(dict.fromkeys([*now.order, *self._order]))
        self._used = [0] * len(self.parameters)
        self.passes += 1
        for parameter, optimizers in self._optimizers:
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None

    def _check_used(self, missing: list[int]) -> None:
        """Raise unused-parameters on every rank if any rank is ``missing`` gradients; or find the unused parameters.

        The latter are those that no rank used, whose gradients stay as they are; of a static graph, for good. On a GPU
        a rank only checks its own gradients, because comparing would synchronize the device; the others fail with it.
        """
        group = self.averager.group
        if self._learning or (self.find_unused and not self.static):
            used = torch.tensor(self._used, dtype=torch.uint8, device=self._device)
            if self.averager.size > 1:
                all_reduce(used, dist.ReduceOp.MAX, group)
            self._unused = frozenset((used == 0).nonzero().flatten().tolist())
        if self._learning or self.find_unused:
            return
        members, texts = [self.rank], [",".join(map(str, missing))]
        if self._device.type == "cpu" and self.averager.size > 1:
            members, texts = dist.get_process_group_ranks(group), gather_text(texts[0], group, self._device)
        where: dict[str, list[int]] = {}
        for rank, text in zip(members, texts, strict=True):
            for index in filter(None, text.split(",")):
                where.setdefault(self.names[int(index)], []).append(rank)
        if where:
            raise unused_parameters(self.rank, where, static=self.static)

    def take_over_optimizers(self) -> None:
        """Step optimizers that were fused into backward after the reduction instead of before it."""
        found = [(each, _torch.optimizers_in_backward(each)) for each in self.parameters]
        self._optimizers = [(parameter, optimizers) for parameter, optimizers in found if optimizers]
        for parameter, _ in self._optimizers:
            _torch.take_over_optimizers(parameter)

    # A rank without inputs -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_zeros(self) -> None:
        """Contribute zeros to the reductions of one backward pass of other ranks, and drop the results."""
        waits = []
        for unit in map(bucket.Bucket.zeros, self.buckets):
            if self._in_place:
                waits.append(self.averager.start(unit.flats(), self.divisor, wait=unit.is_last()))
            else:
                waits.append(self.averager.start_bucket(unit, self.divisor, wait=unit.is_last()))
        for wait in waits:
            wait()
        self._used = [0] * len(self.parameters)
        self._check_used([])
        self.passes += 1


def unused_parameters(rank: int, where: Mapping[str, Sequence[int]], *, static: bool) -> AllhandsError:
    """Return the error for parameters without a gradient; ``where`` has the ranks of each name."""
    lines = [f"{name} on {ranks(found)}" for name, found in list(where.items())[:_MAX_NAMES]]
    if len(where) > len(lines):
        lines.append(f"and {len(where) - len(lines)} more parameters")
    number = f"{len(where)} parameters" if len(where) > 1 else "a parameter"
    if static:
        what = f"{number} that had a gradient in the first backward pass got none"
        fix = "leave out static_graph=True where the graph changes"
    else:
        what = f"{number} got no gradient"
        fix = (
            "use every parameter in the loss, freeze those that are not used (requires_grad_(False) before wrapping), "
            "or pass find_unused_parameters=True"
        )
    return fail(
        "unused-parameters",
        f"{what} in this backward pass",
        who=_this_rank(rank),
        why="there is no gradient of\n" + "\n".join(lines),
        fix=fix,
        ranks=tuple(sorted({each for found in where.values() for each in found})),
    )


def _this_rank(rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls ``method`` as long as its object lives, and holds no reference to it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call
