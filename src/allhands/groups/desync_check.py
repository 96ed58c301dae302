"""Compare the calls of torch's own groups (`gloo`, `nccl`) between the ranks of one host, before data moves.

Those engines abort, hang or return wrong data where ranks make different calls. Each rank writes a fingerprint of its
next call into shared memory and reads those of the others (`engines.fingerprint`). Calls made by torch's own functions
are not seen, only counted by the group: after one of them nobody knows which calls belong together, and the comparison
stops for good, since a false alarm is worse than none. Groups that span hosts are not compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch
from ..engines.base import CallMismatch
from ..engines.dtypes import dtype_code, operation_code, reduction_code
from ..engines.fingerprint import Call, CallRing
from ..engines.shm.engine import MAX_RANKS
from ..engines.shm.fd_passing import FdPassing
from . import arguments, failure
from .arguments import TABLE
from .process_group import Group
from .session import Session

__all__ = ["DesyncCheck", "start"]


# Calls that are not compared: messages concern two ranks, and torch's own groups refuse the third.
_NOT_COMPARED = frozenset({"send", "recv", "all_reduce_coalesced"})


class DesyncCheck:
    """The calls of one group: what this rank called, and whether the others called the same."""

    def __init__(self, group: Any, session: Session, ring: CallRing, counters: list[Callable[[], int]]) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.session = session
        self._ring = ring
        self._counters = counters
        # Gloo refuses parts of different sizes; others send them one by one.
        self._even = dist.get_backend(group) == dist.Backend.GLOO
        self._stopped = False
        self._compared = 0
        # Operations of the group that were made through allhands, as the group counts them.
        self._ours = 0
        self._lock = threading.Lock()
        self._inside: set[int] = set()

    def before(self, name: str, args: tuple[Any, ...], kw: dict[str, Any], site: str) -> tuple[int, bool]:
        """Compare a call, and return what `after` takes; raise CollectiveMismatch where another rank's differs."""
        thread = threading.get_ident()
        with self._lock:
            count = self._count()
            if count != self._ours or self._inside - {thread}:
                # Calls past allhands, or of two threads at a time: their order is unknown.
                self._stopped = True
            self._inside.add(thread)
            if self._stopped or name not in TABLE or name in _NOT_COMPARED:
                return count, False
            call = self._call(name, arguments.given(name, args, kw), site)
            self._compared += 1
            judgement = self._ring.compare(call)
        if judgement is not None:
            raise failure.of_group(self, CallMismatch(judgement), name, site)
        return count, True

    def after(self, began: tuple[int, bool], *, well: bool) -> None:
        """Read how many operations the group counted since `before` returned ``began``."""
        count, compared = began
        with self._lock:
            self._inside.discard(threading.get_ident())
            more = self._count() - count
            self._ours += more
            if compared and more != 1:
                # A call past allhands came between; or this one was refused before it began.
                self._stopped = self._stopped or more > 1 or not well

    def _count(self) -> int:
        return sum(count() for count in self._counters)

    def _call(self, name: str, given: dict[str, Any], site: str) -> Call:
        function = TABLE[name]
        op = given.get("op") or dist.ReduceOp.SUM
        known: dict[str, Any] = {"reduction": reduction_code(op) if "op" in given else 0, "root": self._root(given)}
        tensor = given.get(function.compared)
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            uneven = not self._even and _uneven(given.get(function.parts))
            known |= {"nbytes": 0 if uneven else tensor.nbytes, "uneven": uneven}
            known |= {"dtype": dtype_code(tensor.dtype), "shape": str(list(tensor.shape))}
        return Call(self._compared, operation_code(function.operation), site=site, **known)

    def _root(self, given: dict[str, Any]) -> int:
        """Return the root as a rank of the job, however it was given; -1 for none."""
        # Of `src` and `dst` a function has one.
        peer = "src" if "src" in given else "dst"
        if peer not in given:
            return -1
        if isinstance(given[peer], int):
            return int(given[peer])
        inside = given[f"group_{peer}"]
        return self.ranks[inside] if isinstance(inside, int) and 0 <= inside < len(self.ranks) else 0


def _uneven(parts: Any) -> bool:
    """Return whether ``parts`` are tensors of different sizes."""
    return (
        isinstance(parts, list | tuple) and len({part.numel() for part in parts if isinstance(part, torch.Tensor)}) > 1
    )


def start(session: Session, group: Any) -> None:
    """Begin to compare the calls of ``group`` where it is torch's own, on one host. Each of its ranks calls this."""
    ranks = dist.get_process_group_ranks(group)
    if isinstance(group, Group) or not session.one_host or not 2 <= len(ranks) <= MAX_RANKS:
        return
    try:
        counters = _torch.counters(group)
    except RuntimeError:
        return  # Some kinds of group do not count, on any rank.
    fd_passing = FdPassing(session.store, group.rank(), len(ranks), session.member.check)
    ring = CallRing(fd_passing, f"calls/{group.group_name}", group.rank(), ranks, session.timeout.total_seconds())
    session.desync_checks[group] = DesyncCheck(group, session, ring, counters)
