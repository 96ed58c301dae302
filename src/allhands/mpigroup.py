"""A group over MPI: how one is formed, and what is different about it from one over Gloo."""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from . import _torch
from . import session as _session
from .engines import shm
from .engines.mpi.engine import Mpi
from .engines.mpi.world import join
from .processgroup import WideGroup

__all__ = ["MpiGroup", "form"]


class MpiGroup(WideGroup):
    """The collectives of a group over MPI, on one host or several."""

    engine_name = "mpi"
    _core: Mpi  # type: ignore[assignment]  # it has the methods of a Segment

    def short(self, name: str, tensor: Any, given: dict[str, Any]) -> bool:
        """Do an all_reduce or broadcast of a plain tensor for a caller who waits; False, untouched, for any other.

        What torch's functions do on the way here costs as much as moving a hundred kilobytes.
        """
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        code = shm.DTYPES.get(tensor.dtype)
        if code is None or not tensor.is_contiguous() or tensor.is_neg() or self._line.busy or _torch.coalescing():
            return False
        root: Any = -1
        if name == "all_reduce":
            reduction = shm.reduction_code(given.get("op", dist.ReduceOp.SUM))
            if not shm.reducible(code, reduction) or reduction == shm.PREMUL_SUM:
                return False
            run = functools.partial(
                self._call, self._core.all_reduce, tensor.data_ptr(), tensor.nbytes, code, reduction
            )
        else:
            reduction, root = 0, given.get("src", -1) if self._whole else -1
            if type(root) is not int or not 0 <= root < self.size():
                return False
            run = functools.partial(self._call, self._core.broadcast, tensor.data_ptr(), tensor.nbytes, code, root)
        self.session.member.check_process()
        site, shape = _session.call_site(), tuple(tensor.shape)
        kind, words = str(tensor.dtype).removeprefix("torch."), shm.REDUCTION_NAMES[reduction]
        note = self.board.begin(name, self._group_name, kind, words, shape, tensor.nbytes, root, site)
        with self._line.turn:
            told = functools.partial(self._told, name, str(list(shape)), run)
            self._noted(name, site, note, told, self._limit_ns)
        return True

    @property
    def _whole(self) -> bool:
        """Whether ranks have the same numbers here as in the default group."""
        return self.ranks == list(range(self.size()))

    def shutdown(self) -> None:
        """End this rank's part, after what is in line."""
        super().shutdown()
        self._core.leave()


def form(
    store: Store, rank: int, ranks: list[int], name: str, *, gloo: Any, session: _session.Session, timeout: timedelta
) -> MpiGroup:
    """Make this rank's end of a group. Every rank of the group calls this; ends by the timeout or the job's end."""
    deadline = time.monotonic() + timeout.total_seconds()
    check = session.member.check
    everyone = len(ranks) == session.member.world_size
    world = join(
        PrefixStore("mpi/", session.store),
        session.member.rank,
        session.member.world_size,
        one_host=session.one_host,
        deadline=deadline,
        check=check,
        alone=not everyone,
    )
    comm = world.communicator(store, rank, ranks, name, deadline=deadline, check=check)
    engine = Mpi(world, comm, gloo, rank, ranks)
    return MpiGroup(rank, ranks, engine=engine, gloo=gloo, session=session, timeout=timeout)
