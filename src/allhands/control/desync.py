"""What this rank calls in each group, as it tells the coordinator: what the calls came to, and the newest in words.

A call costs its caller a microsecond. It is folded into a digest at once, so nothing grows however many there are; the
member's thread sends the digests of some of them, now and then (`Teller.take`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .messages import Recall, Recalled, Said, Told

__all__ = ["Known", "Tally", "Teller"]

# Calls that a rank can still tell word by word. Ranks that wait for each other are one call apart.
_RING = 256

# Of older calls, what all came to at each 64th and each 4096th, and how many of those: two ranks that tell of different
# stretches still have numbers in common. 64 * 4096 calls are more than Python makes between two reports.
_COARSE, _COARSER, _MARKS = 64, 4096, 64

# The newest are told one by one even then: it is there that a rank stands that cannot go on.
_NEWEST = 16

# A digest is a number in this ring, and the next call multiplies it (Knuth's multiplier for 64 bits) and adds its own.
_MASK, _FACTOR = 2**64 - 1, 6364136223846793005

# Groups that were destroyed and can still be asked about, while other ranks are on their way to the difference.
_MOST_CLOSED = 16

# Between two reports, at least: a tenth of a second, which nobody notices, and with many ranks as much more as keeps
# the coordinator at 2,000 reports in a second.
_EVERY_S, _REPORTS_PER_S = 0.1, 2000


class Known(NamedTuple):
    """One kind of call: a number for what must be the same on every rank (64 bits), and the words for a reader."""

    code: int
    words: str


class Tally:
    """The calls of one group on this rank. Made by `Teller.open`."""

    def __init__(self, name: str, size: int, wake: Callable[[Tally], None]) -> None:
        self.name = name
        self._size = size
        self._wake = wake
        self._lock = threading.Lock()
        self._count = self._sent = self._digest = 0
        self._void = False
        self._due = False
        self._newest: deque[tuple[Known, int]] = deque(maxlen=_RING)
        self._coarse: deque[tuple[int, int]] = deque(maxlen=_MARKS)
        self._coarser: deque[tuple[int, int]] = deque(maxlen=_MARKS)

    def add(self, known: Known) -> None:
        """Note the next call, which is about to begin."""
        with self._lock:
            self._count = count = self._count + 1
            self._digest = digest = (self._digest * _FACTOR + known.code) & _MASK
            self._newest.append((known, digest))
            if not count % _COARSE:
                self._coarse.append((count, digest))
                if not count % _COARSER:
                    self._coarser.append((count, digest))
            if self._due:
                return
            self._due = True
        self._wake(self)

    def give_up(self) -> None:
        """Note that the call that was added last was not made: later ones have other numbers than on other ranks."""
        with self._lock:
            self._void = True
            if self._due:
                return
            self._due = True
        self._wake(self)

    def take(self) -> Said:
        """Return what is to be told since this was last asked."""
        with self._lock:
            self._due = False
            count, sent = self._count, self._sent
            self._sent = count
            span = count - sent
            each = span if span <= _MARKS else _NEWEST
            marks = [(number, self._newest[number - count - 1][1]) for number in range(count - each + 1, count + 1)]
            if each < span:
                coarse = self._coarse if span <= _COARSE * _MARKS else self._coarser
                marks = [mark for mark in coarse if sent < mark[0] <= count - each] + marks
            numbers, digests = [number for number, _ in marks], [digest for _, digest in marks]
            return Said(self.name, self._size, count, numbers, digests, self._void)

    def recall(self, after: int, upto: int) -> Recalled:
        """Return the calls after number ``after`` up to ``upto``, as many as are remembered."""
        with self._lock:
            oldest = self._count - len(self._newest) + 1
            first, last = max(after + 1, oldest), min(upto, self._count)
            kept = [self._newest[number - oldest] for number in range(first, last + 1)]
            void = self._void
        places: dict[str, int] = {}
        for known, _ in kept:
            places.setdefault(known.words, len(places))
        return Recalled(
            self.name,
            upto,
            first,
            [known.code for known, _ in kept],
            [places[known.words] for known, _ in kept],
            list(places),
            kept[-1][1] if kept and last == upto else 0,
            void,
        )


class Teller:
    """All groups of this rank. `take`, `recall` and `wait_s` are the member's thread's; ``poke`` wakes it."""

    def __init__(self, poke: Callable[[], None], world_size: int) -> None:
        self._poke = poke
        self._every_s = max(_EVERY_S, world_size / _REPORTS_PER_S)
        self._next = 0.0
        self._tallies: dict[str, Tally] = {}
        self._closed: deque[Tally] = deque(maxlen=_MOST_CLOSED)
        self._named: dict[str, int] = {}
        self._due: deque[Tally] = deque()

    def open(self, name: str, size: int) -> Tally:
        """Begin to tell of a group of ``size`` ranks. A name that was used before is another group now."""
        turn = self._named[name] = self._named.get(name, 0) + 1
        tally = Tally(name if turn == 1 else f"{name}#{turn}", size, self._wake)
        self._tallies[tally.name] = tally
        return tally

    def close(self, tally: Tally) -> None:
        """The group is destroyed: nothing more is called in it."""
        if self._tallies.pop(tally.name, None) is not None:
            self._closed.append(tally)

    def _wake(self, tally: Tally) -> None:
        self._due.append(tally)
        self._poke()

    def wait_s(self, now: float) -> float | None:
        """Return how long until there is something to tell, None where there is nothing."""
        return max(0.0, self._next - now) if self._due else None

    def take(self, now: float, *, at_once: bool = False) -> Told | None:
        """Return what is to be told now, if anything is; ``at_once`` before its time."""
        if not self._due or (now < self._next and not at_once):
            return None
        self._next = now + self._every_s
        said = [self._due.popleft().take() for _ in range(len(self._due))]
        return Told(said)

    def recall(self, asked: Recall) -> Recalled:
        """Return what this rank called in the group that is ``asked`` about."""
        tally = self._tallies.get(asked.group)
        if tally is None:
            tally = next((closed for closed in self._closed if closed.name == asked.group), None)
        return (
            tally.recall(asked.after, asked.upto)
            if tally is not None
            else Recalled(asked.group, asked.upto, 1, [], [], [])
        )
