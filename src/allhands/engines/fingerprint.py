"""A fingerprint: the record by which the ranks of a group compare a call before data moves, and how they judge it.

Every rank judges the same records and reaches the same result. `CallRing` keeps the records of one host's ranks in
shared memory, for groups whose calls another library performs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence

import msgspec

from ..diagnosis import majority
from ..diagnosis.majority import Judgement
from .dtypes import REDUCTION_NAMES, dtype_of, operation_name
from .shm.fd_passing import FdPassing, allocate

__all__ = [
    "BYTES",
    "HEAD_BYTES",
    "SEQUENCE",
    "Call",
    "CallRing",
    "elements",
    "judge",
    "judge_arrived",
    "judge_sizes",
    "unpack",
]

# Sequence, bytes, operation, reduction, type, root, flags: what must be the same on every rank. Then the text's length.
_HEAD = struct.Struct("<QQIIIiI")
HEAD_BYTES = _HEAD.size
# The sequence alone, which is the first field.
SEQUENCE = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")

# Four cache lines: a network needs as long for 64 bytes, and the site of a call fits in.
BYTES = 256
_MAX_TEXT = BYTES - _HEAD.size - _LENGTH.size

# Characters of a shape and of a site; more of a shape would leave no room for the site.
_MAX_FIELD = 60

_UNEVEN, _REFUSED = 1, 2
_SEPARATOR = "\x1f"

# Calls by which a rank of a `CallRing` may be ahead (`async_op`) and still be compared.
_RING = 64

# In a ring: the number of the call, from 1; then its record.
_MARK = struct.Struct("=Q")
_ENTRY = _MARK.size + BYTES

# How long a difference waits for the calls of more ranks, and how often it polls.
_JUDGE_S, _POLL_S = 0.3, 0.002


class Call(msgspec.Struct, frozen=True):
    """One rank's call. ``refused`` is why the rank cannot make it; ``uneven`` means that its parts differ in size."""

    sequence: int
    operation: int
    nbytes: int = 0
    reduction: int = 0
    dtype: int = 0
    root: int = -1
    uneven: bool = False
    shape: str = ""
    site: str = ""
    refused: str = ""

    def pack(self) -> bytes:
        """Return it as at most BYTES bytes."""
        flags = self.uneven * _UNEVEN | bool(self.refused) * _REFUSED
        head = _HEAD.pack(self.sequence, self.nbytes, self.operation, self.reduction, self.dtype, self.root, flags)
        # Long paths differ at their end.
        words = _SEPARATOR.join((self.shape[:_MAX_FIELD], self.site[-_MAX_FIELD:], self.refused))
        text = words.encode()[:_MAX_TEXT]
        return head + _LENGTH.pack(len(text)) + text

    def words(self) -> str:
        """Return it for messages: `called all_reduce of float32 x 4 by SUM, [2, 2], at train.py:41`."""
        if self.refused:
            return f"cannot do its {operation_name(self.operation)} at {self.site}: {self.refused}"
        said = [f"called {operation_name(self.operation)}"]
        if self.dtype:
            said.append(f"of {elements(self.dtype, self.nbytes)}")
        if self.reduction:
            said.append(f"by {REDUCTION_NAMES[self.reduction]}")
        if self.root >= 0:
            said.append(f"with root {self.root}")
        if self.uneven:
            said.append("in parts of different sizes")
        return " ".join(said) + (f", {self.shape}," if self.shape else "") + (f" at {self.site}" if self.site else "")


def elements(dtype: int, nbytes: int) -> str:
    """Return the content of a tensor for messages: `float32 x 4`."""
    kind = dtype_of(dtype)
    return f"{str(kind).removeprefix('torch.') if kind else 'bytes'} x {nbytes // (kind.itemsize if kind else 1)}"


def unpack(record: bytes | memoryview) -> Call:
    """Return the call that `Call.pack` made ``record`` of."""
    sequence, nbytes, operation, reduction, dtype, root, flags = _HEAD.unpack_from(record)
    (length,) = _LENGTH.unpack_from(record, _HEAD.size)
    begin = _HEAD.size + _LENGTH.size
    # Text that was cut may end within a character or a field.
    text = bytes(record[begin : begin + length]).decode(errors="replace")
    shape, site, refused = [*text.split(_SEPARATOR, 2), "", ""][:3]
    refused = (refused or "it did not say why") if flags & _REFUSED else ""
    return Call(sequence, operation, nbytes, reduction, dtype, root, bool(flags & _UNEVEN), shape, site, refused)


