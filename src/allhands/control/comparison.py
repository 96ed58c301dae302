"""What the ranks of each group say they called, compared number by number: pure, no clock and no sockets.

Equal digests at one number mean equal calls up to there, so nothing has to be kept of what all agree about, and what is
forgotten costs a late answer at most. Only where digests differ are ranks asked for the calls themselves.
"""

from __future__ import annotations

import msgspec

from ..diagnosis import sides
from .messages import Recall, Recalled, Said, Told

__all__ = ["Comparison", "Difference"]

# How long to hear more ranks before asking about a difference: two do not say which of them is the odd one. And by then
# operations have come to rest: Gloo may not notice the end of a connection that it is just sending on.
_HEAR_S = 0.3

# How long those who are asked may take. They answer from a thread of their own, unless they are stopped.
_ANSWER_S = 0.5

# A rank that is behind the others and has told nothing new for this long may stand in a call that nobody else made.
_STUCK_S, _LOOK_S = 1.0, 1.0

# What is kept of one group: numbers, and ranks times numbers. A rank that is farther behind than that is compared where
# it catches up, or where it stands still.
_MOST_NUMBERS, _LEAST_NUMBERS, _MOST_MARKS = 1024, 32, 262_144

# Every rank tells of these numbers, however many calls it makes (`tally`): they are forgotten last.
_COARSE = 64

# Groups that are remembered; the one that was not heard of for longest goes first.
_MOST_GROUPS = 4096

# More lines bury the message.
_MOST_LINES = 16


class Difference(msgspec.Struct, frozen=True):
    """Who differs from the others, in which call of which group, and a line for each thing that was called."""

    group: str
    number: int
    odd: tuple[int, ...]
    lines: tuple[str, ...]


class _Doubt:
    """Digests differ at ``number``: who was asked for the calls behind them, and what they say."""

    def __init__(self, number: int, since: float) -> None:
        self.number = number
        self.since = since
        self.asked: float | None = None
        self.owing: set[int] = set()
        self.answers: dict[int, Recalled] = {}


