"""Collectives through MPI's own, on mpi4py; reductions are MPI's, in the order that it selects.

Each call begins with an all_gather of the ranks' fingerprints, so that different calls raise CallMismatch before data
moves. Then data moves by one non-blocking collective, which is polled: signals, the deadline and `abort` interrupt it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..base import EngineAborted, EngineTimeout, TransportFailure
from ..compared import Tensors, as_bytes, joined, sizes_of
from ..dtypes import ON_BOOL, REDUCTION_NAMES
from ..gloo.engine import GlooEngine
from ..shm.engine import cores
from .library import BlockingThread, World

__all__ = ["MpiEngine"]

# MPI's names of types that are not like UINT8_T. A sum, product, least or largest of bools is a bit operation on their
# bytes. MPI has no 16-bit floats: they are reduced in 32 bits and rounded once.
_DATATYPES = {torch.bool: "UINT8_T", torch.float32: "FLOAT", torch.float64: "DOUBLE"}
_WIDENED = frozenset({torch.float16, torch.bfloat16})
_OPS = {"AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD"}

# Polls before the processor is offered to others, some 0.3 us each, where every rank has a core: a rank that is about
# to arrive does so within these. With fewer cores than ranks a spinning rank would delay the one it waits for.
_SPINS = 300

# A rank that waits for others to arrive sleeps for this part of the time that it has waited, at most for so long.
_SLEEP_PART, _MAX_SLEEP_S = 0.05, 0.001
# It only yields before: a sleep takes 60 us at least.
_YIELD_S = 0.001

# From this size on all_reduce and reduce call Open MPI's blocking functions, in a thread, which costs 30 us: its
# non-blocking ones (libnbc) took 1.6 to 3.4 times as long, from 1 MiB to 32 MiB (5.0.11, 2 and 8 ranks of one host).
_BLOCKING_BYTES = 512 << 10

# Requests that were abandoned, with the exception whose frames hold their memory: MPI may still write there.
_ABANDONED: list[Any] = []


class MpiEngine(GlooEngine):
    """One rank's end of a group over MPI; calls that are delegated go through Gloo."""

    name = "mpi"

    # Also the smallest reductions are MPI's.
    _inline_bytes = 0

    def __init__(self, world: World, comm: Any, gloo: Any, rank: int, ranks: Sequence[int]) -> None:
        """``comm`` has the group's ranks in their order, and is freed by `close`."""
        self.world = world
        self.comm = comm
        self._mpi = world.mpi
        super().__init__(gloo, rank, ranks)
        self._spins = _SPINS if cores() >= self._size else 0
        self._exchange = self._buffer(self._record), self._buffer(self._records)
        self._thread = BlockingThread()
        self._blocking_bytes = _BLOCKING_BYTES if "Open MPI" in world.name and not world.serialised else sys.maxsize

    def abort(self, rank: int) -> None:
        """End the call under way, whose request is abandoned."""
        self.world.abandoned = True
        super().abort(rank)

    def close(self, within_s: float) -> None:
        """Free the communicator, unless a call was abandoned. Does not wait for other ranks."""
        del within_s
        self._thread.close()
        if self._aborted_at is None and not self.world.abandoned and self.comm:
            self.world.call(self.comm.Free)
        self._aborted_at = time.monotonic()

    # How records and data move -------------------------------------------------------------------------------------

    def _gather_records(self) -> None:
        self._finish(self.comm.Iallgather, *self._exchange, arriving=True)

    def _flat_all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        self._finish(self.comm.Iallgather, self._buffer(mine), self._buffer(whole))

    def _reduce(self, data: torch.Tensor, reduction: int, root: int | None) -> None:
        if not data.numel():
            return
        wide, mine = _widened(data), root in {None, self._rank}
        buffer = self._buffer(wide, typed=True)
        args = [*((self._mpi.IN_PLACE, buffer) if mine else (buffer, None)), self._op(data, reduction)]
        issue, block = self.comm.Iallreduce, self.comm.Allreduce
        if root is not None:
            issue, block = self.comm.Ireduce, self.comm.Reduce
            args.append(root)
        if data.nbytes < self._blocking_bytes:
            self._finish(issue, *args)
        else:
            self._finish(self._thread.start, block, *args)
        if mine:
            self._store(wide, data, reduction)

    def _reduce_scatter(self, parts: Tensors, mine: torch.Tensor, reduction: int) -> None:
        if not mine.numel():
            return
        with joined([as_bytes(part) for part in parts], back=False) as given:
            source, target = _widened(given.view(mine.dtype)), _widened(mine)
            buffers = self._buffer(source, typed=True), self._buffer(target, typed=True)
            self._finish(self.comm.Ireduce_scatter_block, *buffers, self._op(mine, reduction))
        self._store(target, mine, reduction)

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        if data.numel():
            self._finish(self.comm.Ibcast, self._buffer(data), root)

    def _all_gather(self, data: torch.Tensor, parts: Tensors) -> None:
        with joined(parts) as whole:
            # A rank's memory may be its part of the result already.
            before = sum(sizes_of(parts[: self._rank]))
            source = self._mpi.IN_PLACE if data.data_ptr() == whole.data_ptr() + before else self._buffer(data)
            issue = self.comm.Iallgather if self._even else self.comm.Iallgatherv
            self._finish(issue, source, self._parts_in(whole, parts))

    def _gather(self, given: Tensors, came: Tensors, root: int) -> None:
        with joined(came) as whole:
            target = self._parts_in(whole, came) if self._rank == root else None
            issue = self.comm.Igather if self._even else self.comm.Igatherv
            self._finish(issue, self._buffer(given[root]), target, root)

    def _scatter(self, given: Tensors, came: Tensors, root: int) -> None:
        with joined(given, back=False) as whole:
            source = self._parts_in(whole, given) if self._rank == root else None
            issue = self.comm.Iscatter if self._even else self.comm.Iscatterv
            self._finish(issue, source, self._buffer(came[root]), root)

    def _all_to_all(self, given: Tensors, came: Tensors) -> None:
        with joined(given, back=False) as sent, joined(came) as received:
            issue = self.comm.Ialltoall if self._even else self.comm.Ialltoallv
            self._finish(issue, self._parts_in(sent, given), self._parts_in(received, came))

    # MPI -----------------------------------------------------------------------------------------------------------

    def _finish(self, issue: Callable[..., Any], *args: Any, arriving: bool = False) -> None:
        """Issue a call and wait until it is complete. ``arriving`` is whether it waits for ranks rather than data."""
        request: Any = None
        try:
            if self.world.serialised:
                request = self.world.call(issue, *args)
            else:
                request = issue(*args)
                if request.Test():
                    return
            self._poll(request, arriving=arriving)
        except BaseException as problem:
            # A collective cannot be cancelled. The exception's frames keep its memory.
            _ABANDONED.append((request, args, problem))
            self.world.abandoned = True
            if isinstance(problem, self._mpi.Exception):
                raise TransportFailure(f"MPI failed: {problem}") from problem
            raise

    def _poll(self, request: Any, *, arriving: bool) -> None:
        test, call, began, polls = request.Test, self.world.call, time.monotonic(), 0
        while not call(test):
            polls += 1
            if polls < self._spins:
                continue
            now = time.monotonic()
            if self._aborted_at is not None:
                raise EngineAborted("the group ended during this call")
            if now > self._deadline:
                raise EngineTimeout("Timed out waiting for the other ranks")
            if arriving and now - began > _YIELD_S:
                time.sleep(min(_MAX_SLEEP_S, (now - began) * _SLEEP_PART))
            elif request is not self._thread:
                # MPI moves data only while it is called.
                os.sched_yield()

    def _buffer(self, data: torch.Tensor, *, typed: bool = False) -> list[Any]:
        """Return the memory of ``data`` for MPI: as bytes, or as elements that it reduces."""
        datatype = getattr(self._mpi, _datatype(data.dtype)) if typed else self._mpi.BYTE
        return [self._mpi.buffer.fromaddress(data.data_ptr(), data.nbytes), datatype]

    def _parts_in(self, whole: torch.Tensor, parts: Tensors) -> list[Any]:
        """Return memory that has a part for each rank; with the sizes, where they differ."""
        memory, datatype = self._buffer(whole)
        if self._even:
            return [memory, datatype]
        sizes = sizes_of(parts)
        return [memory, sizes, [0, *accumulate(sizes[:-1])], datatype]

    def _op(self, data: torch.Tensor, reduction: int) -> Any:
        name = REDUCTION_NAMES[reduction]
        name = ON_BOOL.get(name, name) if data.dtype is torch.bool else name
        return getattr(self._mpi, _OPS.get(name, name))

    def _store(self, wide: torch.Tensor, data: torch.Tensor, reduction: int) -> None:
        """Put a result into the caller's memory, divided for AVG."""
        if REDUCTION_NAMES[reduction] == "AVG":
            wide.div_(self._size)
        if wide is not data:
            data.copy_(wide)


@functools.cache
def _datatype(dtype: torch.dtype) -> str:
    return _DATATYPES.get(dtype) or str(dtype).removeprefix("torch.").upper() + "_T"


def _widened(data: torch.Tensor) -> torch.Tensor:
    """Return ``data`` as a type that MPI reduces."""
    return data.float() if data.dtype in _WIDENED else data
