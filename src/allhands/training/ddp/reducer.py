"""From gradients to their averages: hooks on parameters, buckets that are reduced while backward goes on, and its end.

A backward pass opens with the gradient of an output of the wrapped module (or the first gradient of a parameter where
no output could be watched), and is finished by a callback at its very end, in which whatever is missing is noticed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import _core, _torch
from ...errors import AllhandsError
from ...groups import collectives
from . import bucket_memory, errors, missing_gradients
from .backward import End, Pass
from .bucket import FIRST_BYTES
from .gradbucket import GradBucket
from .mark import Mark
from .reduction import Averager, all_reduce, broadcast
from .storage import Bucket, Storage
from .tensor_list import tie

__all__ = ["Reducer"]

# torch's: large enough for the engine's full speed, small enough for several in a model that is worth distributing.
_CAP_BYTES = 25 << 20


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
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self._device = self.parameters[0].device
        # Whether buckets are reduced while backward goes on, or all of them by its own thread when it is over.
        self._beside = self.averager.has_cores() or self._device.type != "cpu"
        self._used = [0] * len(self.parameters)
        # How often each gradient comes in a pass; a static graph's first pass counts.
        self._needed = [1] * len(self.parameters)
        self._lock = threading.RLock()
        # Whether gradients may be reduced where they lie. Not views of a bucket, and not those that are to stay as they
        # are where nobody used a parameter, which is known only afterwards.
        plain = not (views or find_unused or any(sparse)) and all(each.is_cpu for each in self.parameters)
        self._may_stay = plain and self.averager.can_bundle()
        self._storage = Storage(self.parameters, sparse, group, caps_bytes)
        self._order: list[int] = []
        self.buckets: list[Bucket] = []
        self._trained: list[bool] = []
        self._left: list[int] = []
        self._intake = self._hooked()
        self._arrange(list(reversed(range(len(self.parameters)))))
        self._renew()
        self._optimizers = False
        handles = [
            each.register_post_accumulate_grad_hook(functools.partial(self._intake.came, index))  # type: ignore[no-untyped-call]
            for index, each in enumerate(self.parameters)
        ]
        self.remove = weakref.finalize(self, _remove, handles)

    # What is reduced where ---------------------------------------------------------------------------------------

    def _arrange(self, order: list[int]) -> None:
        memory = {id(slot.view): slot.parameter for bucket in self.buckets for slot in bucket.slots}
        for parameter in self.parameters:
            if parameter.grad is not None and id(parameter.grad) in memory:
                # It lies where another gradient may lie from now on.
                parameter.grad = parameter.grad.clone()
        self._order = order
        self.buckets = self._storage.arrange(order, spare=self._in_place)
        self._of = {
            slot.position: (number, slot) for number, bucket in enumerate(self.buckets) for slot in bucket.slots
        }
        places = [self._of[index] for index in range(len(self.parameters))]
        likes = tuple(slot.view for _, slot in places)
        views = likes if self.views else (None,) * len(likes)
        # Where gradients stay, there is no need to look at each as it comes.
        self._intake.arrange(tuple(number for number, _ in places), None if self._may_stay else views, likes)
        self._trained = []
        # Whoever is last in line comes when everything else has come, and can carry how many gradients are missing.
        marked = self.buckets[-1].marked
        self._marker = Mark(marked[-1]) if marked is not None and not self.find_unused else None
        mark = None if self._marker is None else self._marker.tensor
        self._bundles = tie(self.buckets, mark, together=not self._beside) if self._may_stay else []

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
        self._renew()
        return True

    _came: Sequence[int] = ()

    def _renew(self, *, look: bool = True) -> None:
        """Make ready for the next pass; without ``look`` parameters are those that were trained in the last one."""
        trained = [each.requires_grad for each in self.parameters] if look else self._trained
        if trained != self._trained or not self._left:
            # Frozen parameters, and those that a static graph does not use here, are not waited for.
            self._left = [
                sum(trained[slot.position] and self._needed[slot.position] > 0 for slot in bucket.slots)
                for bucket in self.buckets
            ]
            self._trained = trained
        self._now = Pass([0] * len(self.parameters), self._left.copy(), opened=self.always)
        self._intake.rest()

    # Gradients come ------------------------------------------------------------------------------------------------

    def _hooked(self) -> _core.Intake:
        """Return what the hooks on parameters call. No hook holds the reducer, whose end takes them away."""
        me = weakref.ref(self)

        def came(index: int) -> None:
            reducer = me()
            if reducer is not None:
                reducer.came(index)

        def complete() -> None:
            reducer = me()
            if reducer is not None:
                reducer.complete()

        def opens(_: torch.Tensor) -> None:
            reducer = me()
            if reducer is not None:
                reducer.open()

        self.opens = opens
        return _core.Intake(collectives.way(), tuple(self.parameters), came, complete)

    def _hand_over(self) -> None:
        """Let the core take the gradients of the pass that runs now, as far as they come as usual.

        Not those of the first pass, whose order and, in a static graph, number is to be learned.
        """
        now = self._now
        if self.passes and now.opened and not now.handed and now.end is not None:
            now.handed = True
            self._intake.begin(now.end, now.counts, now.left, self._used, self._needed)

    def open(self) -> None:
        """Note that a backward pass begins whose gradients are to be reduced. Called from inside it."""
        with self._lock:
            self._begin()
            self._now.opened = True
            self._hand_over()

    def _begin(self) -> None:
        """Be called at the end of the backward pass that runs now."""
        if self._is_broken():
            self._reset()
        if self._now.end is None:
            end = End(self.finish)
            self._now.end = weakref.ref(end)
            _torch.queue_callback(end)

    def _is_broken(self) -> bool:
        """Tell whether the last backward pass was ended by an exception."""
        return self._now.end is not None and self._now.end() is None

    def _reset(self) -> None:
        now = self._now
        if now.ready:
            raise errors.unfinished(self.rank, now.ready, len(self.buckets))
        if now.end is None and (not self._beside or self._intake.trains(self._trained)):
            # No gradient has come since it was made. Where all of them go at the end, that is where it is seen which
            # parameters are trained.
            now.opened = self.always
        else:
            self._renew()

    def came(self, index: int) -> None:
        """Note that the gradient of a parameter is there. The core does the same where it takes them."""
        with self._lock:
            # Backward may come without a gradient, where it is known to be nothing.
            self._used[index] |= self.parameters[index].grad is not None
            if not self._now.opened and not self.armed:
                return
            self._begin()
            self._hand_over()
            now = self._now
            if not self._needed[index]:
                raise errors.graph_changed(self.rank, self.names[index])
            now.counts[index] += 1
            count, needed = now.counts[index], self._needed[index]
            if count == 1:
                now.order.append(index)
            number, slot = self._of[index]
            if self.views and number >= now.launched:
                bucket_memory.settle(slot)
            if count > needed and number < now.ready:
                raise errors.twice(self.rank, self.names[index], static=self.static)
            if count == needed:
                now.left[number] -= 1
                if not self._waits_for_the_end():
                    self._go_on()

    def complete(self) -> None:
        """Note that a bucket has all its gradients."""
        with self._lock:
            if not self._waits_for_the_end():
                self._go_on()

    def _waits_for_the_end(self) -> bool:
        # In the first pass of a static graph nobody knows how often each gradient comes.
        return not self._now.opened or (self.static and not self.passes) or (self.at_the_end and self.find_unused)

    def _go_on(self) -> None:
        """Let the buckets go that are complete now."""
        now = self._now
        while now.ready < len(self.buckets) and not now.left[now.ready]:
            now.ready += 1
            if self._beside:
                self._launch(now.ready - 1)

    def expect(self, *, watched: bool) -> None:
        """Make ready for a backward pass. Without ``watched`` outputs the first gradient opens it."""
        with self._lock:
            # Not in the middle of a pass, where checkpointing may run a forward pass again.
            if self._now.end is None or self._is_broken():
                self._reset()
            self.armed = True
            if not watched:
                self._now.opened = True

    def rest(self) -> None:
        """Leave the gradients of the next backward pass to each rank, unless a watched output opens it."""
        with self._lock:
            self.armed = False
            if self._now.end is None or self._is_broken():
                self._reset()

    def listen(self, *, always: bool) -> None:
        """Reduce every backward pass from now on, or only those that a forward pass announces."""
        with self._lock:
            self.always = always
            self._renew()

    @property
    def in_segment(self) -> bool:
        """Whether the buckets lie in memory that the ranks share."""
        return self._storage.in_segment

    # Buckets go ----------------------------------------------------------------------------------------------------

    @property
    def _in_one(self) -> bool:
        """Whether all buckets are reduced together: they lie side by side, and go at the end of backward anyway."""
        return not (self._beside or self._in_place) and self.averager.hook is None and bool(self._storage.wholes)

    def _reduce_all(self, missing: int, *, lie: bool) -> list[torch.Tensor]:
        """Average all buckets in as few calls as there are types; ``lie`` says that the gradients are there."""
        results: list[torch.Tensor] = []
        if not lie:
            with torch.no_grad():
                results = [bucket_memory.fill(bucket, self.names, self.rank) for bucket in self.buckets]
        if self._mark is not None:
            self._mark.write(missing)
        for whole in self._storage.wholes:
            self.averager.average(whole, self.divisor)
        return results

    @property
    def _in_place(self) -> bool:
        """Whether gradients are reduced where they lie."""
        return self._may_stay and not self.static and self.averager.hook is None

    def _reduce_rest(self, missing: int) -> list[torch.Tensor]:
        """Let go what has not gone yet, and wait for all; return the results of buckets."""
        for number in range(self._now.launched, len(self._bundles if self._in_place else self.buckets)):
            self._launch(number, missing=missing)
        return [wait() for wait in self._now.waits]

    def _reduce_bundles(self, missing: int) -> None:
        """Average all gradients, now that backward is over, where they lie."""
        if self._mark is not None:
            self._mark.write(missing)
        for bundle in self._bundles:
            found = bundle.gather(self._intake, self.names, self.rank)
            self._now.moved += found.moved
            self.averager.average_bundle(found.tensors, self.divisor)

    def _launch(self, number: int, missing: int = 0) -> None:
        if self._in_place:
            # Nothing is computed with tensors, unless something is unusual about one, which sees to it itself.
            self._let_go(number, missing, in_place=True)
            return
        with torch.no_grad():
            self._let_go(number, missing, in_place=False)

    def _let_go(self, number: int, missing: int, *, in_place: bool) -> None:
        now = self._now
        last = number == len(self._bundles if in_place else self.buckets) - 1
        now.launched = number + 1
        start = self._ready_bundle(number) if in_place else self._ready_bucket(number, last=last)
        if last and self._mark is not None:
            self._mark.write(missing)
        try:
            now.waits.append(start(self.divisor, wait=last or not self._beside))
        except AllhandsError:
            # The group is over, and whatever is called next says why.
            now.ready = now.launched = 0
            raise

    def _ready_bundle(self, number: int) -> Callable[..., Callable[[], Any]]:
        """Return what averages gradients where they lie."""
        found = self._bundles[number].gather(self._intake, self.names, self.rank)
        self._now.moved += found.moved
        return functools.partial(self.averager.start_bundle, found.tensors)

    def _ready_bucket(self, number: int, *, last: bool) -> Callable[..., Callable[[], Any]]:
        """Fill a bucket, and return what averages it."""
        bucket = self.buckets[number]
        buffer = bucket_memory.fill(bucket, self.names, self.rank)
        marked = bucket.marked if last and self._mark is not None else None
        gradients = [slot.view if slot.view is not None else buffer for slot in bucket.slots]
        made = GradBucket(number, buffer, gradients, [slot.parameter for slot in bucket.slots], last=last)
        return functools.partial(self.averager.start, made, marked)

    @property
    def _mark(self) -> Mark | None:
        """Where the last bucket carries how many gradients are missing; a hook would not know it."""
        return self._marker if self.averager.hook is None else None

    # The end of a pass ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reduce what is left, wait for everything, and give parameters their gradients. The end of backward."""
        try:
            with self._lock:
                # Without gradients of parameters it was torch.autograd.grad, which averages nothing.
                if any(self._now.counts):
                    self._now.opened = True
                    self._complete()
        finally:
            # Else the next forward pass looks which parameters are trained, if it has to be known before the end.
            self._renew(look=self.always or any(self._now.left))
            self.armed = False
        if self.always:
            self.rebuild()

    def _complete(self) -> None:
        now = self._now
        first, learns = self.passes == 0, self.static and self.passes == 0
        if learns:
            self._needed, self._left = list(now.counts), []
        missing = (
            missing_gradients.find(now.counts, self._needed, self.parameters) if now.counts != self._needed else []
        )
        fatal = 0 if self.find_unused or learns else len(missing)
        # Moved by the core, unless something is unusual about one of them.
        lie = self.views and not now.launched and self._intake.lie()
        in_place, in_one = self._in_place, self._in_one
        results: list[torch.Tensor] = []
        if in_place and not self._beside:
            self._reduce_bundles(fatal)
        else:
            results = self._reduce_all(fatal, lie=lie) if in_one else self._reduce_rest(fatal)
        if not (self.find_unused or learns):
            self._tell_missing(missing, self._mark)
        elif learns or not self.static:
            self._agree_on_used()
        if in_place:
            if now.moved:
                with torch.no_grad():
                    bucket_memory.give(now.moved, views=False)
        elif not (lie and in_one):
            with torch.no_grad():
                for bucket, result in zip(self.buckets, results, strict=True):
                    bucket_memory.hand_out(bucket, result, self._unused_now, views=self.views)
        self._used = [0] * len(self.parameters)
        self.passes += 1
        if first:
            self._came = tuple(now.order)
        self._step_optimizers()

    def _tell_missing(self, missing: list[int], mark: Mark | None) -> None:
        """Raise on every rank where any rank has too few gradients; ``mark`` came with the last bucket."""
        told = (
            {}
            if mark is not None and mark.is_clear()
            else missing_gradients.ask(missing, mark, self._group, self._device)
        )
        if told:
            raise errors.unused(
                self.rank, {self.names[index]: ranks for index, ranks in told.items()}, static=self.static
            )

    def _agree_on_used(self) -> None:
        """Find out which parameters no rank used: their gradients are left alone, in a static graph from now on."""
        used = torch.tensor(self._used, dtype=torch.uint8, device=self._device)
        if self.averager.size > 1:
            all_reduce(used, self._group, dist.ReduceOp.MAX)
        self._unused_now = frozenset((used == 0).nonzero().flatten().tolist())

    _unused_now: frozenset[int] = frozenset()

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
        waits: list[Callable[[], Any]] = []
        mark = None
        for number, bundle in enumerate(self._bundles if self._in_place else ()):
            zeros = bundle.zeros()
            mark = zeros[-1].view(-1)
            waits.append(self.averager.start_bundle(zeros, self.divisor, wait=number == len(self._bundles) - 1))
        for whole in self._storage.wholes if self._in_one else ():
            mark = torch.zeros_like(whole)
            self.averager.average(mark, self.divisor)
        for number, bucket in enumerate(self.buckets if not (self._in_one or self._in_place) else ()):
            last = number == len(self.buckets) - 1
            parameters = [slot.parameter for slot in bucket.slots]
            marked, buffer, parts = bucket_memory.zeros(bucket)
            mark = marked if last and self._mark is not None else None
            made = GradBucket(number, buffer, parts, parameters, last=last)
            waits.append(self.averager.start(made, mark, self.divisor, wait=last))
        for wait in waits:
            wait()
        learns = self.static and self.passes == 0
        if not (self.find_unused or learns):
            self._tell_missing([], Mark(mark[-1]) if mark is not None and self._mark is not None else None)
        elif learns or not self.static:
            self._used = [0] * len(self.parameters)
            self._agree_on_used()
        self.passes += 1


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
