"""Memory is handed to whoever is there, though another rank ends at any moment of it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch.distributed as dist

from allhands.engines.shm import engine as shm
from allhands.engines.shm import fd_passing
from allhands.engines.shm.fd_passing import Handing, Handover, connect

SOON_S = 20.0
# Linux gives no process a number above this (PID_MAX_LIMIT).
NOBODY = 2**22 + 1


def never() -> None:
    """Do what is to be done while waiting: nothing."""


def make(ranks: int, nonce: bytes) -> tuple[int, int]:
    """Make memory."""
    del ranks, nonce
    descriptor = os.memfd_create("handing", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    return descriptor, 4096


@pytest.mark.parametrize("greets", [False, True])
def test_a_rank_that_ends_while_it_comes_for_the_memory(greets: bool) -> None:
    """One that connects and goes, before or after it says who it is, keeps the memory from nobody else."""
    store = dist.HashStore()

    def fetch(rank: int, ranks: int) -> Handover:
        descriptor, found = Handing(store, rank, ranks, never).share("memory", make, SOON_S)
        os.close(descriptor)
        return found

    def goes() -> None:
        with connect(store.get("memory").decode(), time.monotonic() + SOON_S) as sock:
            if greets:
                sock.send(msgspec.msgpack.encode(fd_passing._Greeting(1, fd_passing.pid_namespace())))

    # It is waited for where it has said who it is, and only there.
    ranks = 3 if greets else 2
    with ThreadPoolExecutor(2) as both:
        first = both.submit(fetch, 0, ranks)
        goes()
        last = both.submit(fetch, ranks - 1, ranks)
        assert first.result(SOON_S).nonce == last.result(SOON_S).nonce


def test_a_rank_that_ended_since_it_fetched_the_memory() -> None:
    """There is no descriptor of a process that is gone; that of one that runs is there all the same."""
    here = fd_passing.pid_namespace()
    found = shm._pidfds(Handover(4096, b"", [os.getpid(), NOBODY, os.getppid()], here), 0)
    try:
        assert found[:2] == (-1, -1)
        assert found[2] > 0
    finally:
        os.close(found[2])
