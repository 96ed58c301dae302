"""Every rank that is alive gets the memory, whatever other clients of the socket do."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch.distributed as dist

from allhands.engines.shm import engine as shm
from allhands.engines.shm import fd_passing
from allhands.engines.shm.fd_passing import FdPassing, Handover

SOON_S = 20.0
# Linux gives no process a number above this (PID_MAX_LIMIT).
NOBODY = 2**22 + 1


def never() -> None:
    """Check nothing while waiting."""


def create(ranks: int, nonce: bytes) -> int:
    """Create memory."""
    del ranks, nonce
    descriptor = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    return descriptor


@pytest.mark.parametrize("greets", [False, True])
def test_a_client_that_ends_early_delays_no_other_rank(greets: bool) -> None:
    """A rank that connects and ends, before or after its message, keeps the memory from no other rank."""
    store = dist.HashStore()

    def fetch(rank: int, ranks: int) -> Handover:
        descriptor, found = FdPassing(store, rank, ranks, never).share("memory", create, SOON_S)
        os.close(descriptor)
        return found

    def goes() -> None:
        with fd_passing._connect(store.get("memory").decode(), time.monotonic() + SOON_S) as sock:
            if greets:
                sock.send(msgspec.msgpack.encode(fd_passing._Hello(1, fd_passing.pid_namespace())))

    # Only a rank that sent its message counts as connected.
    ranks = 3 if greets else 2
    with ThreadPoolExecutor(2) as both:
        first = both.submit(fetch, 0, ranks)
        goes()
        last = both.submit(fetch, ranks - 1, ranks)
        assert first.result(SOON_S).nonce == last.result(SOON_S).nonce


@pytest.mark.parametrize("claimed", [-1, 0, 2, 10**6])
def test_a_client_that_claims_an_invalid_rank_is_refused(claimed: int) -> None:
    """A rank outside the group, or rank 0, neither breaks the owner nor counts as one of the ranks."""
    store = dist.HashStore()

    def fetch(rank: int) -> Handover:
        descriptor, found = FdPassing(store, rank, 2, never).share("memory", create, SOON_S)
        os.close(descriptor)
        return found

    with ThreadPoolExecutor(2) as both:
        first = both.submit(fetch, 0)
        with fd_passing._connect(store.get("memory").decode(), time.monotonic() + SOON_S) as sock:
            sock.send(msgspec.msgpack.encode(fd_passing._Hello(claimed, fd_passing.pid_namespace())))
            assert sock.recv(1) == b""
        last = both.submit(fetch, 1)
        assert first.result(SOON_S).pids == last.result(SOON_S).pids == [os.getpid()] * 2


def test_a_rank_that_ended_since_it_fetched_the_memory() -> None:
    """A process that ended has no pidfd; the others have."""
    here = fd_passing.pid_namespace()
    found = shm._pidfds(Handover(4096, b"", [os.getpid(), NOBODY, os.getppid()], here), 0)
    try:
        assert found[:2] == (-1, -1)
        assert found[2] > 0
    finally:
        os.close(found[2])
