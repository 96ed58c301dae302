"""Equal lines of several ranks into one. Pure: it is given lines and the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["WINDOW_S", "Fold", "ranges"]

# A line waits this long for the same line from other ranks: longer than ranks that do the same differ, short enough
# for a person who looks on.
WINDOW_S = 0.3

# More lines and bytes than this do not wait, so a flood of different lines takes no more memory than this.
_MOST_LINES, _MOST_BYTES = 20_000, 8 << 20


class Fold:
    """Holds back lines of one stream for a moment. Lines of each rank stay in order, and none is lost.

    A line is shown when it is the next one of every rank that has it waiting, and all ranks have it or it is old.
    """

    def __init__(self, ranks: int) -> None:
        self._all = ranks
        # What each rank still has to show, with when it came.
        self._waiting: dict[int, deque[tuple[bytes, float]]] = {}
        # How often each rank has a line waiting.
        self._holders: dict[bytes, dict[int, int]] = {}
        self._lines = self._bytes = 0

    def add(self, rank: int, whole: bytes, now: float) -> None:
        """Take whole lines of one rank."""
        waiting = self._waiting.setdefault(rank, deque())
        for line in whole.split(b"\n")[:-1]:
            waiting.append((line, now))
            holders = self._holders.setdefault(line, {})
            holders[rank] = holders.get(rank, 0) + 1
            self._lines += 1
            self._bytes += len(line)

    def due(self, now: float, *, all_of_it: bool = False) -> list[tuple[bytes, list[int]]]:
        """Return the lines that need not wait any longer, each with its ranks, in order."""
        found: list[tuple[bytes, list[int]]] = []
        moved = True
        while moved and self._lines:
            hurry = all_of_it or self._lines > _MOST_LINES or self._bytes > _MOST_BYTES
            heads: dict[bytes, tuple[float, list[int]]] = {}
            for rank, waiting in self._waiting.items():
                if waiting:
                    line, at = waiting[0]
                    since, who = heads.setdefault(line, (at, []))
                    who.append(rank)
                    heads[line] = (min(at, since), who)
            free = [
                line
                for line, (since, who) in heads.items()
                if len(who) == len(self._holders[line]) and (len(who) == self._all or hurry or now - since >= WINDOW_S)
            ]
            if not free:
                # Ranks say the same things in different orders: the oldest goes first.
                oldest = min(heads, key=lambda line: heads[line][0])
                free = [oldest] if hurry or now - heads[oldest][0] >= WINDOW_S else []
            found += [(line + b"\n", self._take(line, heads[line][1])) for line in free]
            moved = bool(free)
        return found

    def _take(self, line: bytes, who: list[int]) -> list[int]:
        holders = self._holders[line]
        for rank in who:
            self._waiting[rank].popleft()
            holders[rank] -= 1
            if not holders[rank]:
                del holders[rank]
            self._lines -= 1
            self._bytes -= len(line)
        if not holders:
            del self._holders[line]
        return sorted(who)


def ranges(numbers: Iterable[int]) -> str:
    """Write ranks as short as they go: ``0-3,7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
