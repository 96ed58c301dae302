"""Collectives through MPI's own, on mpi4py; reductions are MPI's, in the order that it selects.

Each call begins with an all_gather of the ranks' fingerprints, so that different calls raise CallMismatch before data
moves. Then data moves by one non-blocking collective, which is polled: signals, the deadline and `abort` interrupt it.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch

from ...diagnosis.majority import Judgement
from .. import fingerprint
from ..base import CallMismatch, Engine, EngineAborted, EngineTimeout, Parts, TransportFailure
from ..dtypes import COMPLEX, OPERATIONS, REDUCTION_NAMES, TORCH_DTYPES, operation_code
from ..fingerprint import Call
from ..gloo.engine import GlooEngine
from ..shm.engine import cores
from .library import World

__all__ = ["MpiEngine", "joined"]

_BARRIER, _ALL_REDUCE, _REDUCE, _BROADCAST, _ALL_GATHER, _GATHER, _SCATTER, _REDUCE_SCATTER, _ALL_TO_ALL = (
    OPERATIONS.index(name)
    for name in (
        "barrier",
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
    )
)
_AVG = REDUCTION_NAMES.index("AVG")

# MPI's names of types. A sum, product, least or largest of bools is a bit operation on their bytes. MPI has no 16-bit
# floats: they are reduced in 32 bits and rounded once.
_DATATYPES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.uint16: "UINT16_T",
    torch.int16: "INT16_T",
    torch.uint32: "UINT32_T",
    torch.int32: "INT32_T",
    torch.uint64: "UINT64_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",
    torch.float16: "FLOAT",
    torch.bfloat16: "FLOAT",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
}
_WIDENED = frozenset({torch.float16, torch.bfloat16})
_OPS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PREMUL_SUM": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_BOOL_OPS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}

# Polls before the processor is offered to others, some 0.3 us each, where every rank has a core: a rank that is about
# to arrive does so within these. With fewer cores than ranks a spinning rank would delay the one it waits for.
_SPINS = 300

# A rank that waits for others to arrive sleeps for this part of the time that it has waited, at most for so long.
_SLEEP_PART, _MAX_SLEEP_S = 0.05, 0.001
# It only yields before: a sleep takes 60 us at least.
_YIELD_S = 0.001

# How often the wait for a blocking call returns to Python, for signals, the deadline and `abort`.
_POLL_S = 0.02

# From this size on all_reduce and reduce call Open MPI's blocking functions, in a thread, which costs 30 us: its
# non-blocking ones (libnbc) took 1.6 to 3.4 times as long, from 1 MiB to 32 MiB (5.0.11, 2 and 8 ranks of one host).
_BLOCKING_BYTES = 512 << 10

# Requests that were abandoned, with the exception whose frames hold their memory: MPI may still write there.
_ABANDONED: list[Any] = []


class MpiEngine(Engine):
    """One rank's end of a group over MPI."""

    name = "mpi"

    def __init__(self, world: World, comm: Any, gloo: Any, rank: int, ranks: Sequence[int]) -> None:
        """``comm`` has the group's ranks in their order, and is freed by `close`. ``gloo`` does what MPI cannot."""
        self.world = world
        self.comm = comm
        self._mpi = world.mpi
        self._delegate = GlooEngine(gloo, rank, ranks)
        self._rank = rank
        self._numbers = list(ranks)
        self._size = len(ranks)
        self._sequence = 0
        self._deadline = 0.0
        self._aborted = False
        self._spins = _SPINS if cores() >= self._size else 0
        # Of the last call, with every rank's after the exchange.
        self._fields: tuple[Any, ...] = ()
        self._record = bytearray(fingerprint.BYTES)
        self._records = bytearray(fingerprint.BYTES * self._size)
        self._exchange = [self._record, self._mpi.BYTE], [self._records, self._mpi.BYTE]
        self._types: dict[tuple[int, int], tuple[torch.dtype, Any, Any]] = {}
        self._in_place = self._mpi.IN_PLACE
        self._thread = _BlockingThread()
        self._blocking_bytes = _BLOCKING_BYTES if "Open MPI" in world.name and not world.serialised else sys.maxsize

    def sequence(self) -> int:
        """Return the number of the next call."""
        return self._sequence

    # Operations --------------------------------------------------------------------------------------------

    def barrier(self, timeout_ns: int) -> None:
        """Wait for every rank: the exchange of fingerprints is all it takes."""
        self._compare(_BARRIER, timeout_ns)
        self.in_call = False

    def compare_only(self, operation: int, reduction: int, dtype: int, nbytes: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what a call is
        """Compare a call, which `delegate` completes."""
        self._compare(operation, timeout_ns, nbytes, dtype, reduction, root)

    def delegate(self, issue: Callable[..., Any], *args: Any) -> None:
        """Perform the compared call by an operation of Gloo."""
        self._delegate.delegate(issue, *args)
        self.in_call = False

    def refuse(self, operation: str, reason: str, timeout_ns: int) -> None:
        """Report that this rank cannot make its call; raise CallMismatch unless no rank can."""
        self._compare(operation_code(operation), timeout_ns, refused=reason or "it gave no reason")
        self.in_call = False

    def all_reduce(self, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int) -> None:
        """Reduce in place."""
        self._compare(_ALL_REDUCE, timeout_ns, nbytes, dtype, reduction)
        if nbytes:
            operand = self._operand(address, nbytes, dtype, reduction)
            if nbytes < self._blocking_bytes:
                self._finish(self.comm.Iallreduce, self._in_place, operand.buffer, operand.op)
            else:
                self._finish(self._thread.start, self.comm.Allreduce, self._in_place, operand.buffer, operand.op)
            operand.store()
        self.in_call = False

    def reduce(self, address: int, nbytes: int, dtype: int, reduction: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Reduce in place on the root."""
        self._compare(_REDUCE, timeout_ns, nbytes, dtype, reduction, root)
        if nbytes:
            mine = self._rank == root
            operand = self._operand(address, nbytes, dtype, reduction)
            args = (*((self._in_place, operand.buffer) if mine else (operand.buffer, None)), operand.op, root)
            if nbytes < self._blocking_bytes:
                self._finish(self.comm.Ireduce, *args)
            else:
                self._finish(self._thread.start, self.comm.Reduce, *args)
            if mine:
                operand.store()
        self.in_call = False

    def reduce_scatter(  # noqa: PLR0917  # what the operation takes
        self, given: Parts, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int
    ) -> None:
        """Reduce each part to the rank that it is for."""
        self._compare(_REDUCE_SCATTER, timeout_ns, nbytes, dtype, reduction)
        if nbytes:
            with joined(given, back=False) as (source, total):
                operand = self._operand(source, total, dtype, reduction)
                out = self._operand(address, nbytes, dtype, reduction)
                self._finish(self.comm.Ireduce_scatter_block, operand.buffer, out.buffer, out.op)
                out.store()
        self.in_call = False

    def broadcast(self, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:
        """Copy the root's memory to every rank."""
        self._compare(_BROADCAST, timeout_ns, nbytes, dtype, root=root)
        if nbytes:
            self._finish(self.comm.Ibcast, self._bytes(address, nbytes), root)
        self.in_call = False

    def all_gather(self, address: int, nbytes: int, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy every rank's memory to every rank."""
        takes = out[1::2]
        even = self._compare(_ALL_GATHER, timeout_ns, nbytes, dtype, gives=(nbytes,) * self._size, takes=takes)
        with joined(out) as (target, total):
            # A rank's memory may be its part of the result already.
            in_place = address == target + sum(takes[: self._rank])
            source = self._in_place if in_place else self._bytes(address, nbytes)
            if even:
                self._finish(self.comm.Iallgather, source, self._bytes(target, total))
            else:
                self._finish(self.comm.Iallgatherv, source, self._parts(target, takes))
        self.in_call = False

    def gather(self, address: int, nbytes: int, out: Parts | None, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy every rank's memory to the root."""
        takes = out[1::2] if out else ()
        gives = tuple(nbytes if rank == root else 0 for rank in range(self._size))
        even = self._compare(_GATHER, timeout_ns, nbytes, dtype, root=root, gives=gives, takes=takes, sizes=takes)
        with joined(out or ()) as (target, total):
            source = self._bytes(address, nbytes)
            if even:
                self._finish(self.comm.Igather, source, self._bytes(target, total) if out else None, root)
            else:
                self._finish(self.comm.Igatherv, source, self._parts(target, takes) if out else None, root)
        self.in_call = False

    def scatter(self, given: Parts | None, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy each part of the root's memory to its rank."""
        gives = given[1::2] if given else ()
        takes = tuple(nbytes if rank == root else 0 for rank in range(self._size))
        even = self._compare(_SCATTER, timeout_ns, nbytes, dtype, root=root, gives=gives, takes=takes, sizes=gives)
        with joined(given or (), back=False) as (source, total):
            target = self._bytes(address, nbytes)
            if even:
                self._finish(self.comm.Iscatter, self._bytes(source, total) if given else None, target, root)
            else:
                self._finish(self.comm.Iscatterv, self._parts(source, gives) if given else None, target, root)
        self.in_call = False

    def all_to_all(self, given: Parts, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy each part to its rank."""
        gives, takes = given[1::2], out[1::2]
        even = self._compare(_ALL_TO_ALL, timeout_ns, max(gives + takes), dtype, gives=gives, takes=takes)
        with joined(given, back=False) as (source, sent), joined(out) as (target, received):
            if even:
                self._finish(self.comm.Ialltoall, self._bytes(source, sent), self._bytes(target, received))
            else:
                self._finish(self.comm.Ialltoallv, self._parts(source, gives), self._parts(target, takes))
        self.in_call = False

    def abort(self, rank: int) -> None:
        """End the call under way, whose request is abandoned."""
        self._aborted = self.world.abandoned = True
        self._delegate.abort(rank)

    def close(self, within_s: float) -> None:
        """Free the communicator, unless a call was abandoned. Does not wait for other ranks."""
        del within_s
        self._thread.close()
        if not self._aborted and not self.world.abandoned and self.comm:
            self.world.call(self.comm.Free)
        self._aborted = True

    # Comparing calls ---------------------------------------------------------------------------------------

    def _compare(  # noqa: PLR0917  # what a call is
        self,
        operation: int,
        timeout_ns: int,
        nbytes: int = 0,
        dtype: int = 0,
        reduction: int = 0,
        root: int = -1,
        *,
        gives: tuple[int, ...] = (),
        takes: tuple[int, ...] = (),
        sizes: tuple[int, ...] | None = None,
        refused: str = "",
    ) -> bool:
        """Exchange fingerprints and raise CallMismatch where they differ; return whether all parts are of one size.

        ``gives`` and ``takes`` are the bytes for and from each rank. Where ``sizes``, all of them unless given, are not
        all ``nbytes`` on some rank, they are exchanged too.
        """
        if self.in_call or self._aborted:
            raise EngineAborted("an earlier call of this group failed" if self.in_call else "the group ended")
        self.in_call = True
        self._deadline = time.monotonic() + timeout_ns / 1e9
        self._sequence += 1
        parts = gives + takes if sizes is None else sizes
        uneven = parts.count(nbytes) != len(parts)
        fields = (operation, nbytes, reduction, dtype, root, uneven, self.shape, self.site, refused)
        if fields != self._fields:
            # Packing takes 4 us; a training loop makes the same calls again and again.
            packed = Call(self._sequence, *fields).pack()
            self._record[: len(packed)] = packed
            self._fields = fields
        fingerprint.SEQUENCE.pack_into(self._record, 0, self._sequence)
        self._finish(self.comm.Iallgather, *self._exchange, arriving=True)
        if not uneven and self._records == self._record * self._size:
            return True
        head, records = self._record[: fingerprint.HEAD_BYTES], self._records
        starts = range(0, len(records), fingerprint.BYTES)
        if not uneven and all(records.startswith(head, start) for start in starts):
            return True
        calls = [fingerprint.unpack(bytes(records[start : start + fingerprint.BYTES])) for start in starts]
        judgement = fingerprint.judge(calls, self._numbers) or self._judge_sizes(calls, gives, takes)
        if judgement is not None:
            raise CallMismatch(judgement)
        return False

    def _judge_sizes(self, calls: Sequence[Call], gives: Sequence[int], takes: Sequence[int]) -> Judgement | None:
        none = (0,) * self._size
        tables: torch.Tensor = torch.empty(self._size, 2, self._size, dtype=torch.int64)
        mine = torch.tensor([*(gives or none), *(takes or none)])
        self._finish(self.comm.Iallgather, *(self._bytes(each.data_ptr(), each.nbytes) for each in (mine, tables)))
        return fingerprint.judge_sizes(tables[:, 0].tolist(), tables[:, 1].tolist(), calls, self._numbers)

    # MPI ---------------------------------------------------------------------------------------------------

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
            if self._aborted:
                raise EngineAborted("the group ended during this call")
            if now > self._deadline:
                raise EngineTimeout("Timed out waiting for the other ranks")
            if arriving and now - began > _YIELD_S:
                time.sleep(min(_MAX_SLEEP_S, (now - began) * _SLEEP_PART))
            elif request is not self._thread:
                # MPI moves data only while it is called.
                os.sched_yield()

    def _bytes(self, address: int, nbytes: int) -> list[Any]:
        return [self._mpi.buffer.fromaddress(address, nbytes), self._mpi.BYTE]

    def _parts(self, address: int, sizes: Sequence[int]) -> list[Any]:
        """Return memory that has a part of ``sizes`` bytes for each rank."""
        memory = self._mpi.buffer.fromaddress(address, sum(sizes))
        return [memory, sizes, [0, *accumulate(sizes[:-1])], self._mpi.BYTE]

    def _operand(self, address: int, nbytes: int, dtype: int, reduction: int) -> _Operand:
        key = dtype, reduction
        if key not in self._types:
            element, name = TORCH_DTYPES[dtype & ~COMPLEX], REDUCTION_NAMES[reduction]
            op = _BOOL_OPS.get(name, name) if element is torch.bool else name
            self._types[key] = element, getattr(self._mpi, _DATATYPES[element]), getattr(self._mpi, _OPS[op])
        element, datatype, op = self._types[key]
        divisor = self._size if reduction == _AVG else 1
        if element in _WIDENED:
            wide = _tensor(address, nbytes).view(element).float()
            memory = self._mpi.buffer.fromaddress(wide.data_ptr(), wide.nbytes)
            return _Operand([memory, datatype], op, address, nbytes, element, wide, divisor)
        buffer = [self._mpi.buffer.fromaddress(address, nbytes), datatype]
        return _Operand(buffer, op, address, nbytes, element, None, divisor)


class _Operand(NamedTuple):
    """Memory in a type that MPI reduces: the caller's, or a ``wide`` copy."""

    buffer: list[Any]
    op: Any
    address: int
    nbytes: int
    element: torch.dtype
    wide: torch.Tensor | None
    divisor: int

    def store(self) -> None:
        """Put the result into the caller's memory, divided for AVG."""
        if self.wide is not None:
            data = _tensor(self.address, self.nbytes).view(self.element)
            data.copy_(self.wide.div_(self.divisor) if self.divisor > 1 else self.wide)
        elif self.divisor > 1:
            _tensor(self.address, self.nbytes).view(self.element).div_(self.divisor)


class _BlockingThread:
    """Makes blocking calls of MPI, one at a time, interruptible for the caller, who polls it as a request."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, *call: Any) -> Self:
        """Start a call: its function and arguments."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="allhands-mpi", daemon=True)
            self._thread.start()
        self._calls.put(call)
        return self

    def Test(self) -> bool:  # noqa: N802  # MPI's name
        """Wait for a moment; return whether the call is complete, or raise what it raised."""
        try:
            problem = self._results.get(timeout=_POLL_S)
        except queue.Empty:
            return False
        if problem is not None:
            raise problem
        return True

    def close(self) -> None:
        """End the thread after its call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call[0](*call[1:])
            except BaseException as problem:  # noqa: BLE001  # raised by Test
                self._results.put(problem)
            else:
                self._results.put(None)


def _tensor(address: int, nbytes: int) -> torch.Tensor:
    """Return ``nbytes``, not 0, at ``address`` as a tensor."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


@contextmanager
def joined(parts: Parts, *, back: bool = True) -> Iterator[tuple[int, int]]:
    """Yield ``parts`` as one address and size: their own memory where adjacent, else a copy (copied ``back``)."""
    filled = [(address, nbytes) for address, nbytes in zip(parts[::2], parts[1::2], strict=True) if nbytes]
    total = sum(parts[1::2])
    if all(address + nbytes == following for (address, nbytes), (following, _) in pairwise(filled)):
        yield filled[0][0] if filled else 0, total
        return
    tensors = [_tensor(*each) for each in filled]
    whole = torch.empty(total, dtype=torch.uint8) if back else torch.cat(tensors)
    yield whole.data_ptr(), total
    if back:
        for tensor, piece in zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece)
