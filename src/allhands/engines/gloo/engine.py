"""Collectives of ranks on several hosts: over Gloo, after everyone has told everyone what it calls.

A `Relay` has the methods of the C core's Segment and stands in its place. Each call begins with one gathering of a
small record from every rank, the same for all whatever they call, so that it never hangs on a difference. Data that
fits into the record comes with it, and the call is done with that. Larger data moves by Gloo's own operations, as
bytes, which have no unsupported type; what Gloo cannot reduce is exchanged and reduced here, in rank order.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ... import _core, _torch
from ...diagnosis.majority import Judgement
from .. import fingerprint
from ..fingerprint import Call
from ..shm import engine as shm
from .reduce_rows import fold

__all__ = ["SHEET", "Difference", "Relay", "flat", "memory", "together"]

# Data that travels with the record. It costs no message of its own; much more would cost every call its time.
_ROOM = 256
SHEET = fingerprint.BYTES + _ROOM

# What is left for Gloo when the deadline is all but there; 0 would mean its own default.
_LEAST_S = 0.001

# How long Gloo may take to notice that its connections are cut, and how often to look: a signal waits that long.
_NOTICE_S = 0.2
_MOMENT = timedelta(milliseconds=50)

_TYPES = {code: dtype for dtype, code in shm.DTYPES.items()}
_KINDS = {name: kind for kind, name in enumerate(shm.KINDS)}

# What Gloo reduces by itself as the C core would: it rounds 16-bit floats at each step, and lacks other types.
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

_Places = tuple[int, ...]


class Difference(Exception):
    """Ranks made different calls. Every rank of the group raises it, with the same judgement."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__("; ".join(judgement.lines))
        self.judgement = judgement


