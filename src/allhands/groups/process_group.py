"""The base of our process groups: how a call runs and fails, how a group ends. `backend` adds the collectives."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from .. import _torch
from ..diagnosis import Diagnosis
from ..engines import dtypes
from ..engines.base import CallMismatch, Engine, EngineFailure, EngineTimeout
from ..errors import AllhandsError, fail
from ..observe import flight_recorder
from . import failure
from . import session as _session
from .cuda_issue import CudaCalls
from .cuda_route import CudaRoute
from .p2p import Messages
from .staging import HOST, dense, when_ready
from .work import CallQueue, Done

__all__ = ["HostGroup", "MultiHostGroup", "Route"]

# How long `shutdown` waits for queued calls.
_END_S = 2.0

# How much longer than a monitored barrier its caller waits: as long as the ranks take to report what they do.
_LATE_US = 500_000

# How many characters of a refusal the other ranks receive, and how many shapes a mismatch shows.
_MAX_REASON, _MAX_SHAPES = 120, 3

_Tensors = Sequence[torch.Tensor]

# torch's annotations of this class have overloads that no Python method can have; torch itself only looks for names.
_Base: Any = ProcessGroup


class Route(NamedTuple):
    """The engine of a call, the device of its tensors, and what issues it if not the call queue."""

    engine: Engine
    device: torch.device = HOST
    cuda: CudaCalls | None = None


@_torch.untraced
class HostGroup(_Base):  # type: ignore[misc]
    """A group whose engine compares calls by itself."""

    # Python's signal handlers run while the core waits.
    runs_signal_handlers = True
    # Its calls have entries in the flight recorder.
    records_calls = True

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        *,
        engine: Engine,
        gloo: Any,
        session: _session.Session,
        timeout: timedelta,
        store: Store | None = None,
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
        # Where ranks share no memory, CUDA tensors go through host memory.
        one_host = engine.capabilities.one_host
        self._cuda = CudaRoute(self, store, timeout.total_seconds()) if one_host and store else None
        self._group_name = ""
        self._group_desc = ""
        session.member.on_end(self._end)

    # Point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Send to one rank."""
        if self.messages is None or not dense(*tensors):
            return self._gloo.send(tensors, rank, tag)
        return self.messages.send(tensors, rank, tag, self._limit_ns)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Receive from one rank."""
        if self.messages is None or not dense(*tensors):
            return self._gloo.recv(tensors, rank, tag)
        return self.messages.recv(tensors, rank, tag, self._limit_ns)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Receive from any rank."""
        if self.messages is None or not dense(*tensors):
            return self._gloo.recv_anysource(tensors, tag)
        return self.messages.recv(tensors, None, tag, self._limit_ns)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, at most ``timeout``, and name the missing ones: the first, or all of them.

        The first rank whose time is up ends the group, and every rank raises the same error.
        """
        limit_ns = self._limit_ns if timeout is None else int(timeout.total_seconds() * 1e9)
        site = _session.call_site()

        def run(_: int) -> None:
            try:
                self.engine.barrier(limit_ns)
            except EngineTimeout:
                raise failure.barrier_timeout(self, limit_ns / 1e9, site, wait_all_ranks=wait_all_ranks) from None

        work = self._do("monitored_barrier", run, [], None)
        # A call queued before it may be what hangs: its own timeout then begins late, the caller's does not.
        work.wait(timedelta(microseconds=limit_ns / 1e3 + _LATE_US))

    # Memory that the ranks share ---------------------------------------------------------------------------

    def window(self, name: str, size: int) -> Any:
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
            raise self._invalid(name, f"ranks asked for different numbers of bytes: {asked}")
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

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description."""
        self._group_desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return it."""
        return self._group_desc

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
        """End the group for everyone, now."""
        self._end(None)

    def shutdown(self) -> None:
        """End this rank's part, after the queued calls."""
        if self._fast_path is not None:
            self._fast_path.fast_path_closed = 1
        self.session.member.off_end(self._end)
        self._calls.close(_END_S)
        if self.messages is not None:
            self.messages.close(_END_S)
        for each in self._cuda.all() if self._cuda is not None else []:
            each.close(_END_S)
        self.engine.close(_END_S)
        self._gloo.shutdown()

    # Inside ------------------------------------------------------------------------------------------------

    def _end(self, _: Any) -> None:
        """The group is over: end every wait of its engines."""
        self.engine.abort(self._rank)
        for each in self._cuda.all() if self._cuda is not None else []:
            each.release()

    def compare_only(self, operation: int) -> None:
        """Wait until all ranks have stated ``operation``, which is no collective; raise where one made another call."""
        self._do("compare_only", functools.partial(self.engine.compare_only, operation, 0, 0, 0, -1), [], None).wait()

    def _route(self, tensors: _Tensors) -> Route:
        """Return the route of a call with ``tensors``."""
        if self._cuda is None:
            return self._host_route
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        cuda = self._cuda.find(device) if device is not None else None
        return Route(cuda.engine, cuda.device, cuda) if cuda is not None else self._host_route

    def _do(
        self,
        name: str,
        run: Callable[[int], None],
        tensors: list[torch.Tensor],
        opts: Any,
        route: Route | None = None,
    ) -> Any:
        # A forked child maps the segment too, and would act as its parent.
        self.session.member.check_process()
        root = getattr(opts, "rootRank", 0)
        if not 0 <= root < self.size():
            raise self._invalid(name, f"there is no rank {root} in a group of {self.size()}")
        cuda = route.cuda if route is not None else None
        if cuda is None:
            run = when_ready(run, tensors)
        site = _session.call_site()
        later = bool(getattr(opts, "asyncOp", True))
        # The call's own timeout; torch passes a negative one where the caller gave none.
        own_ns = int(getattr(opts, "timeout", timedelta(0)).total_seconds() * 1e9)
        within_ns = own_ns if own_ns > 0 else self._limit_ns
        entry = self._begin_entry(name, tensors, opts, site)
        if cuda is not None:
            return cuda.issue(name, functools.partial(run, within_ns), tensors, site, within_ns, entry)
        run_call = functools.partial(self._run_call, name, site, entry, run, within_ns)
        if _torch.profiling():
            # Ends with this function, not with the Work: the profiler has hung where another thread ended an event.
            with torch.profiler.record_function(f"allhands:{name}"):
                return self._calls.submit(run_call, tensors, later=later)
        return self._calls.submit(run_call, tensors, later=later)

    def _begin_entry(self, name: str, tensors: list[torch.Tensor], opts: Any, site: str) -> int:
        """Begin the call's entry in the flight recorder."""
        reduction = dtypes.REDUCTION_NAMES[dtypes.reduction_code(opts.reduceOp)] if hasattr(opts, "reduceOp") else ""
        shape = tuple(tensors[0].shape) if tensors else ()
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        root = getattr(opts, "rootRank", -1)
        return self.recorder.begin(name, self._group_name, dtype, reduction, shape, size, root, site)

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

    def _sparse(self, name: str, tensors: list[torch.Tensor], opts: Any, *, can: bool = False) -> Any:
        """Reduce sparse tensors to all ranks by Gloo, after comparing the calls.

        No other operation takes them: without ``can`` the call is refused.
        """

        def run(timeout_ns: int) -> None:
            for tensor in tensors:
                op = opts.reduceOp if can else None
                if tensor.layout is not torch.sparse_coo or op != dist.ReduceOp.SUM:
                    raise self._invalid(name, f"a tensor with the layout {tensor.layout} cannot be passed this way")
                size, code = tensor.numel() * tensor.element_size(), dtypes.dtype_code(tensor.dtype)
                operation = dtypes.DELEGATED + dtypes.operation_code(name)
                self.engine.compare_only(operation, dtypes.reduction_code(op), code, size, -1, timeout_ns)
                self.engine.delegate(self._gloo.allreduce, [tensor], dist.AllreduceOptions())

        return self._do(name, run, tensors, opts)

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

    def _equal_parts(self, tensor: torch.Tensor) -> _Tensors:
        """Cut a contiguous tensor into one part for each rank."""
        each, rest = divmod(tensor.numel(), self.size())
        if rest:
            raise self._invalid(
                "this call", f"{tensor.numel()} elements cannot be split evenly among {self.size()} ranks"
            )
        return list(torch.split(tensor.view(-1), each)) if each else [tensor.view(-1)] * self.size()

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


