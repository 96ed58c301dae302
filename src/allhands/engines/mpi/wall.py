"""The wall of a group over MPI: where its ranks, all on one host, pin up what they call.

Telling each other by MPI costs a message for each pair of ranks and call; memory that they share costs less than a
microsecond. What is called is compared either way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from ... import _core
from ..shm.fd_passing import Apart, FdPassing, allocate

__all__ = ["fetch"]


@contextmanager
def fetch(store: Store, rank: int, ranks: int, timeout_s: float, check: Callable[[], None]) -> Iterator[int]:
    """Make the wall or fetch it, and yield its descriptor for a while; -1 where the ranks cannot share memory.

    Every rank of the group calls this; ends by the timeout. ``check`` raises where the group is over.
    """
    try:
        descriptor, _ = FdPassing(store, rank, ranks, check).share("wall", _new_wall, timeout_s)
    except Apart:
        yield -1
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _new_wall(ranks: int, _: bytes) -> tuple[int, int]:
    size = _core.wall_bytes(ranks)
    return allocate("allhands-wall", size, f"what {ranks} ranks over MPI call"), size
