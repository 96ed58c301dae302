"""Threads as the ranks of a segment, for tests of the C core that also run under sanitizers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from allhands import _core

__all__ = ["place", "places", "segments", "together"]


@contextmanager
def segments(
    ranks: int,
    slot: int,
    pidfds: tuple[int, ...] | None = None,
    pids: tuple[int, ...] | None = None,
    helper_threads: int = 0,
    *,
    victim_l3: bool | None = None,
) -> Iterator[list[_core.Segment]]:
    """Yield one view for each rank of a fresh segment.

    With ``pids`` large tensors are read from those processes, unless there is a ``victim_l3`` (the default without).
    """
    victim_l3 = pids is None if victim_l3 is None else victim_l3
    size, nonce = _core.segment_bytes(ranks, slot, helper_threads), os.urandom(16)
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, size)
        _core.segment_format(descriptor, ranks, slot, nonce, helper_threads, victim_l3)
        views = [_core.Segment(descriptor, size, rank, nonce, pidfds or (-1,) * ranks) for rank in range(ranks)]
    finally:
        os.close(descriptor)
    for view in views:
        view.set_wait_policy(0, 50)
        if pids:
            view.enable_single_copy(pids)
    yield views


def together(ranks: int, work: Callable[[int], None]) -> None:
    """Run ``work`` once per rank, each in a thread; raise the first exception."""
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as problem:  # noqa: BLE001  # raised below
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def place(array: Any) -> tuple[int, int]:
    """Return address and bytes."""
    return array.ctypes.data, array.nbytes


def places(arrays: list[Any]) -> tuple[int, ...]:
    """Return addresses and bytes of a list."""
    return tuple(number for array in arrays for number in place(array))
