"""How a group of the backend `allhands` is made: its store, its engine, and the roll call where torch has held none."""

from __future__ import annotations

import time
from contextlib import suppress
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
    engine = _engine(options, pg_options, session, store, gloo, ranks)
    return Group(rank, ranks, engine=engine, gloo=gloo, session=session, timeout=options.timeout, store=store)


def _engine(  # noqa: PLR0917  # what a group is
    options: Any, pg_options: Any, session: _session.Session, store: Store, gloo: Any, ranks: list[int]
) -> Engine:
    """Make the engine that was asked for, else the one that fits the ranks of the group. Each of them calls this."""
    rank, size, member, timeout_s = options.group_rank, len(ranks), session.member, options.timeout.total_seconds()
    check, world_size = member.check, member.world_size
    name = engine_choice.chosen(store, rank, pg_options if isinstance(pg_options, str) else "")
    if name == "mpi":
        deadline = time.monotonic() + timeout_s
        world = mpi.join(member.rank, world_size, subset=size < world_size, deadline=deadline, check=check)
        comm = world.communicator(store, rank, ranks, options.group_id, deadline=deadline, check=check)
        return MpiEngine(world, comm, gloo, rank, ranks)
    if name == "gloo" or (session.one_host and size > shm.MAX_RANKS):
        return GlooEngine(gloo, rank, ranks)
    if session.one_host:
        # Ranks of one machine that cannot share memory (containers) count as ranks of different hosts.
        with suppress(Apart):
            return shm.form(store, rank, size, timeout_s, check)
    address = session.connections.address or session.own_address
    return hierarchical.form(store, gloo, rank, ranks, address=address, timeout_s=timeout_s, check=check)
