"""What one rank calls, as the ranks of a group tell each other before data moves, and what they make of it.

Nothing here communicates: every rank looks at the same records and comes to the same judgement.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import torch

from ..diagnosis import majority
from ..diagnosis.majority import Judgement
from .shm import engine as shm

__all__ = ["BYTES", "HEAD_BYTES", "SEQUENCE", "Call", "judge", "judge_sizes", "unpack"]

# Sequence, bytes, kind, reduction, type, root, flags: what must be the same on every rank. Then how long the text is.
_HEAD = struct.Struct("<QQIIIiI")
HEAD_BYTES = _HEAD.size
# The sequence by itself, which comes first.
SEQUENCE = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")

# Four cache lines. The network does not tell 64 bytes from 256, and a line of a script fits with its file.
BYTES = 256
_MOST_TEXT = BYTES - _HEAD.size - _LENGTH.size

# Past this a shape says no more to a reader, and would take the room of the file name.
_MOST_SHAPE = 60

_UNEVEN, _REFUSED = 1, 2
_BETWEEN = "\x1f"

_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in shm.DTYPES.items()}
_SIZES = {code: torch.empty(0, dtype=dtype).element_size() for dtype, code in shm.DTYPES.items()}


class Call(msgspec.Struct, frozen=True):
    """One rank's call. ``refused`` says why it cannot make it; ``uneven``, that its parts differ in size."""

    sequence: int
    kind: int
    nbytes: int = 0
    reduction: int = 0
    dtype: int = 0
    root: int = -1
    uneven: bool = False
    shape: str = ""
    site: str = ""
    refused: str = ""

    def pack(self) -> bytes:
        """Return it as bytes, BYTES of them at most."""
        flags = self.uneven * _UNEVEN | bool(self.refused) * _REFUSED
        head = _HEAD.pack(self.sequence, self.nbytes, self.kind, self.reduction, self.dtype, self.root, flags)
        # The end of a long path is what tells it from others.
        words = _BETWEEN.join((self.shape[:_MOST_SHAPE], self.site[-_MOST_SHAPE:], self.refused))
        text = words.encode()[:_MOST_TEXT]
        return head + _LENGTH.pack(len(text)) + text

    def words(self) -> str:
        """Say it as a reader would: `called all_reduce of float32 x 4 by SUM, [2, 2] at train.py:41`."""
        if self.refused:
            return f"cannot do its {shm.kind_name(self.kind)} at {self.site}: {self.refused}"
        said = [f"called {shm.kind_name(self.kind)}"]
        if self.dtype:
            said.append(f"of {_NAMES.get(self.dtype, 'bytes')} x {self.nbytes // _SIZES.get(self.dtype, 1)}")
        if self.reduction:
            said.append(f"by {shm.REDUCTION_NAMES[self.reduction]}")
        if self.root >= 0:
            said.append(f"with root {self.root}")
        if self.uneven:
            said.append("in parts of different sizes")
        return " ".join(said) + (f", {self.shape}," if self.shape else "") + (f" at {self.site}" if self.site else "")


def unpack(record: bytes | memoryview) -> Call:
    """Return the call that ``record`` is about."""
    sequence, nbytes, kind, reduction, dtype, root, flags = _HEAD.unpack_from(record)
    (length,) = _LENGTH.unpack_from(record, _HEAD.size)
    begin = _HEAD.size + _LENGTH.size
    # A cut may have gone through a character, or through the last field.
    text = bytes(record[begin : begin + length]).decode(errors="replace")
    shape, site, refused = [*text.split(_BETWEEN, 2), "", ""][:3]
    refused = (refused or "it did not say why") if flags & _REFUSED else ""
    return Call(sequence, kind, nbytes, reduction, dtype, root, bool(flags & _UNEVEN), shape, site, refused)


def judge(calls: Sequence[Call], numbers: Sequence[int]) -> Judgement | None:
    """Compare what everyone calls; None where it is the same. ``numbers`` are the ranks' names for the reader.

    What most ranks call is taken for what was meant; with as many on both sides, what the lowest rank calls. Sizes
    are left out where someone's parts differ in size: those are compared pair by pair (`judge_sizes`).
    """
    uneven = any(call.uneven for call in calls)
    keys = [
        (
            call.sequence,
            call.kind,
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
    """Compare, pair by pair, the bytes that ranks give with those that the other end expects; None where all fit.

    ``gives[i][j]`` is what rank i has for rank j, ``takes[j][i]`` what j has room for. Whoever is in the most pairs
    that do not fit is blamed.
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
