"""Where to meet, from what the user wrote: the URL of `init_method`, a store, or nothing."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from urllib.parse import parse_qs, unquote, urlsplit

from torch.distributed.distributed_c10d import Store

from .._torch import TCPStore, rendezvous
from ..control.connect import connect_tcp
from ..control.rendezvous import FileRendezvous, Rendezvous
from ..environments.identify import identify
from ..environments.world import Address, World
from ..errors import WorldError, fail
from .store import StoreRendezvous

__all__ = ["bootstrap"]


def bootstrap(
    init_method: str | None, store: Store | None, *, rank: int, world_size: int, generation: int, deadline: float
) -> tuple[World, Rendezvous | None, WorldError | None]:
    """Return who this process is, where ranks meet (None: an address or this host), and what is wrong with this rank.

    Raises for arguments that make no sense. ``generation`` counts the groups of this process, so that the next one does
    not find the last one's notice.
    """
    if store is not None and init_method is not None:
        raise fail(
            "invalid-argument",
            "init_process_group got both init_method= and store=",
            who=f"rank {rank}",
            why="each of them says where ranks meet",
            fix="pass one of them",
        )
    method = init_method or "env://"
    url = urlsplit(method)
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    rank = _number("rank", rank, query)
    world_size = _number("world_size", world_size, query)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    address: Address | None = None
    board: Rendezvous | None = None
    match url.scheme:
        case "env":
            pass
        case "tcp":
            try:
                host, port = url.hostname, url.port
            except ValueError:
                raise _bad_url(method, "a port is a number from 1 to 65535") from None
            if not host or not port:
                raise _bad_url(method, "it needs a host and a port: tcp://HOST:PORT")
            address = Address(host, port)
        case "file":
            path = unquote(url.netloc + url.path)
            if not path:
                raise _bad_url(method, "it needs a path: file:///path/to/file")
            board = FileRendezvous(path)
        case _:
            # A rendezvous handler that someone registered with torch.
            try:
                store, rank, world_size = next(rendezvous(method, rank, world_size, timeout=left))
            except RuntimeError as problem:
                if "No rendezvous handler" not in str(problem):
                    raise
                raise _bad_url(method, "torch knows no such scheme either") from problem
    world, trouble = _who(rank, world_size, address)
    if store is None and url.scheme == "env" and world.agent_store:
        store = _agent_store(world, deadline, left)
    if store is not None:
        board = StoreRendezvous(store, f"allhands/{generation}/coordinator/{world.job}")
    return world, board, trouble


def _number(name: str, given: int, query: dict[str, str]) -> int:
    """Return the argument, or the number in the URL (`tcp://…?rank=0`), as torch reads it."""
    if given != -1 or name not in query:
        return given
    try:
        return int(query[name])
    except ValueError:
        raise _bad_url(f"{name}={query[name]}", f"{name} is not a number") from None


def _bad_url(method: str, why: str) -> Exception:
    return fail(
        "invalid-argument",
        f"init_method={method!r} is not a place to meet",
        who="this process",
        why=why,
        fix="use env://, tcp://HOST:PORT, file:///PATH, or nothing on one host",
    )


def _who(rank: int, world_size: int, coordinator: Address | None) -> tuple[World, WorldError | None]:
    if world_size == 0:
        raise fail("invalid-argument", "world_size=0 makes no group", who=f"rank {rank}", fix="pass at least 1")
    own_rank = None if rank == -1 else rank
    own_size = None if world_size == -1 else world_size
    try:
        return identify(rank=own_rank, world_size=own_size, coordinator=coordinator), None
    except WorldError as problem:
        if problem.slug != "rank-out-of-range" or not problem.ranks:
            raise
        # The others wait for this rank, so it takes part: the roll call refuses it by name on every rank.
        world = identify(rank=0, world_size=own_size, coordinator=coordinator)
        return world._replace(rank=problem.ranks[0]), problem


def _agent_store(world: World, deadline: float, left: timedelta) -> Store:
    """Connect to the store of torchrun's agent, which already holds MASTER_PORT."""
    address = world.coordinator
    if address is None:
        raise fail(
            "incomplete-environment",
            "torchrun's agent has a store, but MASTER_ADDR and MASTER_PORT do not say where",
            who=f"rank {world.rank}",
            fix="start the script with torchrun, and leave MASTER_ADDR and MASTER_PORT alone in it",
        )
    # The errors of torch's own client do not have the reason why it cannot connect.
    connect_tcp(address, deadline, who=f"rank {world.rank} (pid {os.getpid()})", late_names=world.late_names).close()
    store: Store = TCPStore(address.host, address.port, is_master=False, timeout=left, wait_for_workers=False)
    return store
