"""How a group of the backend `allhands` is made: its store, its engine, and the roll call where torch has held none."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from .. import _torch
from ..engines.base import Engine
from ..engines.gloo.engine import GlooEngine
from ..engines.hierarchical import engine as hierarchical
from ..engines.mpi import library as mpi
from ..engines.mpi.engine import MpiEngine
from ..engines.shm import engine as shm
from ..engines.shm.fd_passing import Apart
from . import engine_choice, lifecycle
from . import session as _session
from .process_group import Group

__all__ = ["create"]


def create(options: Any, pg_options: Any) -> Any:
    """Make one group; torch calls this through `registration`.

    Inside `allhands.init_process_group` the roll call has been held. Where torch's own
    `init_process_group("allhands")` was called it is held here, and the ranks meet by torch's store. ``pg_options`` is
    the name of an engine of ours, or whatever torch's function was given.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    session = _session.current()
    if not options.global_ranks_in_group and (session is None or session.formed):
        # torch forms a default group by itself. A session that is left over belongs to one that it destroyed.
        lifecycle.end(wait_s=0.0)
        session = lifecycle.attend(store, rank, size, options.timeout)
        store = session.store
    elif options.global_ranks_in_group and session is not None:
        # torch's own store where torch formed the default group; on ours, connections can be closed.
        store = PrefixStore(f"{options.group_id}/", session.store)
    gloo = _torch.gloo(store, rank, size, options.timeout)
    if session is None:
        return gloo
    ranks = list(options.global_ranks_in_group) or list(range(size))
    engine_name = engine_choice.chosen(store, rank, pg_options if isinstance(pg_options, str) else "")
    engine = _engine(
        engine_name, store, gloo, rank, ranks, group=options.group_id, session=session, timeout=options.timeout
    )
    return Group(rank, ranks, engine=engine, gloo=gloo, session=session, timeout=options.timeout, store=store)


def _engine(  # what a group is
    name: str,
    store: Store,
    gloo: Any,
    rank: int,
    ranks: list[int],
    *,
    group: str,
    session: _session.Session,
    timeout: timedelta,
) -> Engine:
    """Make the engine that fits the ranks of a group, Gloo's where that is ``name``; each of them calls this."""
    size, check = len(ranks), session.member.check
    if name == "mpi":
        deadline = time.monotonic() + timeout.total_seconds()
        world = mpi.join(
            session.member.rank,
            session.member.world_size,
            subset=size < session.member.world_size,
            deadline=deadline,
            check=check,
        )
        comm = world.communicator(store, rank, ranks, group, deadline=deadline, check=check)
        return MpiEngine(world, comm, gloo, rank, ranks)
    if name == "gloo" or (session.one_host and size > shm.MAX_RANKS):
        return GlooEngine(gloo, rank, ranks)
    if session.one_host:
        # Ranks of one machine that cannot share memory (containers) count as ranks of different hosts.
        with suppress(Apart):
            return shm.form(store, rank, size, timeout.total_seconds(), check)
    address = session.connections.address or session.own_address
    return hierarchical.form(store, gloo, rank, ranks, address=address, timeout_s=timeout.total_seconds(), check=check)
