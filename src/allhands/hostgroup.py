"""A group of ranks on one host, as torch sees it: what it is called, how one of its calls is done, how it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import ProcessGroup

from . import _torch, mismatch
from . import session as _session
from .engines import shm
from .errors import fail
from .work import Done, Line

__all__ = ["HostGroup"]

# How long the end of a group waits for what is still in line.
_END_S = 2.0

_Tensors = Sequence[torch.Tensor]

# torch's annotations of this class have overloads that no Python method can have; torch itself only looks for names.
_Base: Any = ProcessGroup


class HostGroup(_Base):  # type: ignore[misc]
    """What all groups of ranks on one host have in common; `processgroup.Group` adds the collectives."""

    # The core lets Python's signal handlers run while it waits.
    hears_signals = True

    def __init__(
        self, rank: int, ranks: list[int], *, engine: shm.Shm, gloo: Any, session: _session.Session, timeout: timedelta
    ) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = ranks
        self.engine = engine
        self.session = session
        self._rank = rank
        self._core = engine.segment
        self._gloo = gloo
        self._line = Line("allhands-group")
        self._limit_ns = int(timeout.total_seconds() * 1e9)
        # How long the call may take whose turn it is.
        self._within_ns = self._limit_ns
        self._group_name = ""
        self._group_desc = ""
        self._sequence = 0
        self._closed = False
        session.member.on_end(self._end)

    # Point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Send to one rank."""
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Any:
        """Receive from one rank."""
        return self._gloo.recv(tensors, rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Receive from whoever sends first."""
        return self._gloo.recv_anysource(tensors, tag)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for everyone and name who does not come."""
        self._gloo.monitored_barrier(*(() if timeout is None else (timeout,)), wait_all_ranks=wait_all_ranks)

    # About the group ---------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name that torch calls us by."""
        return "allhands"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives."""
        self._group_name = name

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
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the sequence begins at 0 on every rank."""

    def _start_coalescing(self, _: torch.device) -> None:
        """Nothing: calls are done as they come."""

    def _end_coalescing(self, _: torch.device) -> Any:
        return Done([])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a call may take from now on."""
        self._limit_ns = int(timeout.total_seconds() * 1e9)
        self._gloo.set_timeout(timeout)

    def abort(self) -> None:
        """End the group for everyone, now."""
        self._core.end(self._rank)

    def shutdown(self) -> None:
        """End this rank's part, after what is in line."""
        self._closed = True
        self.session.member.off_end(self._end)
        self._line.close(_END_S)
        self._gloo.shutdown()

    # Inside ------------------------------------------------------------------------------------------------

    def _end(self, _: Any) -> None:
        """The coordinator says that the group is over: whoever waits in the segment wakes."""
        self._core.end(self._rank)

    def _do(self, name: str, run: Callable[[], None], tensors: list[torch.Tensor], opts: Any) -> Any:
        # A forked child has the segment too, and would be taken for its parent.
        self.session.member.check_process()
        root = getattr(opts, "rootRank", 0)
        if not 0 <= root < self.size():
            raise self._wrong(name, f"there is no rank {root} in a group of {self.size()}")
        self._sequence += 1
        site = _session.call_site()
        later = bool(getattr(opts, "asyncOp", True))
        # A limit of the call's own; torch has a negative one where the caller gave none.
        own_ns = int(getattr(opts, "timeout", timedelta(0)).total_seconds() * 1e9)
        within_ns = own_ns if own_ns > 0 else self._limit_ns
        noted = functools.partial(self._noted, name, site, run, within_ns)
        if _torch.profiling():
            return _torch.profiled(f"allhands:{name}", lambda: self._line.do(noted, tensors, later=later))
        return self._line.do(noted, tensors, later=later)

    def _noted(self, name: str, site: str, run: Callable[[], None], within_ns: int) -> None:
        before = self.session.enter(name, site)
        self._within_ns = within_ns
        try:
            run()
        except shm.Trouble as trouble:
            raise mismatch.explain(self, trouble, name, site) from None
        finally:
            self.session.leave(before)

    def _call(self, function: Callable[..., int], *args: Any) -> None:
        code = function(*args, self._within_ns)
        if code:
            self.engine.done(code)

    def _reduction(self, name: str, tensor: torch.Tensor, op: Any) -> tuple[int, int]:
        """Return the core's numbers for reducing ``tensor`` by ``op``; raise where it cannot be done."""
        dtype = tensor.dtype
        code = shm.dtype_code(dtype.to_real() if dtype.is_complex else dtype)
        number = shm.reduction_code(op)
        if not shm.reducible(code, number) or (dtype.is_complex and number not in shm.LINEAR):
            raise self._wrong(name, f"{op} is not defined on {dtype}")
        return code, number

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

    def _wrong(self, name: str, why: str) -> Exception:
        return fail("invalid-argument", f"{name}: {why}", who=f"rank {self.ranks[self._rank]}", fix="see the call")
