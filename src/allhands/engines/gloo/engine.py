"""Gloo: collectives of ranks on several hosts, after comparing what every rank calls.

Each call begins with an all_gather of one small record per rank, of one size whatever the ranks call, so that it
completes where they differ. Data that fits into the record travels with it, and the call is done then. Larger data is
moved by Gloo's own operations, as bytes, which works for every type; what Gloo cannot reduce is exchanged and reduced
here, in rank order.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import _torch
from .. import fingerprint
from ..base import CallMismatch, Engine, EngineAborted, Parts
from ..dtypes import COMPLEX, REDUCTION_NAMES, TORCH_DTYPES, operation_code, reduce_rows
from ..fingerprint import Call
from . import gloo_errors

__all__ = ["RECORD_BYTES", "GlooEngine", "as_bytes", "joined", "memory"]

# Data that travels with the fingerprint: it costs no further message, and more would slow down every call.
_INLINE = 256
RECORD_BYTES = fingerprint.BYTES + _INLINE

# The timeout for Gloo when the deadline has all but passed; 0 would select its default.
_MIN_S = 0.001

# How long Gloo may take to notice that its connections were closed.
_NOTICE_S = 0.2
# How often a wait returns to Python: signal handlers run then.
_POLL = timedelta(milliseconds=50)

# What Gloo reduces with the same result as the C core: it rounds 16-bit floats at each step, and lacks other types.
_GLOO_TYPES = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})
_GLOO_OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.SUM,
    "PREMUL_SUM": dist.ReduceOp.SUM,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}

_Tensors = Sequence[torch.Tensor]


class GlooEngine(Engine):
    """One rank's end of a group. Subclasses replace how records and data move: the last part of the methods."""

    name = "gloo"

    def __init__(self, gloo: Any, rank: int, ranks: Sequence[int]) -> None:
        """``gloo`` is torch's backend of the group; ``ranks`` are its global ranks, for messages."""
        self._gloo = gloo
        self._rank = rank
        self._numbers = list(ranks)
        self._size = len(ranks)
        self._sequence = 0
        self._deadline = 0.0
        self._aborted_at: float | None = None
        # Of the current call: whether all parts are of one size, and whether no rank has any data.
        self._even = True
        self._empty = False
        self._record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        self._records = torch.zeros(self._size, RECORD_BYTES, dtype=torch.uint8)
        self._written, self._read = memory(self._record), memory(self._records)
        # Where each rank's record begins among all.
        self._starts: Sequence[int] = range(0, self._size * RECORD_BYTES, RECORD_BYTES)

    def sequence(self) -> int:
        """Return the number of the next call."""
        return self._sequence

    # Operations --------------------------------------------------------------------------------------------

    def barrier(self, timeout_ns: int) -> None:
        """Wait for every rank: the exchange of records is all it takes."""
        self._compare("barrier", timeout_ns)
        self.in_call = False

    def compare_only(self, operation: int, reduction: int, dtype: int, nbytes: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what a call is
        """Compare a call, which `delegate` completes."""
        self._begin(timeout_ns)
        self._exchange_call(self._call(operation, nbytes=nbytes, reduction=reduction, dtype=dtype, root=root))

    def delegate(self, issue: Callable[..., Any], *args: Any) -> None:
        """Perform the compared call by an operation of Gloo."""
        self._run(issue, *args)
        self.in_call = False

    def refuse(self, operation: str, reason: str, timeout_ns: int) -> None:
        """Report that this rank cannot make its call; raise CallMismatch unless no rank can."""
        self._begin(timeout_ns)
        self._exchange_call(self._call(operation_code(operation), refused=reason or "it gave no reason"))
        self.in_call = False

    def all_reduce(self, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int) -> None:
        """Reduce in place."""
        data = _at(address, nbytes)
        rows = self._compare("all_reduce", timeout_ns, data, dtype=dtype, reduction=reduction)
        self._reduce(_typed(data, dtype), rows, reduction)
        self.in_call = False

    def reduce(self, address: int, nbytes: int, dtype: int, reduction: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Reduce in place on the root."""
        data = _at(address, nbytes)
        rows = self._compare("reduce", timeout_ns, data, dtype=dtype, reduction=reduction, root=root)
        # Gloo would leave partial sums in the memory of the other ranks.
        mine = data if self._rank == root else data.clone() if rows is None else torch.empty_like(data)
        self._reduce(_typed(mine, dtype), rows, reduction, root)
        self.in_call = False

    def broadcast(self, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:
        """Copy the root's memory to every rank."""
        data = _at(address, nbytes)
        rows = self._compare("broadcast", timeout_ns, data, dtype=dtype, root=root)
        if rows is not None:
            data.copy_(rows[root])
        else:
            self._broadcast(data, root)
        self.in_call = False

    def all_gather(self, address: int, nbytes: int, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy every rank's memory to every rank."""
        data, parts = _at(address, nbytes), _tensors(out)
        takes = [part.numel() for part in parts]
        gives = [nbytes] * self._size
        rows = self._compare("all_gather", timeout_ns, data, takes, dtype=dtype, gives=gives, takes=takes)
        if rows is not None:
            for part, row in zip(parts, rows, strict=True):
                part.copy_(row)
        elif self._even:
            with joined(parts) as whole:
                self._all_gather(whole, data)
        else:
            parts[self._rank].copy_(data)
            for root, part in enumerate(parts):
                self._broadcast(part, root)
        self.in_call = False

    def gather(self, address: int, nbytes: int, out: Parts | None, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy every rank's memory to the root."""
        data, parts = _at(address, nbytes), _tensors(out)
        gives = [nbytes if rank == root else 0 for rank in range(self._size)]
        takes = [part.numel() for part in parts] or [0] * self._size
        sizes = takes if parts else []
        rows = self._compare("gather", timeout_ns, data, sizes, dtype=dtype, root=root, gives=gives, takes=takes)
        if rows is None:
            self._all_to_all([data], parts, gives, takes)
        for part, row in zip(parts, rows if rows is not None else [], strict=False):
            part.copy_(row)
        self.in_call = False

    def scatter(self, given: Parts | None, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy each part of the root's memory to its rank."""
        data, parts = _at(address, nbytes), _tensors(given)
        gives = [part.numel() for part in parts] or [0] * self._size
        takes = [nbytes if rank == root else 0 for rank in range(self._size)]
        sizes = [nbytes, *(gives if parts else [])]
        self._compare("scatter", timeout_ns, None, sizes, dtype=dtype, root=root, gives=gives, takes=takes)
        self._all_to_all(parts, [data], gives, takes)
        self.in_call = False

    def reduce_scatter(  # noqa: PLR0917  # what the operation takes
        self, given: Parts, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int
    ) -> None:
        """Reduce each part to the rank that it is for."""
        data, parts = _at(address, nbytes), _tensors(given)
        self._compare("reduce_scatter", timeout_ns, None, [nbytes], dtype=dtype, reduction=reduction)
        self._reduce_scatter([_typed(part, dtype) for part in parts], _typed(data, dtype), reduction)
        self.in_call = False

    def all_to_all(self, given: Parts, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy each part to its rank."""
        parts, came = _tensors(given), _tensors(out)
        gives, takes = [part.numel() for part in parts], [part.numel() for part in came]
        self._compare("all_to_all", timeout_ns, None, gives + takes, dtype=dtype, gives=gives, takes=takes)
        self._all_to_all(parts, came, gives, takes)
        self.in_call = False

    def abort(self, rank: int) -> None:
        """End the call under way: it is abandoned where Gloo does not notice by itself that its connections closed."""
        del rank
        self._aborted_at = self._aborted_at or time.monotonic()

    def close(self, within_s: float) -> None:
        """Nothing: the group shuts Gloo down."""

    # Comparing calls ---------------------------------------------------------------------------------------

    def _begin(self, timeout_ns: int) -> None:
        if self.in_call:
            raise EngineAborted("an earlier call of this group failed")
        self.in_call = True
        self._deadline = time.monotonic() + timeout_ns / 1e9
        self._sequence += 1

    def _call(self, operation: int, **fields: Any) -> Call:
        return Call(self._sequence, operation, shape=self.shape, site=self.site, **fields)

    def _compare(
        self,
        operation: str,
        timeout_ns: int,
        data: torch.Tensor | None = None,
        sizes: Sequence[int] = (),
        *,
        gives: list[int] | None = None,
        takes: list[int] | None = None,
        **fields: int,
    ) -> torch.Tensor | None:
        """Exchange records and raise CallMismatch where they differ; return every rank's data where it was inline.

        ``sizes`` are usually all the same. Where they are not on some rank, ``gives`` and ``takes``, the bytes for and
        from each rank, are exchanged too.
        """
        self._begin(timeout_ns)
        size = data.numel() if data is not None else max(sizes, default=0)
        uneven = any(each != size for each in sizes)
        if data is not None and 0 < size <= _INLINE:
            self._written[fingerprint.BYTES : fingerprint.BYTES + size] = memory(data)
        calls = self._exchange_call(self._call(operation_code(operation), nbytes=size, uneven=uneven, **fields))
        self._even, self._empty = calls is None, calls is None and size == 0
        if calls is not None:
            self._compare_sizes(calls, gives or [size] * self._size, takes or [size] * self._size)
        if data is None or size > _INLINE or not self._even:
            return None
        return self._inline(size)

    def _exchange_call(self, call: Call) -> list[Call] | None:
        """Exchange records; return None where all are the same, the calls where sizes are still to be compared."""
        record = call.pack()
        self._written[: len(record)] = record
        self._gather_records()
        head = record[: fingerprint.HEAD_BYTES]
        if not call.uneven and all(self._read[at : at + fingerprint.HEAD_BYTES] == head for at in self._starts):
            return None
        calls = [fingerprint.unpack(self._read[at : at + fingerprint.BYTES]) for at in self._starts]
        judgement = fingerprint.judge(calls, self._numbers)
        if judgement is not None:
            raise CallMismatch(judgement)
        return calls

    def _gather_records(self) -> None:
        """Copy this rank's record to every rank."""
        self._all_gather(self._records.view(-1), self._record)

    def _inline(self, size: int) -> torch.Tensor:
        """Return the ``size`` bytes of data that each record carries."""
        return self._records[:, fingerprint.BYTES : fingerprint.BYTES + size]

    def _compare_sizes(self, calls: list[Call], gives: list[int], takes: list[int]) -> None:
        """Exchange and compare tables of sizes."""
        table = torch.tensor(gives + takes)
        tables = torch.empty(self._size, 2 * self._size, dtype=torch.int64)
        self._all_gather(tables.view(-1), table)
        rows = tables.tolist()
        judgement = fingerprint.judge_sizes(
            [row[: self._size] for row in rows], [row[self._size :] for row in rows], calls, self._numbers
        )
        if judgement is not None:
            raise CallMismatch(judgement)

    # Gloo --------------------------------------------------------------------------------------------------

    def _run(self, issue: Callable[..., Any], *args: Any) -> None:
        """Issue an operation of Gloo and poll it, so that signals and `abort` interrupt the wait.

        Gloo does not always notice that a connection closed: a buffer that is just being sent is in none of the lists
        that it wakes (gloo/transport/tcp/pair.cc, signalException), and stays until its timeout.
        """
        try:
            self._wait(issue(*args))
        except RuntimeError as problem:
            failure = gloo_errors.failure_of(problem)
            if failure is None:
                raise
            raise failure from problem

    def _wait(self, work: Any) -> None:
        try:
            while not _finished(work):
                self._check_aborted()
        except BaseException:
            if not work.is_completed():
                self._leak_gloo()
            raise

    def _check_aborted(self) -> None:
        if self._aborted_at is not None and time.monotonic() - self._aborted_at > _NOTICE_S:
            raise EngineAborted("the group ended during this call")

    def _leak_gloo(self) -> None:
        """Never free Gloo: its destructor would wait for the abandoned call, in whichever thread runs it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _options(self, kind: Any, **values: Any) -> Any:
        timeout = timedelta(seconds=max(_MIN_S, self._deadline - time.monotonic()))
        return _torch.options(kind, timeout=timeout, **values)

    def _all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        self._run(_torch.gather_flat, self._gloo, whole, mine, self._options(_torch.AllgatherOptions))

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        if data.numel():
            self._run(self._gloo.broadcast, [data], self._options(dist.BroadcastOptions, rootRank=root))

    def _all_to_all(self, parts: _Tensors, came: _Tensors, gives: list[int], takes: list[int]) -> None:
        """Send ``gives`` bytes of ``parts`` to each rank and receive ``takes`` bytes from each into ``came``."""
        if self._empty:
            return
        with joined(parts, back=False) as given, joined(came) as taken:
            options = self._options(dist.AllToAllOptions)
            self._run(self._gloo.alltoall_base, taken, given, takes, gives, options)

    def _reduce(self, data: torch.Tensor, rows: torch.Tensor | None, reduction: int, root: int | None = None) -> None:
        """Reduce ``data`` in place; with a root the result is valid there only."""
        if rows is not None:
            if data.numel():
                data.copy_(reduce_rows([row.view(data.dtype) for row in rows], reduction))
            return
        name = REDUCTION_NAMES[reduction]
        if data.dtype not in _GLOO_TYPES:
            self._reduce_slices(data, reduction)
        elif root is None:
            self._run(self._gloo.allreduce, [data], self._options(dist.AllreduceOptions, reduceOp=_GLOO_OPS[name]))
        else:
            options = self._options(dist.ReduceOptions, reduceOp=_GLOO_OPS[name], rootRank=root)
            self._run(self._gloo.reduce, [data], options)
        if name == "AVG" and data.dtype in _GLOO_TYPES:
            data.div_(self._size)

    def _reduce_scatter(self, parts: _Tensors, mine: torch.Tensor, reduction: int) -> None:
        """Reduce all ranks' parts, one per rank, to ``mine``."""
        came = torch.empty(self._size, mine.numel(), dtype=mine.dtype)
        even = [mine.nbytes] * self._size
        self._all_to_all([as_bytes(part) for part in parts], [as_bytes(came)], even, even)
        mine.copy_(reduce_rows(came.unbind(), reduction))

    def _reduce_slices(self, data: torch.Tensor, reduction: int) -> None:
        """Reduce one slice per rank and gather the slices: a rank sends and receives as much as in a ring."""
        each = -(-data.numel() // self._size)
        whole = torch.zeros(self._size, each, dtype=data.dtype)
        whole.view(-1)[: data.numel()].copy_(data)
        came = torch.empty_like(whole)
        even = [each * data.element_size()] * self._size
        self._all_to_all([as_bytes(whole)], [as_bytes(came)], even, even)
        self._all_gather(as_bytes(whole), as_bytes(reduce_rows(came.unbind(), reduction)))
        data.copy_(whole.view(-1)[: data.numel()])


def _finished(work: Any) -> bool:
    """Wait for a moment; raise what Gloo raised, where the operation is over."""
    try:
        work.wait(_POLL)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have ended, well or not, just after the poll.
        work.wait()
    return True


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``, which must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous ``tensor`` as a flat tensor of bytes."""
    return tensor.view(-1).view(torch.uint8)


def _typed(data: torch.Tensor, dtype: int) -> torch.Tensor:
    """Return bytes as elements of the core's ``dtype``; complex numbers as their parts."""
    return data.view(TORCH_DTYPES[dtype & ~COMPLEX])


def _at(address: int, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` at ``address`` as a tensor."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _tensors(parts: Parts | None) -> list[torch.Tensor]:
    return [_at(*part) for part in zip(parts[::2], parts[1::2], strict=True)] if parts else []


@contextmanager
def joined(parts: _Tensors, *, back: bool = True) -> Iterator[torch.Tensor]:
    """Yield ``parts`` as one tensor: their own memory where they are adjacent, else a copy (copied ``back``)."""
    sizes = [part.numel() for part in parts]
    filled = [part for part in parts if part.numel()]
    adjacent = all(
        before.data_ptr() + before.numel() == after.data_ptr() for before, after in itertools.pairwise(filled)
    )
    if not filled or adjacent:
        yield _at(filled[0].data_ptr(), sum(sizes)) if filled else torch.empty(0, dtype=torch.uint8)
        return
    whole = torch.empty(sum(sizes), dtype=torch.uint8) if back else torch.cat(filled)
    yield whole
    if back:
        for part, piece in zip(parts, torch.split(whole, sizes), strict=True):
            part.copy_(piece)