class Relay:
    """One rank's end of a group on several hosts. One call at a time; addresses and sizes must be right.

    Each operation returns 0, or raises: `Difference`, or what Gloo raises. The ranks may be out of step then:
    `under_way` stays, no further call is taken, and the group must end.
    """

    # Where the short way finds the group, for an engine that has one.
    gate: _core.Ferry | None = None

    def __init__(self, gloo: Any, rank: int, ranks: Sequence[int]) -> None:
        self.site = ""
        self.shape = ""
        self.under_way = False
        self._gloo = gloo
        self._rank = rank
        self._numbers = list(ranks)
        self._size = len(ranks)
        self._sequence = 0
        self._until = 0.0
        self._over_since: float | None = None
        # Of the call under way: whether everyone's parts are of one size, and whether nobody has any data.
        self._even = True
        self._empty = False
        self._sheet = torch.zeros(SHEET, dtype=torch.uint8)
        self._sheets = torch.zeros(self._size, SHEET, dtype=torch.uint8)
        self._written, self._read = memory(self._sheet), memory(self._sheets)
        # Where the record of each rank begins among everyone's.
        self._starts: Sequence[int] = range(0, self._size * SHEET, SHEET)

    @property
    def segment(self) -> Relay:
        """Where a group looks for the operations."""
        return self

    def sequence(self) -> int:
        """Return the number of the next call."""
        return self._sequence

    # The operations of the core ----------------------------------------------------------------------------

    def barrier(self, limit_ns: int) -> int:
        """Wait for everyone: the record of everyone is all it takes."""
        self._meet("barrier", limit_ns)
        return self.done()

    def agree(self, kind: int, reduction: int, dtype: int, nbytes: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Compare a call that the caller then lets Gloo do by `through`, and ends by `done`."""
        self._begin(limit_ns)
        self._tell(self._call(kind, nbytes=nbytes, reduction=reduction, dtype=dtype, root=root))
        return 0

    def refuse(self, name: str, why: str, limit_ns: int) -> None:
        """Tell the others that this rank cannot make its call; raise Difference unless no rank can."""
        self._begin(limit_ns)
        self._tell(self._call(_KINDS.get(name, 0), refused=why or "it did not say why"))
        self.done()

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:
        """Reduce to everyone."""
        data = _bytes(address, size)
        rows = self._meet("all_reduce", limit_ns, data, dtype=dtype, reduction=reduction)
        self._reduce(data.view(_TYPES[dtype & ~shm.COMPLEX]), rows, reduction)
        return self.done()

    def reduce(self, address: int, size: int, dtype: int, reduction: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce to the root; the data of the others stays as it is."""
        data = _bytes(address, size)
        rows = self._meet("reduce", limit_ns, data, dtype=dtype, reduction=reduction, root=root)
        # Gloo would leave sums of some ranks in the tensors of the others.
        mine = data if self._rank == root else data.clone() if rows is None else torch.empty_like(data)
        self._reduce(mine.view(_TYPES[dtype & ~shm.COMPLEX]), rows, reduction, root)
        return self.done()

    def broadcast(self, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:
        """Give the root's data to everyone."""
        data = _bytes(address, size)
        rows = self._meet("broadcast", limit_ns, data, dtype=dtype, root=root)
        if rows is not None:
            data.copy_(rows[root])
        else:
            self._broadcast(data, root)
        return self.done()

    def all_gather(self, address: int, size: int, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give everyone's data to everyone."""
        data, parts = _bytes(address, size), _parts(out)
        takes = [part.numel() for part in parts]
        gives = [size] * self._size
        rows = self._meet("all_gather", limit_ns, data, takes, dtype=dtype, gives=gives, takes=takes)
        if rows is not None:
            for part, row in zip(parts, rows, strict=True):
                part.copy_(row)
        elif self._even:
            with together(parts) as whole:
                self._gather(whole, data)
        else:
            parts[self._rank].copy_(data)
            for root, part in enumerate(parts):
                self._broadcast(part, root)
        return self.done()

    def gather(self, address: int, size: int, out: _Places | None, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give everyone's data to the root."""
        data, parts = _bytes(address, size), _parts(out)
        gives = [size if rank == root else 0 for rank in range(self._size)]
        takes = [part.numel() for part in parts] or [0] * self._size
        sizes = takes if parts else []
        rows = self._meet("gather", limit_ns, data, sizes, dtype=dtype, root=root, gives=gives, takes=takes)
        if rows is None:
            self._swap([data], parts, gives, takes)
        for part, row in zip(parts, rows if rows is not None else [], strict=False):
            part.copy_(row)
        return self.done()

    def scatter(self, given: _Places | None, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give each rank its part of the root's data."""
        data, parts = _bytes(address, size), _parts(given)
        gives = [part.numel() for part in parts] or [0] * self._size
        takes = [size if rank == root else 0 for rank in range(self._size)]
        sizes = [size, *(gives if parts else [])]
        self._meet("scatter", limit_ns, None, sizes, dtype=dtype, root=root, gives=gives, takes=takes)
        self._swap(parts, [data], gives, takes)
        return self.done()

    def reduce_scatter(self, given: _Places, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce each part of everyone's data to the rank it is for."""
        data, parts = _bytes(address, size), _parts(given)
        self._meet("reduce_scatter", limit_ns, None, [size], dtype=dtype, reduction=reduction)
        kind = _TYPES[dtype & ~shm.COMPLEX]
        self._reduce_parts([part.view(kind) for part in parts], data.view(kind), reduction)
        return self.done()

    def all_to_all(self, given: _Places, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give each rank its part of everyone's data."""
        parts, came = _parts(given), _parts(out)
        gives, takes = [part.numel() for part in parts], [part.numel() for part in came]
        self._meet("all_to_all", limit_ns, None, gives + takes, dtype=dtype, gives=gives, takes=takes)
        self._swap(parts, came, gives, takes)
        return self.done()

    # The meeting -------------------------------------------------------------------------------------------

    def _begin(self, limit_ns: int) -> None:
        if self.under_way:
            raise RuntimeError("connection closed: an earlier call of this group failed")
        self.under_way = True
        self._until = time.monotonic() + limit_ns / 1e9
        self._sequence += 1

    def done(self) -> int:
        """Note that a call came to its end, so that the next may begin; return what the core returns then."""
        self.under_way = False
        return 0

    def _call(self, kind: int, **what: Any) -> Call:
        return Call(self._sequence, kind, shape=self.shape, site=self.site, **what)

    def _meet(
        self,
        name: str,
        limit_ns: int,
        data: torch.Tensor | None = None,
        sizes: Sequence[int] = (),
        *,
        gives: list[int] | None = None,
        takes: list[int] | None = None,
        **what: int,
    ) -> torch.Tensor | None:
        """Tell everyone of this call and hear of theirs; return everyone's data where it came along.

        ``sizes`` are those that are usually all the same; where on some rank they are not, ``gives`` and ``takes``, the
        bytes for and from each rank, are exchanged too.
        """
        self._begin(limit_ns)
        size = data.numel() if data is not None else max(sizes, default=0)
        uneven = any(each != size for each in sizes)
        if data is not None and 0 < size <= _ROOM:
            self._written[fingerprint.BYTES : fingerprint.BYTES + size] = memory(data)
        calls = self._tell(self._call(_KINDS[name], nbytes=size, uneven=uneven, **what))
        self._even, self._empty = calls is None, calls is None and size == 0
        if calls is not None:
            self._compare_sizes(calls, gives or [size] * self._size, takes or [size] * self._size)
        if data is None or size > _ROOM or not self._even:
            return None
        return self._rows(size)

    def _tell(self, call: Call) -> list[Call] | None:
        """Exchange records; return None where all are the same, the calls where sizes are still to be compared."""
        record = call.pack()
        self._written[: len(record)] = record
        self._show()
        head = record[: fingerprint.HEAD_BYTES]
        if not call.uneven and all(self._read[at : at + fingerprint.HEAD_BYTES] == head for at in self._starts):
            return None
        calls = [fingerprint.unpack(self._read[at : at + fingerprint.BYTES]) for at in self._starts]
        judgement = fingerprint.judge(calls, self._numbers)
        if judgement is not None:
            raise Difference(judgement)
        return calls

    def _show(self) -> None:
        """Give this rank's sheet to everyone."""
        self._gather(self._sheets.view(-1), self._sheet)

    def _rows(self, size: int) -> torch.Tensor:
        """Return the ``size`` bytes of data that came with each rank's record."""
        return self._sheets[:, fingerprint.BYTES : fingerprint.BYTES + size]

    def _compare_sizes(self, calls: list[Call], gives: list[int], takes: list[int]) -> None:
        """Exchange tables of sizes, because someone's are uneven."""
        table = torch.tensor(gives + takes)
        tables = torch.empty(self._size, 2 * self._size, dtype=torch.int64)
        self._gather(tables.view(-1), table)
        rows = tables.tolist()
        judgement = fingerprint.judge_sizes(
            [row[: self._size] for row in rows], [row[self._size :] for row in rows], calls, self._numbers
        )
        if judgement is not None:
            raise Difference(judgement)

    # Gloo --------------------------------------------------------------------------------------------------

    def through(self, issue: Any, *args: Any) -> None:
        """Let Gloo do what everyone agreed on, and wait for it with an ear for signals and for the group's end.

        Inside torch's own wait a signal's handler would run only at the end of the call. And Gloo does not always
        notice that a connection ended: a buffer that is just being sent stands in none of the lists that it wakes
        (gloo/transport/tcp/pair.cc, signalException), and stays until its timeout.
        """
        self._wait(issue(*args))

    def _wait(self, work: Any) -> None:
        try:
            while not self._finished(work):
                if self._over_since is not None and time.monotonic() - self._over_since > _NOTICE_S:
                    self._leave_behind()
        except BaseException:
            if not work.is_completed():
                self._keep()
            raise

    def _keep(self) -> None:
        """Never free Gloo: its destructor waits for what is left behind, in whatever thread comes upon it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def _finished(self, work: Any) -> bool:
        """Wait for a moment; raise what Gloo raised, where it is over."""
        try:
            work.wait(_MOMENT)
        except RuntimeError:
            if not work.is_completed():
                return False
            # It may have come to its end, good or bad, just after the moment had passed.
            work.wait()
        return True

    def _leave_behind(self) -> NoReturn:
        raise RuntimeError("connection closed: the group ended in the middle of this call")

    def _options(self, kind: Any, **values: Any) -> Any:
        made = kind()
        made.timeout = timedelta(seconds=max(_LEAST_S, self._until - time.monotonic()))
        for name, value in values.items():
            setattr(made, name, value)
        return made

    def _gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        options = self._options(_torch.AllgatherOptions)
        self.through(_torch.gather_flat, self._gloo, whole, mine, options)

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        if data.numel():
            self.through(self._gloo.broadcast, [data], self._options(dist.BroadcastOptions, rootRank=root))

    def _swap(
        self, parts: Sequence[torch.Tensor], came: Sequence[torch.Tensor], gives: list[int], takes: list[int]
    ) -> None:
        """Give each rank ``gives`` bytes of ``parts`` and take ``takes`` bytes from each into ``came``."""
        if self._empty:
            return
        with together(parts, back=False) as given, together(came) as taken:
            options = self._options(dist.AllToAllOptions)
            self.through(self._gloo.alltoall_base, taken, given, takes, gives, options)

    def _reduce(self, data: torch.Tensor, rows: torch.Tensor | None, reduction: int, root: int | None = None) -> None:
        """Reduce ``data`` in place; the result counts on the root only, where there is one."""
        if rows is not None:
            if data.numel():
                data.copy_(fold([row.view(data.dtype) for row in rows], reduction))
            return
        name = shm.REDUCTION_NAMES[reduction]
        if data.dtype not in _GLOO_TYPES:
            self._reduce_slices(data, reduction)
        elif root is None:
            options = self._options(dist.AllreduceOptions, reduceOp=_GLOO_OPS[name])
            self.through(self._gloo.allreduce, [data], options)
        else:
            options = self._options(dist.ReduceOptions, reduceOp=_GLOO_OPS[name], rootRank=root)
            self.through(self._gloo.reduce, [data], options)
        if name == "AVG" and data.dtype in _GLOO_TYPES:
            data.div_(self._size)

    def _reduce_parts(self, parts: Sequence[torch.Tensor], mine: torch.Tensor, reduction: int) -> None:
        """Reduce everyone's parts, one for each rank, and put this rank's into ``mine``."""
        came = torch.empty(self._size, mine.numel(), dtype=mine.dtype)
        even = [mine.nbytes] * self._size
        self._swap([flat(part) for part in parts], [flat(came)], even, even)
        mine.copy_(fold(came.unbind(), reduction))

    def _reduce_slices(self, data: torch.Tensor, reduction: int) -> None:
        """Give each rank its slice of everyone's, reduce that here, and give it to everyone: the bytes of a ring."""
        each = -(-data.numel() // self._size)
        whole = torch.zeros(self._size, each, dtype=data.dtype)
        whole.view(-1)[: data.numel()].copy_(data)
        came = torch.empty_like(whole)
        even = [each * data.element_size()] * self._size
        self._swap([flat(whole)], [flat(came)], even, even)
        self._gather(flat(whole), flat(fold(came.unbind(), reduction)))
        data.copy_(whole.view(-1)[: data.numel()])

    def end(self, rank: int) -> None:
        """The group is over, because of ``rank`` or not: what Gloo does not end by itself is left behind."""
        del rank
        self._over_since = self._over_since or time.monotonic()

    def close(self) -> None:
        """Say that this rank makes no further call."""


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``, which must live as long."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as bytes, which Gloo moves whatever they are."""
    return tensor.view(-1).view(torch.uint8)


def _bytes(address: int, size: int) -> torch.Tensor:
    """Return ``size`` bytes at ``address`` as a tensor; whoever gave the address keeps them there."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def _parts(places: _Places | None) -> list[torch.Tensor]:
    """Return the tensors at (address, bytes, address, bytes …)."""
    return [_bytes(*place) for place in zip(places[::2], places[1::2], strict=True)] if places else []


@contextmanager
def together(parts: Sequence[torch.Tensor], *, back: bool = True) -> Iterator[torch.Tensor]:
    """Give ``parts`` as one tensor: the memory itself where they lie side by side, else a copy (copied back)."""
    sizes = [part.numel() for part in parts]
    filled = [part for part in parts if part.numel()]
    side_by_side = all(
        before.data_ptr() + before.numel() == after.data_ptr() for before, after in itertools.pairwise(filled)
    )
    if not filled or side_by_side:
        yield _bytes(filled[0].data_ptr(), sum(sizes)) if filled else torch.empty(0, dtype=torch.uint8)
        return
    whole = torch.empty(sum(sizes), dtype=torch.uint8) if back else torch.cat(filled)
    yield whole
    if back:
        for part, piece in zip(parts, torch.split(whole, sizes), strict=True):
            part.copy_(piece)