def judge(calls: Sequence[Call], numbers: Sequence[int]) -> Judgement | None:
    """Compare the calls of all ranks; None where they are the same. ``numbers`` are the ranks' names in messages.

    The call of most ranks is taken as intended; in a tie, that of the lowest rank. Sizes are left out where the parts
    of some rank differ in size: `judge_sizes` compares those pair by pair.
    """
    uneven = any(call.uneven for call in calls)
    keys = [
        (
            call.sequence,
            call.operation,
            call.reduction,
            call.dtype,
            call.root,
            0 if uneven else call.nbytes,
            bool(call.refused),
        )
        for call in calls
    ]
    if len(set(keys)) == 1:
        return None
    return majority.judge(keys, [call.words() for call in calls], numbers)


def judge_sizes(
    gives: Sequence[Sequence[int]], takes: Sequence[Sequence[int]], calls: Sequence[Call], numbers: Sequence[int]
) -> Judgement | None:
    """Compare, pair by pair, the bytes that a rank sends with those that the other expects; None where all fit.

    ``gives[i][j]`` is what rank i sends to rank j, ``takes[j][i]`` what j expects. The ranks that are in the most pairs
    that do not fit are the odd ones.
    """
    every = range(len(gives))
    wrong = [(i, j) for i in every for j in every if gives[i][j] != takes[j][i]]
    if not wrong:
        return None
    times = [sum(rank in pair for pair in wrong) for rank in every]
    odd = [rank for rank in every if times[rank] == max(times)]
    lines = majority.lines([call.words() for call in calls], numbers)
    lines += [
        f"rank {numbers[i]} gives rank {numbers[j]} {gives[i][j]} bytes, which expects {takes[j][i]}"
        for i, j in wrong[:8]
    ]
    return Judgement(tuple(odd), tuple(lines))


def judge_arrived(
    arrived: Callable[[], list[int]], call: Callable[[int], Call], numbers: Sequence[int]
) -> Judgement | None:
    """Judge a difference after more ranks have had time to make their call: two do not show which is the odd one.

    ``arrived`` returns the ranks that have made it, ``call`` that of a rank.
    """
    deadline = time.monotonic() + _JUDGE_S
    while len(ranks := arrived()) < len(numbers) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    found = judge([call(rank) for rank in ranks], [numbers[rank] for rank in ranks])
    return Judgement(tuple(ranks[index] for index in found.odd), found.lines) if found is not None else None


class CallRing:
    """The last calls of each rank of one host's group, in shared memory.

    Each rank writes the record of its next call and compares it with those that others have written. So the last rank
    sees a difference before its call begins, while the others still wait for it in their engine.
    """

    def __init__(self, fd_passing: FdPassing, key: str, rank: int, numbers: Sequence[int], timeout_s: float) -> None:
        """Create or map the memory; each rank of the group does. ``numbers`` are the ranks' names in messages."""
        self._rank = rank
        self._names = list(numbers)
        descriptor, _ = fd_passing.share(key, self._create, timeout_s)
        try:
            self._memory = memoryview(mmap.mmap(descriptor, len(self._names) * _RING * _ENTRY))
        finally:
            os.close(descriptor)

    @staticmethod
    def _create(ranks: int, _: bytes) -> int:
        return allocate("allhands-calls", ranks * _RING * _ENTRY, f"the last calls of {ranks} ranks")

    def compare(self, call: Call) -> Judgement | None:
        """Write this rank's next call; return how it differs from those of others, if it does."""
        number, record = call.sequence + 1, call.pack()
        at = self._place(self._rank, number)
        # The mark is cleared first and set last: a concurrent reader finds no call.
        _MARK.pack_into(self._memory, at, 0)
        self._memory[at + _MARK.size : at + _MARK.size + len(record)] = record
        _MARK.pack_into(self._memory, at, number)
        head = record[:HEAD_BYTES]
        if all(self._record(rank, number)[:HEAD_BYTES] == head for rank in self._arrived(number)):
            return None
        return judge_arrived(
            lambda: self._arrived(number), lambda rank: unpack(self._record(rank, number)), self._names
        )

    def _arrived(self, number: int) -> list[int]:
        """Return the ranks that have written call ``number``."""
        marks = (_MARK.unpack_from(self._memory, self._place(rank, number)) for rank in range(len(self._names)))
        return [rank for rank, mark in enumerate(marks) if mark == (number,)]

    def _place(self, rank: int, number: int) -> int:
        return (rank * _RING + number % _RING) * _ENTRY

    def _record(self, rank: int, number: int) -> memoryview:
        at = self._place(rank, number) + _MARK.size
        return self._memory[at : at + BYTES]