class MultiHostGroup(HostGroup):
    """A group whose engine compares calls by records, with shapes and lines, and may fail in the middle of one."""

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks and name all missing ones, also without ``wait_all_ranks``."""
        del wait_all_ranks
        limit_ns = self._limit_ns if timeout is None else int(timeout.total_seconds() * 1e9)

        def run(_: int) -> None:
            self.engine.barrier(limit_ns)

        self._do("monitored_barrier", run, [], None).wait()

    def abort(self) -> None:
        """End the group on all ranks, now, and with it the default group."""
        who = f"rank {self.session.member.rank} ({socket.gethostname()}, pid {os.getpid()})"
        self.session.member.end_group(
            Diagnosis(
                "peer-lost",
                f"rank {self.session.member.rank} ended the group",
                who=who,
                why="it called abort()",
                fix="look at the end of its output for the reason",
                ranks=(self.session.member.rank,),
                hosts=(socket.gethostname(),),
            )
        )

    def window(self, name: str, size: int) -> None:
        """Return None: hosts share no memory."""
        del name, size

    # Inside ------------------------------------------------------------------------------------------------

    def _do(
        self,
        name: str,
        run: Callable[[int], None],
        tensors: list[torch.Tensor],
        opts: Any,
        route: Route | None = None,
    ) -> Any:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:_MAX_SHAPES])
        shapes += f" and {len(tensors) - _MAX_SHAPES} more" * (len(tensors) > _MAX_SHAPES)
        compared = functools.partial(self._run_compared, name, shapes, run)
        return super()._do(name, compared, tensors, opts, route)

    def _run_call(self, name: str, site: str, entry: int, run: Callable[[int], None], within_ns: int) -> None:
        self.engine.site = site
        super()._run_call(name, site, entry, run, within_ns)

    # The exception that ended a call, with the frames that hold its tensors: Gloo may still write to them.
    _kept: BaseException | None = None

    def _run_compared(self, name: str, shapes: str, run: Callable[[int], None], timeout_ns: int) -> None:
        """Run ``run``, whose engine sends shape and line of the call; raise the diagnosis of its failure."""
        self.session.member.check()
        self.engine.shape, site = shapes, self.engine.site
        try:
            self._run_or_refuse(name, run, timeout_ns)
        except CallMismatch as mismatch:
            raise failure.of_group(self, mismatch, name, site) from None
        except Exception as problem:
            if not self.engine.in_call:
                raise  # All ranks refused alike and are still in step.
            self._kept = problem
            explained = failure.explain(self.session, problem, name, site, self)
            if explained is None:
                failure.announce(self.session, problem)
                raise
            raise explained from (problem if explained.slug == "engine-failed" else None)
        except BaseException as problem:
            # A signal handler raised in the middle of the call.
            self._kept = problem
            failure.announce(self.session, problem)
            raise

    def _run_or_refuse(self, name: str, run: Callable[[int], None], timeout_ns: int) -> None:
        """Run ``run``. Where the call cannot begin here, report that to the other ranks, which would wait otherwise."""
        try:
            run(timeout_ns)
        except Exception as problem:
            if not self.engine.in_call:
                reason = problem.diagnosis.what if isinstance(problem, AllhandsError) else str(problem)
                self.engine.refuse(
                    name, (reason.splitlines() or [type(problem).__name__])[0][:_MAX_REASON], self._limit_ns
                )
            raise