class _Group:
    """One group: how far each rank is, and who has which digest at the numbers that not all agree about yet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.quiet = False
        self.agreed = 0
        self.upto: dict[int, int] = {}
        self.since: dict[int, float] = {}
        self.marks: dict[int, dict[int, set[int]]] = {}
        self.doubt: _Doubt | None = None
        self.heard = 0.0
        self.asked_about = 0

    def mark(self, number: int, digest: int, rank: int, now: float) -> None:
        """Take in what the calls of ``rank`` came to at ``number``."""
        if number <= self.agreed:
            return
        told = self.marks.setdefault(number, {})
        same = told.setdefault(digest, set())
        same.add(rank)
        if len(told) > 1:
            if self.doubt is None or (self.doubt.asked is None and number < self.doubt.number):
                self.doubt = _Doubt(number, now if self.doubt is None else self.doubt.since)
        elif len(same) >= self.size:
            self.agreed = number
            self.marks = {each: there for each, there in self.marks.items() if each > number}

    def thin(self) -> None:
        """Forget the oldest numbers where there are too many."""
        most = min(_MOST_NUMBERS, max(_LEAST_NUMBERS, _MOST_MARKS // self.size))
        if len(self.marks) <= most or self.doubt is not None:
            return
        if len(self.upto) >= self.size:
            # Everyone is past these.
            slow = min(self.upto.values())
            self.marks = {number: there for number, there in self.marks.items() if number > slow}
        excess = max(0, len(self.marks) - most)
        # The coarse ones go last, then from the oldest on; half of the room at a time, so that this is seldom.
        order = sorted(self.marks, key=lambda number: (number % _COARSE == 0, number))
        for number in order[: excess + most // 2] if excess else ():
            del self.marks[number]

    def behind(self, now: float, gone: set[int]) -> tuple[int, int] | None:
        """Return whom to ask about which number: that at which a rank stands behind the others, once for each."""
        if len(self.upto) < 2:
            return None
        slow = min(self.upto, key=self.upto.__getitem__)
        number = self.upto[slow]
        if number <= max(self.agreed, self.asked_about) or now - self.since[slow] < _STUCK_S:
            return None
        ahead = [rank for rank, upto in self.upto.items() if upto > number and rank not in gone]
        known = set().union(*self.marks.get(number, {}).values())
        if not ahead or not known.isdisjoint(ahead):
            return None
        self.asked_about = number
        return min(ahead), number


class Comparison:
    """All groups of a job."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._doubted: set[str] = set()
        self._gone: set[int] = set()
        self._looked = 0.0

    @property
    def doubtful(self) -> bool:
        """Whether a difference was seen and is still being asked about."""
        return bool(self._doubted)

    def hear(self, rank: int, message: Told | Recalled, now: float) -> None:
        """Take in what ``rank`` says of its calls."""
        if isinstance(message, Recalled):
            self._recalled(rank, message, now)
            return
        for said in message.groups:
            self._said(rank, said, now)

    def _said(self, rank: int, said: Said, now: float) -> None:
        if said.size < 1:
            return
        group = self._groups.pop(said.group, None) or _Group(said.size)
        # Put at the end: whoever stands first was not heard of for longest.
        self._groups[said.group] = group
        if len(self._groups) > _MOST_GROUPS:
            self._forget(next(iter(self._groups)))
        if group.quiet:
            return
        if said.void:
            self._hush(said.group)
            return
        group.heard = group.since[rank] = now
        group.upto[rank] = said.upto
        for number, digest in zip(said.numbers, said.digests, strict=False):
            group.mark(number, digest, rank, now)
        group.thin()
        if group.doubt is not None:
            self._doubted.add(said.group)

    def _recalled(self, rank: int, answer: Recalled, now: float) -> None:
        group = self._groups.get(answer.group)
        if group is None or group.quiet:
            return
        if len(answer.which) < len(answer.codes) or not all(0 <= place < len(answer.words) for place in answer.which):
            self.gone(rank)  # It makes no sense, and nothing more is expected from there.
            return
        if answer.void:
            self._hush(answer.group)
            return
        if answer.digest:
            group.mark(answer.upto, answer.digest, rank, now)
            if group.doubt is not None:
                self._doubted.add(answer.group)
        if group.doubt is not None and group.doubt.number == answer.upto:
            group.doubt.owing.discard(rank)
            group.doubt.answers[rank] = answer

    def gone(self, rank: int) -> None:
        """Nothing more comes from ``rank``."""
        self._gone.add(rank)
        for name in self._doubted:
            doubt = self._groups[name].doubt
            if doubt is not None:
                doubt.owing.discard(rank)

    def questions(self, now: float) -> list[tuple[int, Recall]]:
        """Return what is to be asked of whom: about differences, and about ranks that stand behind the others."""
        asked = []
        for name in self._doubted:
            group = self._groups[name]
            doubt = group.doubt
            if doubt is None or doubt.asked is not None:
                continue
            if now - doubt.since < _HEAR_S:
                continue
            doubt.asked = now
            doubt.owing = {rank for rank, upto in group.upto.items() if upto >= doubt.number} - self._gone
            question = Recall(name, group.agreed, doubt.number)
            asked += [(rank, question) for rank in sorted(doubt.owing)]
        if now - self._looked < _LOOK_S:
            return asked
        self._looked = now
        for name, group in self._groups.items():
            # In a group of which nothing was heard for a while, everyone has been asked about before.
            if group.doubt is None and now - group.heard <= 2 * _STUCK_S + _LOOK_S:
                found = group.behind(now, self._gone)
                if found is not None:
                    asked.append((found[0], Recall(name, found[1] - 1, found[1])))
        return asked

    def judge(self, now: float) -> Difference | None:
        """Return a difference that all have answered about, or had the time to."""
        for name in sorted(self._doubted):
            group = self._groups[name]
            doubt = group.doubt
            if doubt is None or doubt.asked is None or (doubt.owing and now - doubt.asked < _ANSWER_S):
                continue
            found = _judge(name, doubt, group.marks.get(doubt.number, {}))
            if found is not None:
                return found
            self._hush(name)
        return None

    def _hush(self, name: str) -> None:
        """Compare nothing more in a group: nobody knows which calls belong together."""
        group = _Group(0)
        group.quiet = True
        self._groups[name] = group
        self._doubted.discard(name)

    def _forget(self, name: str) -> None:
        del self._groups[name]
        self._doubted.discard(name)


def _judge(name: str, doubt: _Doubt, told: dict[int, set[int]]) -> Difference | None:
    """Find the first call that differs, and say who called what there."""
    answered = (sorted(same & doubt.answers.keys()) for same in told.values())
    number = _first_difference([doubt.answers[ranks[0]] for ranks in answered if ranks]) or doubt.number
    said: dict[int, tuple[int, str]] = {}
    for rank, answer in doubt.answers.items():
        place = number - answer.first
        if 0 <= place < len(answer.codes):
            said[rank] = answer.codes[place], answer.words[answer.which[place]]
    for digest, same in told.items():
        # Who is gone called what others with the same digest called; where there are none, nobody knows what.
        like = next((said[rank] for rank in sorted(same) if rank in said), (-digest, "called something else before"))
        for rank in same:
            said.setdefault(rank, like)
    if len({code for code, _ in said.values()}) == 1:
        # The calls that differ are too long ago for anyone to remember them.
        digests = {rank: digest for digest, same in told.items() for rank in same}
        said = {rank: (digest, f"{said[rank][1]}, and something else before") for rank, digest in digests.items()}
    numbers = sorted(said)
    found = sides.judge([said[rank][0] for rank in numbers], [said[rank][1] for rank in numbers], numbers)
    if found is None:
        return None
    lines, left = found.lines[:_MOST_LINES], len(found.lines) - _MOST_LINES
    return Difference(
        name,
        number,
        tuple(numbers[index] for index in found.odd),
        (*lines, f"{left} more called other things") if left > 0 else lines,
    )


def _first_difference(answers: list[Recalled]) -> int:
    """Return the first number at which not all of these called the same, 0 where none is remembered."""
    first = max((answer.first for answer in answers), default=0)
    last = min((answer.first + len(answer.codes) for answer in answers), default=0)
    for number in range(first, last):
        if len({answer.codes[number - answer.first] for answer in answers}) > 1:
            return number
    return 0
