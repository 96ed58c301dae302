"""Our process groups: the collectives that torch calls, how a call runs and fails, how a group ends.

CPU tensors go to the group's engine (`engines.shm`, `hierarchical`, `gloo`, `mpi`), CUDA tensors to an engine of their
device (`cuda_route`) or, where there is none, through host memory. Sparse tensors are left to Gloo.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from .. import _core, _torch
from ..diagnosis import Diagnosis
from ..engines import dtypes
from ..engines.base import Engine, EngineFailure, EngineTimeout, parts_of
from ..engines.dtypes import dtype_code
from ..errors import fail
from ..observe import flight_recorder
from . import failure
from . import session as _session
from .cuda_route import CudaCalls, CudaRoute
from .p2p import Messages
from .staging import HOST, Staged, dense, extents, shapes, when_ready
from .work import CallQueue, Done

__all__ = ["Group", "Route"]

# How long `shutdown` waits for queued calls.
_END_S = 2.0

# How much longer than a monitored barrier its caller waits: as long as the ranks take to report what they do.
_LATE_US = 500_000

_Tensors = Sequence[torch.Tensor]

# torch's annotations of this class have overloads that no Python method can have; torch itself only looks for names.
_Base: Any = ProcessGroup


class Route(NamedTuple):
    """The engine of a call, the device of its tensors, and what issues it if not the call queue."""

    engine: Engine
    device: torch.device = HOST
    cuda: CudaCalls | None = None

    def staged(self, *tensors: torch.Tensor, back: bool = True, factor: complex | None = None) -> Staged:
        """Return ``tensors`` as the engine takes them."""
        return Staged(*tensors, back=back, factor=factor, device=self.device)


@_torch.untraced
class Group(_Base):  # type: ignore[misc]
    """A group whose engine compares calls by itself. All ranks call the same methods, which are those of torch."""

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        *,
        engine: Engine,
        gloo: Any,
        session: _session.Session,
        timeout: timedelta,
        store: Store,
    ) -> None:
        super().__init__(rank, len(ranks))
        _torch.stand_behind(self, gloo)
        self.ranks = ranks
        self.engine = engine
        self.session = session
        self._rank = rank
        # The C fast path looks for this name; None where the engine has no fast path.
        self.segment = self._fast_path = engine.fast_path
        self.recorder = flight_recorder.own()
        self._gloo = gloo
        self._calls = CallQueue("allhands-group", self._fast_path)
        self.messages = Messages(self) if engine.capabilities.p2p else None
        self._limit_ns = int(timeout.total_seconds() * 1e9)
        self._host_route = Route(engine)
        self._one_host = engine.capabilities.one_host
        # The exception that ended a call, with the frames that hold its tensors: Gloo may still write to them.
        self._kept: BaseException | None = None
        self._cuda = CudaRoute(self, store, timeout.total_seconds())
        self._group_name = ""
        session.member.on_end(self._end)

    # Collectives -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce to all ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors, opts = [tensors], _torch.options(dist.AllreduceOptions, reduceOp=opts, timeout=timeout)
        return self.allreduce_coalesced(tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce several tensors to all ranks, adjacent ones of one type as one."""
        opts = opts or dist.AllreduceCoalescedOptions()

        def run(route: Route, timeout_ns: int) -> None:
            for _, alike in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
                self._reduce_alike(list(alike), opts.reduceOp, route, timeout_ns)

        return self._collective("all_reduce", run, opts, tensors)

    def _reduce_alike(self, tensors: list[torch.Tensor], op: Any, route: Route, timeout_ns: int) -> None:
        """Reduce tensors of one type to all ranks."""
        dtype, reduction, factor = self._reduction("all_reduce", tensors[0], op)
        if len(tensors) > 1 and route.engine.capabilities.tensor_lists and _core.disjoint(extents(tensors)):
            with route.staged(*tensors, factor=factor) as flats:
                route.engine.all_reduce_list(flats.places, dtype, reduction, timeout_ns)
            return
        for tensor in tensors:
            with route.staged(tensor, factor=factor) as flat:
                route.engine.all_reduce(*flat.place, dtype, reduction, timeout_ns)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce to the root."""
        opts = opts or dist.ReduceOptions()

        def run(route: Route, timeout_ns: int) -> None:
            for tensor in tensors:
                dtype, reduction, factor = self._reduction("reduce", tensor, opts.reduceOp)
                with route.staged(tensor, back=self._rank == opts.rootRank, factor=factor) as flat:
                    route.engine.reduce(*flat.place, dtype, reduction, opts.rootRank, timeout_ns)

        return self._collective("reduce", run, opts, tensors)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Copy the root's tensor to all ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors, opts = [tensors], _torch.options(dist.BroadcastOptions, rootRank=opts, timeout=timeout)
        opts = opts or dist.BroadcastOptions()

        def run(route: Route, timeout_ns: int) -> None:
            for tensor in tensors:
                with route.staged(tensor, back=self._rank != opts.rootRank) as flat:
                    route.engine.broadcast(*flat.place, dtype_code(tensor.dtype), opts.rootRank, timeout_ns)

        return self._collective("broadcast", run, opts, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy the tensor of each rank to all ranks, as a list."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]

        def run(route: Route, timeout_ns: int) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._gather_into(output, tensor, route, timeout_ns)

        return self._collective("all_gather", run, opts or _torch.AllgatherOptions(), _flat(outputs), by=inputs)

    def _gather_into(self, outputs: _Tensors, tensor: torch.Tensor, route: Route, timeout_ns: int) -> None:
        self._same_number("all_gather", outputs)
        self._same_type("all_gather", tensor, *outputs)
        with route.staged(tensor, back=False) as flat, route.staged(*outputs) as out:
            route.engine.all_gather(*flat.place, out.places, dtype_code(tensor.dtype), timeout_ns)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Copy the tensor of each rank to all ranks, as one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy several tensors of each rank to all ranks, each as one tensor."""
        name = "all_gather_into_tensor"

        def run(route: Route, timeout_ns: int) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                with route.staged(output) as flat:
                    self._gather_into(self._split(name, flat.tensor.view(-1)), tensor, route, timeout_ns)

        return self._collective(name, run, opts or _torch.AllgatherOptions(), outputs, by=inputs)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Copy several tensors of each rank to all ranks, as lists."""
        # outputs[rank][index] here, where allgather has outputs[index][rank].
        turned = [[each[index] for each in outputs] for index in range(len(inputs))]
        return self.allgather(turned, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy the tensor of each rank to the root."""
        opts = opts or dist.GatherOptions()

        def run(route: Route, timeout_ns: int) -> None:
            code = dtype_code(inputs[0].dtype)
            with route.staged(inputs[0], back=False) as flat:
                if self._rank != opts.rootRank:
                    route.engine.gather(*flat.place, None, code, opts.rootRank, timeout_ns)
                    return
                self._same_number("gather", outputs[0])
                with route.staged(*outputs[0]) as out:
                    route.engine.gather(*flat.place, out.places, code, opts.rootRank, timeout_ns)

        return self._collective("gather", run, opts, _flat(outputs), by=inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy to each rank its tensor of the root's list."""
        opts = opts or dist.ScatterOptions()

        def run(route: Route, timeout_ns: int) -> None:
            code = dtype_code(outputs[0].dtype)
            with route.staged(outputs[0]) as flat:
                if self._rank != opts.rootRank:
                    route.engine.scatter(None, *flat.place, code, opts.rootRank, timeout_ns)
                    return
                self._same_number("scatter", inputs[0])
                with route.staged(*inputs[0], back=False) as given:
                    route.engine.scatter(given.places, *flat.place, code, opts.rootRank, timeout_ns)

        return self._collective("scatter", run, opts, outputs, others=_flat(inputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce each tensor of the list to the rank it is for."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts or dist.ReduceScatterOptions()

        def run(route: Route, timeout_ns: int) -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._reduce_into(output, given, opts.reduceOp, route, timeout_ns)

        return self._collective("reduce_scatter", run, opts, outputs, others=_flat(inputs))

    def _reduce_into(self, output: torch.Tensor, inputs: _Tensors, op: Any, route: Route, timeout_ns: int) -> None:
        self._same_number("reduce_scatter", inputs)
        self._same_type("reduce_scatter", output, *inputs)
        dtype, reduction, factor = self._reduction("reduce_scatter", output, op)
        if inputs[self._rank].numel() != output.numel():
            raise self._invalid("reduce_scatter", "this rank's tensor of the list and the output differ in size")
        if all(tensor.numel() == output.numel() for tensor in inputs):
            with route.staged(output) as flat, route.staged(*inputs, back=False, factor=factor) as given:
                route.engine.reduce_scatter(given.places, *flat.place, dtype, reduction, timeout_ns)
            return
        output.copy_(inputs[self._rank].reshape(output.shape))
        for root, tensor in enumerate(inputs):
            mine = root == self._rank
            with route.staged(output if mine else tensor, back=mine, factor=factor) as flat:
                route.engine.reduce(*flat.place, dtype, reduction, root, timeout_ns)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Reduce each part of one tensor to the rank it is for."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Reduce each part of several tensors to the rank it is for."""
        name = "reduce_scatter_tensor"
        opts = opts or dist.ReduceScatterOptions()

        def run(route: Route, timeout_ns: int) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                with route.staged(tensor, back=False) as flat:
                    self._reduce_into(output, self._split(name, flat.tensor.view(-1)), opts.reduceOp, route, timeout_ns)

        return self._collective(name, run, opts, outputs, others=inputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        """Copy to each rank its tensor of the list."""
        self._same_number("all_to_all", outputs)
        self._same_number("all_to_all", inputs)

        def run(route: Route, timeout_ns: int) -> None:
            with route.staged(*outputs) as out, route.staged(*inputs, back=False) as given:
                route.engine.all_to_all(given.places, out.places, dtype_code(inputs[0].dtype), timeout_ns)

        return self._collective("all_to_all", run, opts or dist.AllToAllOptions(), outputs, by=inputs)

    def all_to_all_single(  # torch's signature
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        """Copy to each rank its part of one tensor; splits are in rows, [] for even ones."""

        def run(route: Route, timeout_ns: int) -> None:
            with route.staged(output) as out, route.staged(tensor, back=False) as given:
                gives = parts_of(self._split("all_to_all_single", given.tensor, input_splits))
                takes = parts_of(self._split("all_to_all_single", out.tensor, output_splits))
                route.engine.all_to_all(gives, takes, dtype_code(tensor.dtype), timeout_ns)

        return self._collective("all_to_all_single", run, opts or dist.AllToAllOptions(), [output], by=[output, tensor])

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._do("barrier", self.engine.barrier, [], opts or dist.BarrierOptions())

    # Older names, which older versions of torch and its C++ code call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Send to one rank."""
        if self.messages is None or not dense(*tensors):
            return self._gloo.send(tensors, rank, tag)
        return self.messages.begin("send", tensors, rank, tag, self._limit_ns)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Receive from one rank."""
        if self.messages is None or not dense(*tensors):
            return self._gloo.recv(tensors, rank, tag)
        return self.messages.begin("recv", tensors, rank, tag, self._limit_ns)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Receive from any rank."""
        if self.messages is None or not dense(*tensors):
            return self._gloo.recv_anysource(tensors, tag)
        return self.messages.begin("recv", tensors, None, tag, self._limit_ns)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, at most ``timeout``, and name the missing ones: the first, or all of them.

        The first rank whose time is up ends the group, and every rank raises the same error. On several hosts it names
        all missing ranks in any case.
        """
        limit_ns = self._limit_ns if timeout is None else int(timeout.total_seconds() * 1e9)
        site = _session.call_site()

        def run(_: int) -> None:
            try:
                self.engine.barrier(limit_ns)
            except EngineTimeout:
                if not self._one_host:
                    raise
                raise failure.barrier_timeout(self, limit_ns / 1e9, site, wait_all_ranks=wait_all_ranks) from None

        work = self._do("monitored_barrier", run, [], None)
        # A call queued before it may be what hangs: its own timeout then begins late, the caller's does not.
        work.wait(timedelta(microseconds=limit_ns / 1e3 + _LATE_US) if self._one_host else None)

    # Memory that the ranks share ---------------------------------------------------------------------------

    def window(self, size: int) -> Any:
        """Create memory of ``size`` bytes for each rank, None for 0. Every rank of the group calls this."""
        self.session.member.check_process()
        sizes = torch.zeros(self.size(), 1, dtype=torch.int64)
        mine = torch.tensor([size])
        opts = _torch.AllgatherOptions()
        opts.asyncOp = False
        self.allgather([list(sizes)], [mine], opts)
        wanted = [int(each) for each in sizes]
        if len(set(wanted)) > 1:
            asked = ", ".join(f"rank {rank} {each}" for rank, each in list(zip(self.ranks, wanted, strict=True))[:16])
            raise self._invalid("empty", f"ranks asked for different numbers of bytes: {asked}")
        return self.engine.window(size, self._limit_ns / 1e9) if size else None

    # About the group ---------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name of the backend."""
        return "allhands"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name, which torch chooses."""
        self._group_name = name
        self._configure_fast_path()

    def getGroupName(self) -> str:  # noqa: N802
        """Return it."""
        return self._group_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, _: torch.device) -> Any:
        return self._gloo

    def _get_sequence_number_for_group(self) -> int:
        return self.engine.sequence()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the sequence begins at 0 on every rank."""

    def _start_coalescing(self, _: torch.device) -> None:
        """Do nothing: calls run as they are made."""

    def _end_coalescing(self, _: torch.device) -> Any:
        return Done([])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long each further call may take."""
        self._limit_ns = int(timeout.total_seconds() * 1e9)
        self._configure_fast_path()
        self._gloo.set_timeout(timeout)

    def abort(self) -> None:
        """End the group for everyone, now; on several hosts the default group with it."""
        if self._one_host:
            self._end(None)
            return
        rank, host = self.session.member.rank, socket.gethostname()
        self.session.member.end_group(
            Diagnosis(
                "peer-lost",
                f"rank {rank} ended the group",
                who=f"rank {rank} ({host}, pid {os.getpid()})",
                why="it called abort()",
                fix="look at the end of its output for the reason",
                ranks=(rank,),
                hosts=(host,),
            )
        )

    def shutdown(self) -> None:
        """End this rank's part, after the queued calls."""
        if self._fast_path is not None:
            self._fast_path.fast_path_closed = 1
        self.session.member.off_end(self._end)
        self._calls.close(_END_S)
        if self.messages is not None:
            self.messages.close(_END_S)
        for each in self._cuda.all():
            each.close(_END_S)
        self.engine.close(_END_S)
        self._gloo.shutdown()

    # Inside ------------------------------------------------------------------------------------------------

    def _end(self, _: Any) -> None:
        """The group is over: end every wait of its engines."""
        self.engine.abort(self._rank)
        for each in self._cuda.all():
            each.release()

    def compare_only(self, operation: int) -> None:
        """Wait until all ranks have stated ``operation``, which is no collective; raise where one made another call."""
        self._do("compare_only", functools.partial(self.engine.compare_only, operation, 0, 0, 0, -1), [], None).wait()

    def _collective(
        self,
        name: str,
        run: Callable[[Route, int], None],
        opts: Any,
        results: list[torch.Tensor],
        *,
        by: list[torch.Tensor] | None = None,
        others: _Tensors = (),
    ) -> Any:
        """Call ``run`` with the route of the tensors ``by``, by default the ``results``; ``others`` are the rest."""
        by = results if by is None else by
        if not dense(*results, *by, *others):
            return self._do(name, functools.partial(self._run_sparse, name, by, opts), by, opts)
        route = self._route(by)
        return self._do(name, functools.partial(run, route), results, opts, route)

    def _route(self, tensors: _Tensors) -> Route:
        """Return the route of a call with ``tensors``."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        # Where ranks share no memory, CUDA tensors go through host memory.
        if device is None or not self._one_host:
            return self._host_route
        cuda = self._cuda.find(device)
        return Route(cuda.engine, cuda.device, cuda) if cuda is not None else self._host_route

    def _do(
        self, name: str, run: Callable[[int], None], tensors: list[torch.Tensor], opts: Any, route: Route | None = None
    ) -> Any:
        # A forked child maps the segment too, and would act as its parent.
        self.session.member.check_process()
        root = getattr(opts, "rootRank", -1)
        if not -1 <= root < self.size():
            raise self._invalid(name, f"there is no rank {root} in a group of {self.size()}")
        cuda = route.cuda if route is not None else None
        if cuda is None:
            run = when_ready(run, tensors)
        site = _session.call_site()
        if not self._one_host:
            run = functools.partial(self._run_compared, name, site, run, tensors)
        later = bool(getattr(opts, "asyncOp", True))
        # The call's own timeout; torch passes a negative one where the caller gave none.
        own_ns = int(getattr(opts, "timeout", timedelta(0)).total_seconds() * 1e9)
        within_ns = own_ns if own_ns > 0 else self._limit_ns
        reduction = dtypes.REDUCTION_NAMES[dtypes.reduction_code(opts.reduceOp)] if hasattr(opts, "reduceOp") else ""
        entry = _session.begin_entry(name, self._group_name, tensors, site, reduction, root)
        if cuda is not None:
            return cuda.issue(name, functools.partial(run, within_ns), tensors, site, within_ns, entry)
        run_call = functools.partial(self._run_call, name, site, entry, run, within_ns)
        if _torch.profiling():
            # Ends with this function, not with the Work: the profiler has hung where another thread ended an event.
            with torch.profiler.record_function(f"allhands:{name}"):
                return self._calls.submit(run_call, tensors, later=later)
        return self._calls.submit(run_call, tensors, later=later)

    def _run_call(self, name: str, site: str, entry: int, run: Callable[[int], None], within_ns: int) -> None:
        before = self.session.enter(name, site)
        self.recorder.run(entry, self.engine.sequence())
        well = False
        try:
            run(within_ns)
            well = True
        except EngineFailure as problem:
            raise failure.of_group(self, problem, name, site) from None
        finally:
            self.recorder.end(entry, well)
            self.session.leave(before)

    def _run_compared(
        self, name: str, site: str, run: Callable[[int], None], tensors: _Tensors, timeout_ns: int
    ) -> None:
        """Run ``run`` by an engine that sends shapes and line of the call along and may fail in the middle of it.

        Where the call cannot begin here, report that to the other ranks, which would wait otherwise.
        """
        self.session.member.check()
        self.engine.site, self.engine.shape = site, shapes(tensors)
        try:
            run(timeout_ns)
        except BaseException as problem:
            is_signal = not isinstance(problem, Exception)  # A signal handler raised in the middle of the call.
            if not self.engine.in_call and not is_signal:
                self.engine.refuse(name, failure.reason(problem), self._limit_ns)
                raise  # All ranks refused alike and are still in step.
            self._kept = problem
            explained = None if is_signal else failure.explain(self.session, problem, name, site, self)
            if explained is None:
                failure.announce(self.session, problem)
                raise
            raise explained from (problem if explained.slug == "engine-failed" else None)

    def failed(self, code: int, culprit: int, call: tuple[str, str, float], peer: int) -> None:
        """Raise the failure of a call on the fast path, given by name, line and begin. The core calls this.

        A ``peer`` of -1 stands for all ranks.
        """
        before = self.session.enter(*call)
        name, site, _ = call
        peers = None if peer < 0 else [self.ranks[peer]]
        try:
            raise failure.of_group(self, self.engine.failure(code, culprit), name, site, peers)
        finally:
            self.session.leave(before)

    def _configure_fast_path(self) -> None:
        if self._fast_path is not None:
            same = self.ranks == list(range(self.size()))
            self._fast_path.configure_fast_path(
                self._limit_ns, self._group_name, None if same else tuple(self.ranks), self.recorder
            )

    def _run_sparse(self, name: str, tensors: _Tensors, opts: Any, timeout_ns: int) -> None:
        """Reduce sparse tensors to all ranks by Gloo, after comparing the calls. No other operation takes them."""
        op = opts.reduceOp if name == "all_reduce" else None
        for tensor in tensors:
            if tensor.layout is not torch.sparse_coo or op != dist.ReduceOp.SUM:
                raise self._invalid(name, f"a tensor with the layout {tensor.layout} cannot be passed this way")
            size, code = tensor.numel() * tensor.element_size(), dtype_code(tensor.dtype)
            operation = dtypes.DELEGATED + dtypes.operation_code(name)
            self.engine.compare_only(operation, dtypes.reduction_code(op), code, size, -1, timeout_ns)
            self.engine.delegate(self._gloo.allreduce, [tensor], dist.AllreduceOptions())

    def _reduction(self, name: str, tensor: torch.Tensor, op: Any) -> tuple[int, int, complex | None]:
        """Return the core's numbers for reducing ``tensor`` by ``op``, and the factor of this rank's part.

        Raises where the type has no such reduction.
        """
        dtype = tensor.dtype
        code = dtypes.dtype_code(dtype.to_real() if dtype.is_complex else dtype)
        number = dtypes.reduction_code(op)
        if not dtypes.reducible(code, number) or (dtype.is_complex and number not in dtypes.LINEAR):
            raise self._invalid(name, f"{dtypes.REDUCTION_NAMES[number] or op} is not defined on {dtype}")
        factor = self._factor(name, dtype, op) if number == dtypes.PREMUL_SUM else None
        return code | dtypes.COMPLEX * dtype.is_complex, number, factor

    def _factor(self, name: str, dtype: torch.dtype, op: Any) -> complex:
        """Return the factor of a PREMUL_SUM as a number."""
        factor = _torch.premul_factor(op)
        if isinstance(factor, torch.Tensor) and factor.numel() == 1:
            factor = factor.item()
        if not isinstance(factor, (int, float, complex)):
            raise self._invalid(name, f"PREMUL_SUM takes one number as its factor, not {factor}")
        if isinstance(factor, complex) and not dtype.is_complex:
            raise self._invalid(name, f"PREMUL_SUM of {dtype} takes no complex factor")
        return factor

    def _split(self, name: str, tensor: torch.Tensor, splits: Sequence[int] = ()) -> _Tensors:
        """Cut a tensor into a part for each rank, along its first dimension; without ``splits`` into even ones."""
        size, rows = self.size(), tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                unit = "rows" if tensor.dim() > 1 else "elements"
                raise self._invalid(name, f"{rows} {unit} cannot be split evenly among {size} ranks")
            splits = [rows // size] * size
        if sum(splits) != rows or len(splits) != size:
            raise self._invalid(name, f"splits {splits} do not add up to {rows} rows for {size} ranks")
        return list(torch.split(tensor, list(splits)))

    def _same_number(self, name: str, tensors: _Tensors) -> None:
        if len(tensors) != self.size():
            raise self._invalid(name, f"a list of {len(tensors)} tensors in a group of {self.size()}")

    def _same_type(self, name: str, *tensors: torch.Tensor) -> None:
        """Refuse tensors of different types, which torch's functions for single tensors accept."""
        kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        if len(kinds) > 1:
            raise self._invalid(name, f"tensors of different types: {' and '.join(sorted(kinds))}")

    def _invalid(self, name: str, why: str) -> Exception:
        return fail("invalid-argument", f"{name}: {why}", who=f"rank {self.ranks[self._rank]}", fix="see the call")


def _flat(lists: Iterable[_Tensors]) -> list[torch.Tensor]:
    return list(itertools.chain.from_iterable(lists))
