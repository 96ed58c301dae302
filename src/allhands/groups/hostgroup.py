"""A group of ranks on one host, as torch sees it: what it is called, how one of its calls is done, how it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from .. import _torch
from ..engines import dtypes
from ..engines.base import Engine, EngineFailure, EngineTimeout
from ..errors import fail
from ..observe import flight_recorder
from . import failure
from . import session as _session
from .cuda_issue import Streamed
from .cuda_route import Cards
from .p2p import Mail
from .staging import HOST, dense, when_ready
from .work import Done, Line

__all__ = ["HostGroup", "Via"]

# How long the end of a group waits for what is still in line.
_END_S = 2.0

# How much longer than a monitored barrier its caller waits for the words: as long as asking everyone takes.
_LATE_US = 500_000

_Tensors = Sequence[torch.Tensor]

# torch's annotations of this class have overloads that no Python method can have; torch itself only looks for names.
_Base: Any = ProcessGroup


class Via(NamedTuple):
    """The route of a call: the engine, the device of its tensors, and what issues it if not the call queue."""

    engine: Engine
    device: torch.device = HOST
    streamed: Streamed | None = None


@_torch.untraced
class HostGroup(_Base):  # type: ignore[misc]
    """What all groups of ranks on one host have in common; `processgroup.Group` adds the collectives."""

    # The core lets Python's signal handlers run while it waits.
    hears_signals = True
    # Its calls stand on the board with all that is known of them.
    writes_notes = True

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
        self.segment = self._gate = engine.fast_path
        self.board = flight_recorder.own()
        self._gloo = gloo
        self._line = Line("allhands-group", self._gate)
        self.mail = Mail(self) if engine.capabilities.p2p else None
        self._limit_ns = int(timeout.total_seconds() * 1e9)
        self._host = Via(engine)
        # Where ranks share no memory, tensors of a GPU go through that of the host.
        one_host = engine.capabilities.one_host
        self._cards = Cards(self, store, timeout.total_seconds()) if one_host and store else None
        self._group_name = ""
        self._group_desc = ""
        session.member.on_end(self._end)

    # Point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Send to one rank."""
        if self.mail is None or not dense(*tensors):
            return self._gloo.send(tensors, rank, tag)
        return self.mail.send(tensors, rank, tag, self._limit_ns)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Receive from one rank."""
        if self.mail is None or not dense(*tensors):
            return self._gloo.recv(tensors, rank, tag)
        return self.mail.recv(tensors, rank, tag, self._limit_ns)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Receive from whoever sends first."""
        if self.mail is None or not dense(*tensors):
            return self._gloo.recv_anysource(tensors, tag)
        return self.mail.recv(tensors, None, tag, self._limit_ns)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for everyone, at most ``timeout``, and name who did not come: the first, or all of them.

        Whoever's time is up first ends the group, and every rank raises the same words.
        """
        limit_ns = self._limit_ns if timeout is None else int(timeout.total_seconds() * 1e9)
        site = _session.call_site()

        def run(_: int) -> None:
            try:
                self.engine.barrier(limit_ns)
            except EngineTimeout:
                raise failure.barrier_timeout(self, limit_ns / 1e9, site, wait_all_ranks=wait_all_ranks) from None

        work = self._do("monitored_barrier", run, [], None)
        # What is in line before it may be what hangs. Its own limit then begins late; the caller's does not.
        work.wait(timedelta(microseconds=limit_ns / 1e3 + _LATE_US))

    # Memory that the ranks share ---------------------------------------------------------------------------

    def window(self, name: str, size: int) -> Any:
        """Make memory of ``size`` bytes for each rank, None for none. Every rank of the group calls this."""
        self.session.member.check_process()
        sizes = torch.zeros(self.size(), 1, dtype=torch.int64)
        mine = torch.tensor([size])
        opts = _torch.AllgatherOptions()
        opts.asyncOp = False
        self.allgather([list(sizes)], [mine], opts)
        wanted = [int(each) for each in sizes]
        if len(set(wanted)) > 1:
            told = ", ".join(f"rank {rank} {each}" for rank, each in list(zip(self.ranks, wanted, strict=True))[:16])
            raise self._wrong(name, f"ranks asked for different numbers of bytes: {told}")
        return self.engine.window(size, self._limit_ns / 1e9) if size else None

    # About the group ---------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name that torch calls us by."""
        return "allhands"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives."""
        self._group_name = name
        self._introduce()

    def getGroupName(self) -> str:  # noqa: N802
        """Return it."""
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Take the description that torch gives."""
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
        """Nothing: the sequence begins at 0 on every rank."""

    def _start_coalescing(self, _: torch.device) -> None:
        """Nothing: calls are done as they come."""

    def _end_coalescing(self, _: torch.device) -> Any:
        return Done([])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take from now on."""
        self._limit_ns = int(timeout.total_seconds() * 1e9)
        self._introduce()
        self._gloo.set_timeout(timeout)

    def abort(self) -> None:
        """End the group for everyone, now."""
        self._end(None)

    def shutdown(self) -> None:
        """End this rank's part, after what is in line."""
        if self._gate is not None:
            self._gate.fast_path_closed = 1
        self.session.member.off_end(self._end)
        self._line.close(_END_S)
        if self.mail is not None:
            self.mail.close(_END_S)
        for each in self._cards.all() if self._cards is not None else []:
            each.close(_END_S)
        self.engine.close(_END_S)
        self._gloo.shutdown()

    # Inside ------------------------------------------------------------------------------------------------

    def _end(self, _: Any) -> None:
        """The group is over: end every wait of its engines."""
        self.engine.abort(self._rank)
        for each in self._cards.all() if self._cards is not None else []:
            each.release()

    def agree(self, kind: int) -> None:
        """Meet everyone at something that is no collective, by the number that it has in the segment."""
        self._do("agree", functools.partial(self.engine.compare_only, kind, 0, 0, 0, -1), [], None).wait()

    def _via(self, tensors: _Tensors) -> Via:
        """Return which way a call with ``tensors`` goes."""
        if self._cards is None:
            return self._host
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        streamed = self._cards.find(device) if device is not None else None
        return Via(streamed.engine, streamed.device, streamed) if streamed is not None else self._host

    def _do(
        self,
        name: str,
        run: Callable[[int], None],
        tensors: list[torch.Tensor],
        opts: Any,
        via: Via | None = None,
    ) -> Any:
        # A forked child has the segment too, and would be taken for its parent.
        self.session.member.check_process()
        root = getattr(opts, "rootRank", 0)
        if not 0 <= root < self.size():
            raise self._wrong(name, f"there is no rank {root} in a group of {self.size()}")
        streamed = via.streamed if via is not None else None
        if streamed is None:
            run = when_ready(run, tensors)
        site = _session.call_site()
        later = bool(getattr(opts, "asyncOp", True))
        # A limit of the call's own; torch has a negative one where the caller gave none.
        own_ns = int(getattr(opts, "timeout", timedelta(0)).total_seconds() * 1e9)
        within_ns = own_ns if own_ns > 0 else self._limit_ns
        number = self._note(name, tensors, opts, site)
        if streamed is not None:
            return streamed.issue(name, functools.partial(run, within_ns), tensors, site, within_ns, number)
        noted = functools.partial(self._noted, name, site, number, run, within_ns)
        if _torch.profiling():
            # Ends with this call, not with the work: the profiler was seen to hang where another thread ends an event.
            with torch.profiler.record_function(f"allhands:{name}"):
                return self._line.do(noted, tensors, later=later)
        return self._line.do(noted, tensors, later=later)

    def _note(self, name: str, tensors: list[torch.Tensor], opts: Any, site: str) -> int:
        """Put an operation on the board, where it waits for its turn."""
        reduction = dtypes.REDUCTION_NAMES[dtypes.reduction_code(opts.reduceOp)] if hasattr(opts, "reduceOp") else ""
        shape = tuple(tensors[0].shape) if tensors else ()
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        root = getattr(opts, "rootRank", -1)
        return self.board.begin(name, self._group_name, dtype, reduction, shape, size, root, site)

    def _noted(self, name: str, site: str, number: int, run: Callable[[int], None], within_ns: int) -> None:
        before = self.session.enter(name, site)
        self.board.run(number, self.engine.sequence())
        well = False
        try:
            run(within_ns)
            well = True
        except EngineFailure as problem:
            raise failure.of_group(self, problem, name, site) from None
        finally:
            self.board.end(number, well)
            self.session.leave(before)

    def failed(self, code: int, culprit: int, call: tuple[str, str, float], peer: int) -> None:
        """Raise what became of a call on the short way: its name, its place and its beginning. The core calls this.

        A ``peer`` of -1 is everyone.
        """
        before = self.session.enter(*call)
        name, site, _ = call
        peers = None if peer < 0 else [self.ranks[peer]]
        try:
            raise failure.of_group(self, self.engine.failure(code, culprit), name, site, peers)
        finally:
            self.session.leave(before)

    def _introduce(self) -> None:
        if self._gate is not None:
            same = self.ranks == list(range(self.size()))
            self._gate.configure_fast_path(
                self._limit_ns, self._group_name, None if same else tuple(self.ranks), self.board
            )

    def _sparse(self, name: str, tensors: list[torch.Tensor], opts: Any, *, can: bool = False) -> Any:
        """Reduce sparse tensors to everyone with Gloo, in their turn and after comparing the calls.

        Nothing else can be done with them: without ``can`` the call is refused.
        """

        def run(timeout_ns: int) -> None:
            for tensor in tensors:
                op = opts.reduceOp if can else None
                if tensor.layout is not torch.sparse_coo or op != dist.ReduceOp.SUM:
                    raise self._wrong(name, f"a tensor with the layout {tensor.layout} cannot be passed this way")
                size, code = tensor.numel() * tensor.element_size(), dtypes.dtype_code(tensor.dtype)
                operation = dtypes.DELEGATED + dtypes.operation_code(name)
                self.engine.compare_only(operation, dtypes.reduction_code(op), code, size, -1, timeout_ns)
                self.engine.delegate(self._gloo.allreduce, [tensor], dist.AllreduceOptions())

        return self._do(name, run, tensors, opts)

    def _reduction(self, name: str, tensor: torch.Tensor, op: Any) -> tuple[int, int, complex | None]:
        """Return the core's numbers for reducing ``tensor`` by ``op``, and what to multiply this rank's part by.

        Raises where it cannot be done.
        """
        dtype = tensor.dtype
        code = dtypes.dtype_code(dtype.to_real() if dtype.is_complex else dtype)
        number = dtypes.reduction_code(op)
        if not dtypes.reducible(code, number) or (dtype.is_complex and number not in dtypes.LINEAR):
            raise self._wrong(name, f"{dtypes.REDUCTION_NAMES[number] or op} is not defined on {dtype}")
        factor = self._factor(name, dtype, op) if number == dtypes.PREMUL_SUM else None
        return code | dtypes.COMPLEX * dtype.is_complex, number, factor

    def _factor(self, name: str, dtype: torch.dtype, op: Any) -> complex:
        """Return the factor of a PREMUL_SUM as a number."""
        factor = _torch.premul_factor(op)
        if isinstance(factor, torch.Tensor) and factor.numel() == 1:
            factor = factor.item()
        if not isinstance(factor, (int, float, complex)):
            raise self._wrong(name, f"PREMUL_SUM takes one number as its factor, not {factor}")
        if isinstance(factor, complex) and not dtype.is_complex:
            raise self._wrong(name, f"PREMUL_SUM of {dtype} takes no complex factor")
        return factor

    def _equal_parts(self, tensor: torch.Tensor) -> _Tensors:
        """Cut a contiguous tensor into one part for each rank."""
        each, rest = divmod(tensor.numel(), self.size())
        if rest:
            raise self._wrong(
                "this call", f"{tensor.numel()} elements cannot be split evenly among {self.size()} ranks"
            )
        return list(torch.split(tensor.view(-1), each)) if each else [tensor.view(-1)] * self.size()

    def _same_number(self, name: str, tensors: _Tensors) -> None:
        if len(tensors) != self.size():
            raise self._wrong(name, f"a list of {len(tensors)} tensors in a group of {self.size()}")

    def _same_type(self, name: str, *tensors: torch.Tensor) -> None:
        """Refuse what torch's functions for single tensors let through: bytes of one type taken for another's."""
        kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        if len(kinds) > 1:
            raise self._wrong(name, f"tensors of different types: {' and '.join(sorted(kinds))}")

    def _wrong(self, name: str, why: str) -> Exception:
        return fail("invalid-argument", f"{name}: {why}", who=f"rank {self.ranks[self._rank]}", fix="see the call")
