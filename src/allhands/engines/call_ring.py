"""What the ranks of one of torch's own groups on one host call, side by side in shared memory: nobody waits for it.

Each rank writes a record of its next call and looks at those of the others. So whoever comes to a call last sees any
difference before its own call begins, while the others still wait for it inside their engine.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence

from ..diagnosis.majority import Judgement
from . import fingerprint
from .fingerprint import Call
from .shm.fd_passing import Handing

__all__ = ["Calls", "form", "region_bytes"]

# The number of the call, from 1; then the record.
_MARK = struct.Struct("=Q")
_ENTRY = _MARK.size + fingerprint.BYTES

# Calls that a rank may be ahead (`async_op`) and still be compared.
_RING = 64

# How long to hear more ranks before judging a difference: two do not say which of them is the odd one.
_HEAR_S, _LOOK_S = 0.3, 0.002


class Calls:
    """One rank's view of everyone's calls; ``numbers`` are the ranks' names."""

    def __init__(self, descriptor: int, rank: int, numbers: Sequence[int]) -> None:
        self._rank = rank
        self._names = list(numbers)
        self._memory = memoryview(mmap.mmap(descriptor, region_bytes(len(self._names))))

    def tell(self, call: Call) -> Judgement | None:
        """Tell of a call; return what differs from what others have told."""
        number, record = call.sequence + 1, call.pack()
        at = self._place(self._rank, number)
        # The mark goes away first and comes last: whoever reads in between sees no call.
        self._mark(at, 0)
        self._memory[at + _MARK.size : at + _MARK.size + len(record)] = record
        self._mark(at, number)
        mine = record[: fingerprint.HEAD_BYTES]
        told = self._told(number)
        if all(self._head(rank, number) == mine for rank in told):
            return None
        return self._judge(number)

    def withdraw(self) -> None:
        """Say that the last call was not made after all: nothing to say, it was compared before it began."""

    def _judge(self, number: int) -> Judgement | None:
        until = time.monotonic() + _HEAR_S
        while len(told := self._told(number)) < len(self._names) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        calls = [fingerprint.unpack(self._record(rank, number)) for rank in told]
        found = fingerprint.judge(calls, [self._names[rank] for rank in told])
        return Judgement(tuple(told[index] for index in found.odd), found.lines) if found is not None else None

    def _told(self, number: int) -> list[int]:
        """Return who has told of call ``number``."""
        marks = (_MARK.unpack_from(self._memory, self._place(rank, number)) for rank in range(len(self._names)))
        return [rank for rank, mark in enumerate(marks) if mark == (number,)]

    def _place(self, rank: int, number: int) -> int:
        return (rank * _RING + number % _RING) * _ENTRY

    def _mark(self, at: int, number: int) -> None:
        _MARK.pack_into(self._memory, at, number)

    def _record(self, rank: int, number: int) -> memoryview:
        at = self._place(rank, number) + _MARK.size
        return self._memory[at : at + fingerprint.BYTES]

    def _head(self, rank: int, number: int) -> bytes:
        return bytes(self._record(rank, number)[: fingerprint.HEAD_BYTES])


def region_bytes(ranks: int) -> int:
    """Return what a group of ``ranks`` takes, in whole pages."""
    return -(-ranks * _RING * _ENTRY // mmap.PAGESIZE) * mmap.PAGESIZE


def form(handing: Handing, key: str, rank: int, numbers: Sequence[int], timeout_s: float) -> Calls:
    """Make the memory and hand it to everyone; each rank of the group calls this."""

    def make(ranks: int, _: bytes) -> tuple[int, int]:
        descriptor = os.memfd_create("allhands-calls", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, region_bytes(ranks))
        return descriptor, region_bytes(ranks)

    descriptor, _ = handing.share(key, make, timeout_s)
    try:
        return Calls(descriptor, rank, numbers)
    finally:
        os.close(descriptor)
