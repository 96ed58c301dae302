"""A group over MPI: how one is formed, and what is different about it from one over Gloo."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..engines.mpi import wall
from ..engines.mpi.engine import Mpi
from ..engines.mpi.world import join
from . import failure
from . import session as _session
from .backend import WideGroup

__all__ = ["MpiGroup", "form"]


class MpiGroup(WideGroup):
    """The collectives of a group over MPI, on one host or several."""

    engine_name = "mpi"
    engine: Mpi

    def failed(self, code: int, culprit: int, call: tuple[str, str, float], peer: int) -> None:
        """Raise what became of a call on the short way; the core calls this."""
        del culprit, peer
        before = self.session.enter(*call)
        name, site, _ = call
        self.engine.site = site
        try:
            self._told(name, "", lambda _: self.engine.judge(code), 0)
        finally:
            self.session.leave(before)

    def interrupted(self, problem: BaseException) -> None:
        """Tell the others that a signal's handler raised here in the middle of a call; the core calls this."""
        self.engine.judge(0)
        failure.announce(self.session, problem)


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
    with _wall(store, rank, ranks, session, deadline) as descriptor:
        engine = Mpi(world, comm, gloo, rank, ranks, descriptor)
    return MpiGroup(rank, ranks, engine=engine, gloo=gloo, session=session, timeout=timeout)


def _wall(
    store: Store, rank: int, ranks: list[int], session: _session.Session, deadline: float
) -> AbstractContextManager[int]:
    if not session.one_host or len(ranks) == 1:
        return nullcontext(-1)
    return wall.fetch(store, rank, len(ranks), deadline - time.monotonic(), session.member.check)
