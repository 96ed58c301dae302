"""Equal lines of several ranks into one. Pure: it is given lines and the time."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

__all__ = ["WINDOW_S", "Fold", "ranges"]

# A line waits this long for the same line from other ranks: longer than ranks that do the same differ, short enough
# for a person who looks on.
WINDOW_S = 0.3

# More lines and bytes than this do not wait, so a flood of different lines takes no more memory than this.
_MOST_LINES, _MOST_BYTES = 20_000, 8 << 20


class _Entry:
    """One line and who said it."""

    __slots__ = ("at", "line", "number", "ranks")

    def __init__(self, number: int, line: bytes, rank: int, at: float) -> None:
        self.number, self.line, self.ranks, self.at = number, line, {rank}, at


def _number(entry: _Entry) -> int:
    return entry.number


class Fold:
    """Holds back lines of one stream for a moment. Lines of each rank stay in order, and none is lost."""

    def __init__(self, ranks: int) -> None:
        self._all = ranks
        self._entries: deque[_Entry] = deque()
        self._by_line: dict[bytes, list[_Entry]] = {}
        # The number of the entry that each rank is in last: it may join only later ones.
        self._last: dict[int, int] = {}
        self._count = 0
        self._bytes = 0

    def add(self, rank: int, whole: bytes, now: float) -> None:
        """Take whole lines of one rank."""
        for line in whole.split(b"\n")[:-1]:
            self._add(rank, line, now)

    def _add(self, rank: int, line: bytes, now: float) -> None:
        last = self._last.get(rank, 0)
        same = self._by_line.setdefault(line, [])
        place = bisect_right(same, last, key=_number)
        if place < len(same):
            entry = same[place]
        else:
            self._count += 1
            self._bytes += len(line)
            entry = _Entry(self._count, line, rank, now)
            self._entries.append(entry)
            same.append(entry)
        entry.ranks.add(rank)
        self._last[rank] = entry.number

    def due(self, now: float, *, all_of_it: bool = False) -> list[tuple[bytes, list[int]]]:
        """Return the lines that need not wait any longer, each with its ranks, in order."""
        found = []
        while self._entries:
            first = self._entries[0]
            waits = len(first.ranks) < self._all and now - first.at < WINDOW_S
            if waits and not all_of_it and len(self._entries) <= _MOST_LINES and self._bytes <= _MOST_BYTES:
                break
            self._entries.popleft()
            self._bytes -= len(first.line)
            same = self._by_line[first.line]
            same.pop(0)
            if not same:
                del self._by_line[first.line]
            found.append((first.line + b"\n", sorted(first.ranks)))
        return found


def ranges(numbers: Iterable[int]) -> str:
    """Write ranks as short as they go: ``0-3,7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
