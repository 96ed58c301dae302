"""Collectives over MPI: what everyone calls goes ahead of the data, and the data from tensor to tensor.

An `Mpi` has the methods of the C core's Segment, as a `Relay` has. Records and data are begun together by MPI's
non-blocking calls; the records are waited for and compared first, so that a difference never hangs, and the data is
mostly there by then. Waiting looks at the deadline, at the group's end and at signals. Reductions are done here, in
rank order and each slice once, so that every rank has the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from ... import _core
from .. import fingerprint, shm
from ..relay import Difference, Relay
from .world import World

__all__ = ["Mpi"]

_KINDS = {name: kind for kind, name in enumerate(shm.KINDS)}

# Up to so many ranks everyone writes to everyone; beyond, MPI's own trees make fewer messages.
_FEW = 8

# Data that comes with the record, as a Relay has it.
_ROOM = 256

# One message's bytes at most: MPI counts in 31 bits.
_MOST = 1 << 30

# All ranks' data together: up to this much everyone reduces everything, which saves a meeting.
_ONE_SHOT = 128 << 10

# What is reduced at a time: bytes of all ranks together, and of one at least. Measured with 2 ranks: less costs more
# meetings, and more was no faster.
_BLOCK, _LEAST_BLOCK = 16 << 20, 64 << 10

# A line of the cache, in which whole elements of every type fit.
_LINE = 64

# Records that are kept, of 150 bytes or so: more different calls than a model makes in a step.
_MOST_PACKED = 1024

# Tags of what stands in no other order: records, data, tables of sizes.
_RECORD, _DATA, _TABLE = 1, 2, 3

# How often to look before giving the core away, where every rank has one: about as long as a small call takes.
_SPINS = 1000

# How long to give the core away each time before sleeping in between, which nobody ends: a message wakes no one. Then
# how long a sleep is, and how often MPI is asked each time.
_YIELD_S, _NAP_S, _BURST = 0.05, 100e-6, 8

_Places = tuple[int, ...]


class Mpi(Relay):
    """One rank's end of a group. One call at a time; addresses and sizes must be right.

    Each operation returns 0, or raises: `Difference`, or RuntimeError. The ranks may be out of step then: `under_way`
    stays, no further call is taken, and the group must end.
    """

    def __init__(self, world: World, comm: Any, gloo: Any, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(gloo, rank, ranks)
        self.world = world
        self.comm = comm
        self._mpi = world.module
        self._byte = self._mpi.BYTE
        self._memory = self._mpi.memory.fromaddress
        self._testall = self._mpi.Request.Testall
        self._peers = [peer for peer in range(self._size) if peer != rank]
        # Looking is fastest where every rank has a core, and a disaster where it keeps the awaited rank off its core.
        self._spins = _SPINS if len(os.sched_getaffinity(0)) >= self._size else 0
        self._few = self._size <= _FEW
        # Records of few ranks are sent the same way each time, so MPI is told once.
        self._records: list[Any] = []
        if self._few:
            size = self._sheet.numel()
            row = self._sheets.data_ptr()
            sheet = [self._memory(self._sheet.data_ptr(), size), self._byte]
            rows = [[self._memory(row + peer * size, size), self._byte] for peer in self._peers]
            with world.lock:
                self._records = [
                    comm.Recv_init(room, source=peer, tag=_RECORD) for room, peer in zip(rows, self._peers, strict=True)
                ]
                self._records += [comm.Send_init(sheet, dest=peer, tag=_RECORD) for peer in self._peers]
        # What MPI may still write to or read from: all that was begun and is not known to be over.
        self._begun: list[Any] = []
        # Of these, what is to come.
        self._coming: list[Any] = []
        self._space: Any = None
        # Of the call under way, and records of earlier ones by what they say.
        self._nbytes, self._uneven = 0, False
        self._packed: dict[tuple[Any, ...], bytes] = {}

    # The operations of the core ----------------------------------------------------------------------------

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:
        """Reduce to everyone."""
        if size <= _ROOM:
            return super().all_reduce(address, size, dtype, reduction, limit_ns)
        self._open("all_reduce", limit_ns, size, dtype, reduction)
        self._reduce_to(address, size, dtype, reduction, None)
        return self.done()

    def reduce(self, address: int, size: int, dtype: int, reduction: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce to the root; the data of the others stays as it is."""
        if size <= _ROOM:
            return super().reduce(address, size, dtype, reduction, root, limit_ns)
        self._open("reduce", limit_ns, size, dtype, reduction, root)
        self._reduce_to(address, size, dtype, reduction, root)
        return self.done()

    def broadcast(self, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:
        """Give the root's data to everyone."""
        if size <= _ROOM:
            return super().broadcast(address, size, dtype, root, limit_ns)
        self._open("broadcast", limit_ns, size, dtype, root=root)
        if not self._few:
            self._compare()
            for at in range(address, address + size, _MOST):
                part = self._memory(at, min(_MOST, address + size - at))
                with self.world.lock:
                    told = self.comm.Ibcast([part, self._byte], root=root)
                self._wait([told])
            return self.done()
        if self._rank == root:
            for peer in self._peers:
                self._send(address, size, peer)
        else:
            self._receive(address, size, root)
        self._close()
        return self.done()

    def all_gather(self, address: int, size: int, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give everyone's data to everyone."""
        places, takes = out[::2], list(out[1::2])
        uneven = any(each != size for each in takes)
        if size <= _ROOM and not uneven:
            return super().all_gather(address, size, out, dtype, limit_ns)
        self._open("all_gather", limit_ns, size, dtype, uneven=uneven)
        self._exchange([(address, size)] * self._size, list(zip(places, takes, strict=True)))
        self._close([size] * self._size, takes)
        return self.done()

    def gather(self, address: int, size: int, out: _Places | None, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give everyone's data to the root."""
        takes = list(out[1::2]) if out else [0] * self._size
        uneven = bool(out) and any(each != size for each in takes)
        self._open("gather", limit_ns, size, dtype, root=root, uneven=uneven)
        gives = [size if rank == root else 0 for rank in range(self._size)]
        rooms = list(zip(out[::2], takes, strict=True)) if out else [(0, 0)] * self._size
        self._exchange([(address, each) for each in gives], rooms)
        self._close(gives, takes)
        return self.done()

    def scatter(self, given: _Places | None, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give each rank its part of the root's data."""
        gives = list(given[1::2]) if given else [0] * self._size
        uneven = bool(given) and any(each != size for each in gives)
        self._open("scatter", limit_ns, size, dtype, root=root, uneven=uneven)
        takes = [size if rank == root else 0 for rank in range(self._size)]
        parts = list(zip(given[::2], gives, strict=True)) if given else [(0, 0)] * self._size
        self._exchange(parts, [(address, each) for each in takes])
        self._close(gives, takes)
        return self.done()

    def reduce_scatter(self, given: _Places, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce each part of everyone's data to the rank it is for."""
        self._open("reduce_scatter", limit_ns, size, dtype, reduction)
        each = self._block(dtype)
        rows = self._spaces(each)
        compared = False
        for at in range(0, size, each):
            length = min(each, size - at)
            for peer in self._peers:
                self._receive(rows[peer], length, peer)
            for peer in self._peers:
                self._send(given[2 * peer] + at, length, peer)
            if not compared:
                self._compare()
                compared = True
            self._finish()
            rows[self._rank] = given[2 * self._rank] + at
            _core.reduce(dtype, reduction, address + at, tuple(rows), length)
        if not compared:
            self._compare()
        return self.done()

    def all_to_all(self, given: _Places, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give each rank its part of everyone's data."""
        gives, takes = list(given[1::2]), list(out[1::2])
        size = max(gives + takes)
        uneven = any(each != size for each in gives + takes)
        self._open("all_to_all", limit_ns, size, dtype, uneven=uneven)
        self._exchange(list(zip(given[::2], gives, strict=True)), list(zip(out[::2], takes, strict=True)))
        self._close(gives, takes)
        return self.done()

    # The meeting -------------------------------------------------------------------------------------------

    def _open(  # noqa: PLR0917  # what a record has
        self,
        name: str,
        limit_ns: int,
        size: int,
        dtype: int,
        reduction: int = 0,
        root: int = -1,
        *,
        uneven: bool = False,
    ) -> None:
        """Begin a call and tell the others of it; `_compare` hears what they call."""
        self._begin(limit_ns)
        self._nbytes, self._uneven = size, uneven
        # A training loop makes the same few calls over and over: only their number changes.
        key = (name, size, dtype, reduction, root, uneven, self.site, self.shape)
        record = self._packed.get(key)
        if record is None:
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            told = self._call(_KINDS[name], nbytes=size, dtype=dtype, reduction=reduction, root=root, uneven=uneven)
            record = self._packed[key] = told.pack()
        self._written[: len(record)] = record
        fingerprint.SEQUENCE.pack_into(self._written, 0, self._sequence)
        self._tell_all()

    def _tell_all(self) -> None:
        """Begin to exchange what stands on this rank's sheet."""
        own = self._rank * len(self._written)
        self._read[own : own + len(self._written)] = self._written
        if self._records:
            with self.world.lock:
                self._mpi.Prequest.Startall(self._records)

    def _compare(self, gives: list[int] | None = None, takes: list[int] | None = None) -> None:
        """Wait for what the others call; raise Difference where it is not what this rank calls."""
        self._hear()
        size, head = len(self._written), self._written[: fingerprint.HEAD_BYTES]
        starts = range(0, self._size * size, size)
        if not self._uneven and all(self._read[at : at + fingerprint.HEAD_BYTES] == head for at in starts):
            return
        calls = [fingerprint.unpack(self._read[at : at + fingerprint.BYTES]) for at in starts]
        judgement = fingerprint.judge(calls, self._numbers)
        if judgement is not None:
            raise Difference(judgement)
        if any(call.uneven for call in calls):
            every = [self._nbytes] * self._size
            self._compare_sizes(calls, gives or every, takes or every)

    def _hear(self) -> None:
        """Wait until everyone's record is here."""
        if not self._few:
            size = len(self._written)
            mine, whole = (
                self._memory(self._sheet.data_ptr(), size),
                self._memory(self._sheets.data_ptr(), size * self._size),
            )
            with self.world.lock:
                told = self.comm.Iallgather([mine, self._byte], [whole, self._byte])
            self._wait([told])
        elif self._records:
            self._wait(self._records)

    def _gather(self, whole: Any, mine: Any) -> None:
        """Do what a Relay asks for: its records, or tables of the sizes of parts."""
        if whole.data_ptr() == self._sheets.data_ptr():
            self._tell_all()
            self._hear()
            return
        size, begun = mine.nbytes, []
        ctypes.memmove(whole.data_ptr() + self._rank * size, mine.data_ptr(), size)
        with self.world.lock:
            for peer in self._peers:
                room = self._memory(whole.data_ptr() + peer * size, size)
                begun.append(self.comm.Irecv([room, self._byte], source=peer, tag=_TABLE))
            given = [self._memory(mine.data_ptr(), size), self._byte]
            begun += [self.comm.Isend(given, dest=peer, tag=_TABLE) for peer in self._peers]
        self._wait(begun)

    def _close(self, gives: list[int] | None = None, takes: list[int] | None = None) -> None:
        """Compare what everyone calls, then wait for the data."""
        self._compare(gives, takes)
        self._finish()

    # Data --------------------------------------------------------------------------------------------------

    def _send(self, address: int, size: int, peer: int) -> None:
        for at in range(address, address + size, _MOST):
            part = self._memory(at, min(_MOST, address + size - at), True)
            with self.world.lock:
                self._begun.append(self.comm.Isend([part, self._byte], dest=peer, tag=_DATA))

    def _receive(self, address: int, size: int, peer: int) -> None:
        for at in range(address, address + size, _MOST):
            part = self._memory(at, min(_MOST, address + size - at))
            with self.world.lock:
                self._begun.append(self.comm.Irecv([part, self._byte], source=peer, tag=_DATA))
            self._coming.append(self._begun[-1])

    def _exchange(self, parts: Sequence[tuple[int, int]], rooms: Sequence[tuple[int, int]]) -> None:
        """Begin to give each rank its part and to take each rank's into its room; copy this rank's own."""
        for peer in self._peers:
            self._receive(*rooms[peer], peer)
        for peer in self._peers:
            self._send(*parts[peer], peer)
        (source, size), (target, room) = parts[self._rank], rooms[self._rank]
        if source != target:
            ctypes.memmove(target, source, min(size, room))

    def _block(self, dtype: int) -> int:
        """Return how many bytes of each rank are reduced at a time: whole elements, and lines of the cache."""
        del dtype  # No element is larger than a line.
        return max(_LEAST_BLOCK, _BLOCK // self._size) // _LINE * _LINE

    def _spaces(self, each: int) -> list[int]:
        """Return where ``each`` bytes of every rank may be put."""
        # A line between rows: places that are a power of two apart drive each other out of the cache.
        stride = each + _LINE
        if self._space is None or self._space.nbytes < stride * self._size:
            self._space = torch.empty(stride * self._size, dtype=torch.uint8)
        begin = self._space.data_ptr()
        return [begin + stride * row for row in range(self._size)]

    def _reduce_to(self, address: int, size: int, dtype: int, reduction: int, root: int | None) -> None:
        """Reduce this rank's data with everyone's into place on the root, or everywhere."""
        if size * self._size <= _ONE_SHOT:
            self._at_once(address, size, dtype, reduction, root)
        else:
            self._by_slices(address, size, dtype, reduction, root)

    def _at_once(self, address: int, size: int, dtype: int, reduction: int, root: int | None) -> None:
        """Give everyone everything, to be reduced by each for itself."""
        takes = root is None or root == self._rank
        rows = self._spaces(_ONE_SHOT)
        if takes:
            for peer in self._peers:
                self._receive(rows[peer], size, peer)
        for peer in self._peers:
            if root is None or root == peer:
                self._send(address, size, peer)
        self._compare()
        self._finish()
        if takes:
            rows[self._rank] = address
            _core.reduce(dtype, reduction, address, tuple(rows), size)

    def _by_slices(self, address: int, size: int, dtype: int, reduction: int, root: int | None) -> None:
        """Give each rank its slice of a block of everyone's data, to be reduced there and given back."""
        each = self._block(dtype)
        step = each * self._size
        own, rows = self._rank, self._spaces(each)
        result = rows[own]

        def slices(at: int) -> list[tuple[int, int]]:
            block = min(step, size - at)
            # Whole lines, so that nobody writes to a line that another reads; the last rank has what is left.
            share = -(-block // (self._size * _LINE)) * _LINE
            edges = [min(rank * share, block) for rank in range(self._size + 1)]
            return [(address + at + low, high - low) for low, high in itertools.pairwise(edges)]

        def hand_out(at: int) -> None:
            parts = slices(at)
            for peer in self._peers:
                self._receive(rows[peer], parts[own][1], peer)
            for peer in self._peers:
                self._send(*parts[peer], peer)

        hand_out(0)
        self._compare()
        for at in range(0, size, step):
            self._finish()
            parts = slices(at)
            place, length = parts[own]
            into = place if root is None or root == own else result
            rows[own] = place
            if length:
                _core.reduce(dtype, reduction, into, tuple(rows), length)
            if root is None or root == own:
                for peer in self._peers:
                    self._receive(*parts[peer], peer)
            for peer in self._peers:
                if root is None or root == peer:
                    self._send(into, length, peer)
            if at + step < size:
                hand_out(at + step)
        self._finish()

    # Waiting -----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait for all data that was begun."""
        if self._begun:
            self._wait(self._begun)
            self._begun, self._coming = [], []

    def _wait(self, requests: list[Any]) -> None:
        """Wait for ``requests`` with an eye on the group's end and the deadline; handlers of signals run meanwhile."""
        test = self._testall
        try:
            with self.world.lock:
                if test(requests):
                    return
            for _ in range(self._spins):
                with self.world.lock:
                    if test(requests):
                        return
            self._patiently(requests)
        except self._mpi.Exception as problem:
            self._leave(requests)
            raise RuntimeError(f"connection closed: MPI says {problem.Get_error_string()}") from problem
        except BaseException:
            self._leave(requests)
            raise

    def _patiently(self, requests: list[Any]) -> None:
        begun = time.monotonic()
        while True:
            # Several times: MPI moves a piece each time it is asked.
            for _ in range(_BURST):
                with self.world.lock:
                    if self._testall(requests):
                        return
            now = time.monotonic()
            if self._over_since is not None:
                raise RuntimeError("connection closed: the group ended in the middle of this call")
            if now > self._until:
                raise RuntimeError("Timed out waiting for the other ranks")
            if now - begun < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)

    def _leave(self, requests: list[Any]) -> None:
        """Take back what was to come: nobody waits for it any more, and its memory may go."""
        self.world.spoilt = True
        self._left = [*requests, *self._begun]
        for request in self._coming:
            with self.world.lock, contextlib.suppress(self._mpi.Exception):  # It may be over already.
                request.Cancel()

    # What was left in the middle, kept because MPI may still look at it.
    _left: Sequence[Any] = ()

    def leave(self) -> None:
        """Let go of the communicator, where nothing was left in the middle. Does not wait for the others."""
        if self.under_way or self._left:
            self.world.spoilt = True
            return
        with self.world.lock:
            for request in self._records:
                request.Free()
        self._records = []
