"""Gloo: collectives of ranks on several hosts, after comparing what every rank calls.

Each call begins with an all_gather of one small record per rank, of one size whatever the ranks call, so that it
completes where they differ. Data that fits into the record travels with it, and the call is done then. Larger data is
moved by Gloo's own operations, as bytes, which works for every type; what Gloo cannot reduce is exchanged and reduced
here, in rank order.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import _torch
from .. import fingerprint, transport_errors
from ..base import CallMismatch, EngineAborted
from ..compared import ComparedEngine, Tensors, as_bytes, joined, memory, sizes_of
from ..dtypes import REDUCTION_NAMES, reduce_rows
from ..fingerprint import Call

__all__ = ["GlooEngine"]

# The timeout for Gloo when the deadline has all but passed; 0 would select its default.
_MIN_S = 0.001

# How long Gloo may take to notice that its connections were closed.
_NOTICE_S = 0.2
# How often a wait returns to Python: signal handlers run then.
_POLL = timedelta(milliseconds=50)

# What Gloo reduces with the same result as the C core: it rounds 16-bit floats at each step, and lacks other types.
_GLOO_TYPES = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})
_SUMS = {"AVG": "SUM", "PREMUL_SUM": "SUM"}


class GlooEngine(ComparedEngine):
    """One rank's end of a group. Subclasses replace how records and data move: the methods in the last part."""

    name = "gloo"

    # Bytes of data that travel with the fingerprint: they cost no further message, and more would slow down every call.
    _inline_bytes = 256

    def __init__(self, gloo: Any, rank: int, ranks: Sequence[int]) -> None:
        """``gloo`` is torch's backend of the group; ``ranks`` are its global ranks, for messages."""
        self._gloo = gloo
        self._rank = rank
        self._numbers = list(ranks)
        self._size = len(ranks)
        self._deadline = 0.0
        self._aborted_at: float | None = None
        # Of the current call: whether all parts are of one size, whether no rank has any data, and every rank's data
        # where it came with the records.
        self._even = True
        self._empty = False
        self._rows: torch.Tensor | None = None
        # Of the last call: what its record was packed from.
        self._packed: tuple[Any, ...] = ()
        self._record_bytes = fingerprint.BYTES + self._inline_bytes
        self._record = torch.zeros(self._record_bytes, dtype=torch.uint8)
        self._written = memory(self._record)
        self._set_records(self._size, range(self._size))

    def _set_records(self, rows: int, places: Sequence[int]) -> None:
        """Make room for ``rows`` records; ``places`` are the rows of the ranks."""
        self._records = torch.zeros(rows, self._record_bytes, dtype=torch.uint8)
        self._read = memory(self._records)
        # Where each rank's record begins among all.
        self._starts = [place * self._record_bytes for place in places]

    def delegate(self, issue: Callable[..., Any], *args: Any) -> None:
        """Perform the compared call by an operation of Gloo."""
        self._run(issue, *args)
        self._end()

    def abort(self, rank: int) -> None:
        """End the call under way: it is abandoned where Gloo does not notice by itself that its connections closed."""
        del rank
        self._aborted_at = self._aborted_at or time.monotonic()

    def close(self, within_s: float) -> None:
        """Nothing: the group shuts Gloo down."""

    # Comparing calls -----------------------------------------------------------------------------------------------

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
        if self.in_call or self._aborted_at is not None:
            raise EngineAborted("an earlier call of this group failed" if self.in_call else "the group ended")
        self.in_call = True
        self._deadline = time.monotonic() + timeout_ns / 1e9
        self._sequence += 1
        inline = data is not None and nbytes <= self._inline_bytes
        if data is not None and inline and nbytes:
            self._written[fingerprint.BYTES : fingerprint.BYTES + nbytes] = memory(data)
        uneven = any(part.numel() != nbytes for part in parts)
        calls = self._exchange_call(operation, nbytes, uneven, tuple(fields.items()))
        self._even, self._empty = calls is None, calls is None and nbytes == 0
        if calls is not None:
            # Operations whose parts are all of one size exchange as much with each rank.
            even = [nbytes] * self._size
            self._compare_sizes(calls, sizes_of(given) or even, sizes_of(came) or even)
        self._rows = self._inline(nbytes) if inline and self._even else None

    def _exchange_call(self, *call: Any) -> list[Call] | None:
        """Exchange records; return None where all are the same, the calls where sizes are still to be compared."""
        operation, nbytes, uneven, fields = call
        if (packed := (*call, self.shape, self.site)) != self._packed:
            # Packing takes 4 us; a training loop makes the same calls again and again.
            made = Call(
                self._sequence, operation, nbytes, uneven=uneven, shape=self.shape, site=self.site, **dict(fields)
            )
            record = made.pack()
            self._written[: len(record)] = record
            self._packed = packed
        fingerprint.SEQUENCE.pack_into(self._written, 0, self._sequence)
        self._gather_records()
        head = self._written[: fingerprint.HEAD_BYTES]
        if not uneven and all(self._read[at : at + fingerprint.HEAD_BYTES] == head for at in self._starts):
            return None
        calls = [fingerprint.unpack(self._read[at : at + fingerprint.BYTES]) for at in self._starts]
        judgement = fingerprint.judge(calls, self._numbers)
        if judgement is not None:
            raise CallMismatch(judgement)
        return calls

    def _inline(self, size: int) -> torch.Tensor:
        """Return the ``size`` bytes of data that each record carries."""
        return self._records[:, fingerprint.BYTES : fingerprint.BYTES + size]

    def _compare_sizes(self, calls: list[Call], gives: list[int], takes: list[int]) -> None:
        """Exchange and compare tables of sizes."""
        tables = torch.empty(self._size, 2 * self._size, dtype=torch.int64)
        self._flat_all_gather(tables.view(-1), torch.tensor(gives + takes))
        rows = tables.tolist()
        judgement = fingerprint.judge_sizes(
            [row[: self._size] for row in rows], [row[self._size :] for row in rows], calls, self._numbers
        )
        if judgement is not None:
            raise CallMismatch(judgement)

    # What ComparedEngine leaves to subclasses ----------------------------------------------------------------------

    def _reduce(self, data: torch.Tensor, reduction: int, root: int | None) -> None:
        mine = root in {None, self._rank}
        if self._rows is None:
            # Gloo would leave partial sums in the memory of the other ranks.
            self._large_reduce(data if mine else data.clone(), reduction, root)
        elif mine and data.numel():
            data.copy_(reduce_rows([row.view(data.dtype) for row in self._rows], reduction))

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        if self._rows is None:
            self._large_broadcast(data, root)
        else:
            data.copy_(self._rows[root])

    def _all_gather(self, data: torch.Tensor, parts: Tensors) -> None:
        if self._rows is not None:
            for part, row in zip(parts, self._rows, strict=True):
                part.copy_(row)
        elif self._even:
            with joined(parts) as whole:
                self._flat_all_gather(whole, data)
        else:
            parts[self._rank].copy_(data)
            for root, part in enumerate(parts):
                self._large_broadcast(part, root)

    def _gather(self, given: Tensors, came: Tensors, root: int) -> None:
        if self._rows is None:
            super()._gather(given, came, root)
        elif self._rank == root:
            for part, row in zip(came, self._rows, strict=True):
                part.copy_(row)

    def _reduce_scatter(self, parts: Tensors, mine: torch.Tensor, reduction: int) -> None:
        came = torch.empty(self._size, mine.numel(), dtype=mine.dtype)
        self._all_to_all([as_bytes(part) for part in parts], [as_bytes(row) for row in came])
        mine.copy_(reduce_rows(came.unbind(), reduction))

    def _all_to_all(self, given: Tensors, came: Tensors) -> None:
        if self._empty:
            return
        gives, takes = sizes_of(given), sizes_of(came)
        with joined(given, back=False) as sent, joined(came) as received:
            self._run(self._gloo.alltoall_base, received, sent, takes, gives, self._options(dist.AllToAllOptions))

    # Gloo --------------------------------------------------------------------------------------------------

    def _run(self, issue: Callable[..., Any], *args: Any) -> None:
        """Issue an operation of Gloo and poll it, so that signals and `abort` interrupt the wait.

        Gloo does not always notice that a connection closed: a buffer that is just being sent is in none of the lists
        that it wakes (gloo/transport/tcp/pair.cc, signalException), and stays until its timeout.
        """
        work = None
        try:
            work = issue(*args)
            while not _finished(work):
                self._check_aborted()
        except BaseException as problem:
            if work is not None and not work.is_completed():
                self._leak_gloo()
            failure = transport_errors.failure_of(problem)
            if failure is None:
                raise
            raise failure from problem

    def _check_aborted(self) -> None:
        if self._aborted_at is not None and time.monotonic() - self._aborted_at > _NOTICE_S:
            raise EngineAborted("the group ended during this call")

    def _leak_gloo(self) -> None:
        """Never free Gloo: its destructor would wait for the abandoned call, in whichever thread runs it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _options(self, kind: Any, **values: Any) -> Any:
        timeout = timedelta(seconds=max(_MIN_S, self._deadline - time.monotonic()))
        return _torch.options(kind, timeout=timeout, **values)

    # How records and data move -------------------------------------------------------------------------------------

    def _gather_records(self) -> None:
        """Copy this rank's record to every rank."""
        self._flat_all_gather(self._records.view(-1), self._record)

    def _flat_all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        self._run(_torch.gather_flat, self._gloo, whole, mine, self._options(_torch.AllgatherOptions))

    def _large_broadcast(self, data: torch.Tensor, root: int) -> None:
        if data.numel():
            self._run(self._gloo.broadcast, [data], self._options(dist.BroadcastOptions, rootRank=root))

    def _large_reduce(self, data: torch.Tensor, reduction: int, root: int | None) -> None:
        """Reduce ``data`` in place; with a root the result is valid there only."""
        name = REDUCTION_NAMES[reduction]
        if data.dtype not in _GLOO_TYPES:
            self._reduce_slices(data, reduction)
            return
        op = getattr(dist.ReduceOp, _SUMS.get(name, name))
        if root is None:
            self._run(self._gloo.allreduce, [data], self._options(dist.AllreduceOptions, reduceOp=op))
        else:
            self._run(self._gloo.reduce, [data], self._options(dist.ReduceOptions, reduceOp=op, rootRank=root))
        if name == "AVG":
            data.div_(self._size)

    def _reduce_slices(self, data: torch.Tensor, reduction: int) -> None:
        """Reduce one slice per rank and gather the slices: a rank sends and receives as much as in a ring."""
        each = -(-data.numel() // self._size)
        whole = torch.zeros(self._size, each, dtype=data.dtype)
        whole.view(-1)[: data.numel()].copy_(data)
        mine = torch.empty(each, dtype=data.dtype)
        self._reduce_scatter(list(whole), mine, reduction)
        self._flat_all_gather(as_bytes(whole), as_bytes(mine))
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
