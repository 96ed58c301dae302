"""What ranks that share a GPU tell each other: numbers that their streams wait for, and a record of every call.

It is memory of the host that the GPU can reach. So a stream that waits for a rank which will never come is let go by a
plain store, by whoever knows, and what each rank has done can be read without asking the GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence

from ...diagnosis.majority import Judgement
from .. import fingerprint
from ..fingerprint import Call
from . import driver

__all__ = ["BROUGHT", "FOLDED", "LEFT", "Flags", "region_bytes"]

# What a rank's stream has done: its data is there, its part is reduced, it needs nobody's data any more.
BROUGHT, FOLDED, LEFT = 0, 1, 2

# Numbers of the host: how many calls a rank has told, how many of everyone's it has compared, that it is gone.
_TOLD, _COMPARED, _GONE = 3, 4, 5
_NUMBERS = 6

# Each number in lines of its own: the GPU writes some, several hosts read others.
_APART = 128

# Calls that a rank may be ahead of the slowest before it waits for it. The more, the larger the records; a rank that is
# this far ahead keeps the GPU busy for longer than it takes to catch up.
_RING = 64

# Above every number that a call can have: nobody waits for more. As 64 bits with a sign, which the driver compares.
_RELEASED = 1 << 62

# How often to look for others while waiting for them, and how long to hear more of them before judging a difference.
_LOOK_S, _HEAR_S = 0.0005, 0.3


def _entry_bytes(ranks: int) -> int:
    return fingerprint.BYTES + 16 * ranks


def region_bytes(ranks: int) -> int:
    """Return what one rank's part takes, in whole pages."""
    return -(-(_NUMBERS * _APART + _RING * _entry_bytes(ranks)) // mmap.PAGESIZE) * mmap.PAGESIZE


class Flags:
    """One rank's view of everyone's numbers and records. Not safe for several threads at once, but for `release`."""

    def __init__(self, descriptor: int, rank: int, numbers: Sequence[int]) -> None:
        """Map the memory that ``descriptor`` is, `region_bytes` for each rank; ``numbers`` are the ranks' names."""
        self._rank = rank
        self._names = list(numbers)
        self._ranks = len(self._names)
        self._region = region_bytes(self._ranks)
        self._memory = mmap.mmap(descriptor, self._region * self._ranks)
        self._words = memoryview(self._memory).cast("Q")
        self._bytes = memoryview(self._memory)
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._device = driver.map_host(self._host, len(self._memory))
        self.compared = 0

    def address(self, kind: int, rank: int) -> int:
        """Return where the GPU finds a number of ``rank``."""
        return self._device + rank * self._region + kind * _APART

    def number(self, kind: int, rank: int) -> int:
        """Return that number as it is now."""
        return int(self._words[(rank * self._region + kind * _APART) // 8])

    def told(self, rank: int) -> int:
        """Return how many calls ``rank`` has told of."""
        return self.number(_TOLD, rank)

    def _set(self, kind: int, rank: int, value: int) -> None:
        self._words[(rank * self._region + kind * _APART) // 8] = value

    def _place(self, rank: int, call: int) -> int:
        return rank * self._region + _NUMBERS * _APART + call % _RING * _entry_bytes(self._ranks)

    def tell(self, call: Call, sizes: Sequence[int], until: float, check: Callable[[], None]) -> Judgement | None:
        """Tell everyone of this rank's next call, with its ``sizes`` to and from each rank; return what differs.

        Waits only where someone is so far behind that there is no room for another record; ``check`` is called
        meanwhile, and raises where the group is over.
        """
        mine = self.told(self._rank)
        while any(self.number(_COMPARED, rank) + _RING <= mine for rank in range(self._ranks)):
            found = self.compare()
            if found is not None:
                return found
            check()
            if time.monotonic() > until:
                break  # Whoever is behind is named by those who watch the calls that are under way.
            time.sleep(_LOOK_S)
        record = call.pack()
        at = self._place(self._rank, mine)
        self._bytes[at : at + len(record)] = record
        table = b"".join(size.to_bytes(8, "little") for size in sizes)
        self._bytes[at + fingerprint.BYTES : at + fingerprint.BYTES + len(table)] = table
        self._set(_TOLD, self._rank, mine + 1)
        return self.compare()

    def meet(self, until: float, check: Callable[[], None]) -> Judgement | None:
        """Wait until everyone has told of as many calls as this rank; return what differs."""
        mine = self.told(self._rank)
        while self.compared < mine:
            found = self.compare()
            if found is not None:
                return found
            check()
            if time.monotonic() > until:
                late = next(rank for rank in range(self._ranks) if self.told(rank) < mine)
                raise TimeoutError(f"Timed out waiting for rank {self._names[late]}")
            time.sleep(_LOOK_S)
        return None

    def compare(self) -> Judgement | None:
        """Compare what everyone has told that was not compared yet; return the first difference."""
        while True:
            came = [rank for rank in range(self._ranks) if self.told(rank) > self.compared]
            if len(came) < min(2, self._ranks):
                return None
            found = self._judge(self.compared, came)
            if found is not None:
                return found
            if len(came) < self._ranks:
                return None
            self.compared += 1
            self._set(_COMPARED, self._rank, self.compared)

    def _judge(self, call: int, came: list[int]) -> Judgement | None:
        heads = {bytes(self._record(rank, call)[: fingerprint.HEAD_BYTES]) for rank in came}
        if len(heads) == 1 and not fingerprint.unpack(self._record(came[0], call)).uneven:
            return None
        calls = [fingerprint.unpack(self._record(rank, call)) for rank in came]
        if fingerprint.judge(calls, [self._names[rank] for rank in came]) is not None:
            return self._heard(call)
        return self._judge_sizes(call) if len(came) == self._ranks else None

    def _judge_sizes(self, call: int) -> Judgement | None:
        rows = [self._sizes(rank, call) for rank in range(self._ranks)]
        calls = [fingerprint.unpack(self._record(rank, call)) for rank in range(self._ranks)]
        return fingerprint.judge_sizes(
            [row[: self._ranks] for row in rows], [row[self._ranks :] for row in rows], calls, self._names
        )

    def _heard(self, call: int) -> Judgement | None:
        """Judge a difference once more ranks have had the time to come: two do not say which of them is the odd one."""
        until = time.monotonic() + _HEAR_S
        while time.monotonic() < until and any(self.told(rank) <= call for rank in range(self._ranks)):
            time.sleep(_LOOK_S)
        came = [rank for rank in range(self._ranks) if self.told(rank) > call]
        found = fingerprint.judge(
            [fingerprint.unpack(self._record(rank, call)) for rank in came], [self._names[rank] for rank in came]
        )
        return Judgement(tuple(came[index] for index in found.odd), found.lines) if found is not None else None

    def _record(self, rank: int, call: int) -> memoryview:
        at = self._place(rank, call)
        return self._bytes[at : at + fingerprint.BYTES]

    def _sizes(self, rank: int, call: int) -> list[int]:
        at = self._place(rank, call) + fingerprint.BYTES
        return [
            int.from_bytes(self._bytes[at + 8 * index : at + 8 * index + 8], "little")
            for index in range(2 * self._ranks)
        ]

    def release(self) -> None:
        """Let go whatever stream waits for a number: the group is over, and its data means nothing any more.

        To be repeated until this rank's stream is empty: a stream that is let go still writes its numbers.
        """
        for rank in range(self._ranks):
            for kind in (BROUGHT, FOLDED, LEFT):
                self._set(kind, rank, _RELEASED)

    def go(self) -> None:
        """Note that this rank will touch the memory that they share on the GPU no more."""
        self._set(_GONE, self._rank, 1)

    def all_gone(self) -> bool:
        """Tell whether all of them noted that."""
        return all(self.number(_GONE, rank) for rank in range(self._ranks))

    def close(self) -> None:
        """Let the GPU's hold on the memory go. The host's mapping ends with this object."""
        driver.unmap_host(self._host)
