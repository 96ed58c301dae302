"""A stream of a GPU in which the ranks of a group issue the same calls: what the engines of CUDA tensors share.

No rank waits on the host. The calls are compared through records in host memory that the GPU can reach too: by the
rank that arrives last, and by the thread that watches calls under way (`groups.cuda_route`). The same memory has the
counters that streams wait for, so a plain store releases a stream that waits for a dead rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from ...diagnosis.majority import Judgement
from .. import fingerprint
from ..base import CallMismatch, EngineTimeout
from ..compared import ComparedEngine, Tensors, sizes_of
from ..dtypes import operation_code
from ..fingerprint import Call
from ..shm.fd_passing import FdPassing, allocate
from . import driver

__all__ = ["BROUGHT", "CONSUMED", "REDUCED", "Counters", "StreamEngine", "at", "first_problem", "region_bytes", "share"]

# Counters that a rank's stream writes: its data is in its row, its part is reduced, it needs no other rank's data.
BROUGHT, REDUCED, CONSUMED = 0, 1, 2

# Counters that the host writes: calls posted, calls of all ranks compared, and that the rank has closed its end.
_POSTED, _COMPARED, _CLOSED = 3, 4, 5
_COUNTERS = 6

# Bytes between counters: the GPU writes some and several processes read others, so none share a cache line.
_APART = 128

# Calls that a rank may be ahead of the slowest before it waits for it: enough work to keep the GPU busy while the other
# catches up. More take more memory for records.
_RING = 64

# Above the value of every call: releases all waits. Below 2**63, because the driver compares as signed numbers.
_RELEASED = 1 << 62

# How often a wait polls.
_POLL_S = 0.0005


def _entry_bytes(ranks: int) -> int:
    return fingerprint.BYTES + 16 * ranks


def region_bytes(ranks: int) -> int:
    """Return the bytes of one rank's part, in whole pages."""
    return -(-(_COUNTERS * _APART + _RING * _entry_bytes(ranks)) // mmap.PAGESIZE) * mmap.PAGESIZE


class Counters:
    """One rank's view of all ranks' counters and records. Not thread-safe, except `release`."""

    def __init__(self, descriptor: int, rank: int, names: Sequence[int]) -> None:
        """Map the memory of ``descriptor``, `region_bytes` per rank; ``names`` are the ranks in messages."""
        self._rank = rank
        self._names = list(names)
        self._ranks = len(self._names)
        self._region = region_bytes(self._ranks)
        self._memory = mmap.mmap(descriptor, self._region * self._ranks)
        self._values = memoryview(self._memory).cast("Q")
        self._bytes = memoryview(self._memory)
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._device = driver.map_host(self._host, len(self._memory))
        self.compared = 0

    def address(self, counter: int, rank: int) -> int:
        """Return the GPU's address of a counter of ``rank``."""
        return self._device + rank * self._region + counter * _APART

    def value(self, counter: int, rank: int) -> int:
        """Return the current value of a counter of ``rank``."""
        return int(self._values[(rank * self._region + counter * _APART) // 8])

    def posted(self, rank: int) -> int:
        """Return how many calls ``rank`` has posted."""
        return self.value(_POSTED, rank)

    def _set(self, counter: int, rank: int, value: int) -> None:
        self._values[(rank * self._region + counter * _APART) // 8] = value

    def _place(self, rank: int, call: int) -> int:
        return rank * self._region + _COUNTERS * _APART + call % _RING * _entry_bytes(self._ranks)

    def post(self, call: Call, sizes: Sequence[int], deadline: float, check: Callable[[], None]) -> Judgement | None:
        """Post this rank's next call, with its ``sizes`` to and from each rank; return how it differs.

        Waits only while a rank is so far behind that the ring has no room; ``check`` is called meanwhile, and raises
        where the group is over.
        """
        mine = self.posted(self._rank)
        while any(self.value(_COMPARED, rank) + _RING <= mine for rank in range(self._ranks)):
            found = self.compare()
            if found is not None:
                return found
            check()
            if time.monotonic() > deadline:
                break  # The thread that watches calls under way names the rank that is behind.
            time.sleep(_POLL_S)
        record, place = call.pack(), self._place(self._rank, mine)
        self._bytes[place : place + len(record)] = record
        struct.pack_into(f"={len(sizes)}Q", self._bytes, place + fingerprint.BYTES, *sizes)
        self._set(_POSTED, self._rank, mine + 1)
        return self.compare()

    def meet(self, deadline: float, check: Callable[[], None]) -> Judgement | None:
        """Wait until all ranks have posted as many calls as this one; return how they differ."""
        mine = self.posted(self._rank)
        while self.compared < mine:
            found = self.compare()
            if found is not None:
                return found
            check()
            if time.monotonic() > deadline:
                raise EngineTimeout(culprit=next(rank for rank in range(self._ranks) if self.posted(rank) < mine))
            time.sleep(_POLL_S)
        return None

    def compare(self) -> Judgement | None:
        """Compare all calls that were posted and not compared yet; return the first difference."""
        while True:
            arrived = [rank for rank in range(self._ranks) if self.posted(rank) > self.compared]
            if len(arrived) < min(2, self._ranks):
                return None
            found = self._judge(self.compared, arrived)
            if found is not None:
                return found
            if len(arrived) < self._ranks:
                return None
            self.compared += 1
            self._set(_COMPARED, self._rank, self.compared)

    def _judge(self, number: int, arrived: list[int]) -> Judgement | None:
        calls = [self._call(rank, number) for rank in arrived]
        if fingerprint.judge(calls, [self._names[rank] for rank in arrived]) is not None:
            return fingerprint.judge_arrived(
                lambda: [rank for rank in range(self._ranks) if self.posted(rank) > number],
                lambda rank: self._call(rank, number),
                self._names,
            )
        if len(arrived) < self._ranks or not any(call.uneven for call in calls):
            return None
        tables = [self._sizes(rank, number) for rank in arrived]
        gives, takes = [table[: self._ranks] for table in tables], [table[self._ranks :] for table in tables]
        return fingerprint.judge_sizes(gives, takes, calls, self._names)

    def _call(self, rank: int, number: int) -> Call:
        place = self._place(rank, number)
        return fingerprint.unpack(self._bytes[place : place + fingerprint.BYTES])

    def _sizes(self, rank: int, number: int) -> tuple[int, ...]:
        return struct.unpack_from(f"={2 * self._ranks}Q", self._bytes, self._place(rank, number) + fingerprint.BYTES)

    def release(self) -> None:
        """Release every stream that waits for a counter: the group is over, and its data means nothing any more.

        To be repeated until this rank's stream is empty: a released stream still writes its own counters.
        """
        for rank in range(self._ranks):
            for counter in (BROUGHT, REDUCED, CONSUMED):
                self._set(counter, rank, _RELEASED)

    def mark_closed(self) -> None:
        """Note that this rank uses the shared memory of the GPU no more."""
        self._set(_CLOSED, self._rank, 1)

    def all_closed(self) -> bool:
        """Return whether all ranks have noted that."""
        return all(self.value(_CLOSED, rank) for rank in range(self._ranks))

    def close(self) -> None:
        """Unmap the memory from the GPU. The host's mapping ends with this object."""
        driver.unmap_host(self._host)


def at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return ``nbytes`` of ``device`` at ``address`` as a tensor."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    described = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=device)


class StreamEngine(ComparedEngine):
    """One rank's end. An operation returns once it is in the stream, in issue order; `meet` only is waited for."""

    def __init__(self, counters: Counters, rank: int, ranks: int, device: torch.device) -> None:
        # Called while waiting for other ranks; raises where the group is over.
        self.check: Callable[[], None] = lambda: None
        self.counters = counters
        self.device = device
        self._rank = rank
        self._size = ranks
        self._context = driver.context()
        self.stream = torch.cuda.ExternalStream(driver.create_stream(), device=device)  # type: ignore[no-untyped-call]
        self._deadline = 0.0

    def barrier(self, timeout_ns: int) -> None:
        """Wait, on the host, until every rank has posted this call."""
        self._compare(operation_code("barrier"), timeout_ns)
        self._meet()
        self._end()

    def refuse(self, operation: str, reason: str, timeout_ns: int) -> None:
        """Report that this rank cannot make its call; raise CallMismatch where another rank can."""
        self._compare(operation_code(operation), timeout_ns, refused=reason or "it gave no reason")
        self._meet()
        self._end()

    def compare(self) -> None:
        """Raise CallMismatch where the calls posted since the last comparison differ. Called by the watching thread."""
        _raise_difference(self.counters.compare())

    def missing(self) -> list[int]:
        """Return the ranks that have posted fewer calls than this one."""
        mine = self.counters.posted(self._rank)
        return [rank for rank in range(self._size) if self.counters.posted(rank) < mine]

    def abort(self, rank: int) -> None:
        """Release the stream. To be repeated until it is empty."""
        del rank
        self.counters.release()

    def close(self, within_s: float) -> None:
        """Free what is shared, once the stream is empty."""
        del within_s
        driver.enter(self._context)
        self.counters.close()
        driver.destroy_stream(self.stream.cuda_stream)

    # What ComparedEngine leaves to subclasses ----------------------------------------------------------------------

    def _compare(
        self,
        operation: int,
        timeout_ns: int,
        nbytes: int = 0,
        data: torch.Tensor | None = None,
        *,
        parts: Tensors = (),
        given: Tensors = (),
        came: Tensors = (),
        **fields: Any,
    ) -> None:
        """Post this call; raise CallMismatch where other ranks have posted another one."""
        del data, parts
        call = Call(self._sequence, operation, nbytes, uneven=bool(given), shape=self.shape, site=self.site, **fields)
        driver.enter(self._context)
        self._deadline = time.monotonic() + timeout_ns / 1e9
        sizes = sizes_of(given) + sizes_of(came)
        _raise_difference(self.counters.post(call, sizes, self._deadline, self.check))

    def _meet(self) -> None:
        _raise_difference(self.counters.meet(self._deadline, self.check))

    def _end(self) -> None:
        self._sequence += 1

    def _at(self, address: int, nbytes: int) -> torch.Tensor:
        return at(address, nbytes, self.device)


def _raise_difference(judgement: Judgement | None) -> None:
    if judgement is not None:
        raise CallMismatch(judgement)


def share(
    fd_passing: FdPassing, key: str, rank: int, names: Sequence[int], timeout_s: float
) -> tuple[Counters | None, str]:
    """Create the counters of a group; every rank of it calls this, with the same ``key``.

    Returns them, or why the GPU cannot reach them on this rank.
    """

    def create(ranks: int, _: bytes) -> int:
        return allocate("allhands-cuda", region_bytes(ranks) * ranks, f"the counters of {ranks} ranks")

    descriptor, _ = fd_passing.share(key, create, timeout_s)
    try:
        return Counters(descriptor, rank, names), ""
    except driver.DriverError as problem:
        return None, str(problem)
    finally:
        os.close(descriptor)


def first_problem(store: Store, key: str, rank: int, ranks: int, problem: str) -> str:
    """Return the first problem of any rank, "" for none; the same on every rank, each of which calls this."""
    store.set(f"{key}/{rank}", problem)
    problems = [store.get(f"{key}/{each}").decode() for each in range(ranks)]
    return next((f"rank {each} of the group: {text}" for each, text in enumerate(problems) if text), "")
