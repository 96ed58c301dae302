"""Whether a job stands still, and who is behind: from the boards. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from ..observe.flight_recorder import Entry, FlightRecorder

__all__ = ["Hang", "Watch", "behind"]

_Boards = Mapping[int, FlightRecorder | None]


class Hang(msgspec.Struct, frozen=True):
    """What every worker was doing at one moment: board, stacks of its threads, and what the kernel says it does."""

    boards: _Boards
    stacks: Mapping[int, str]
    states: Mapping[int, str]
    pids: Mapping[int, int]
    after_s: float

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks that the others wait for."""
        return behind(self.boards)


class Watch:
    """Looks at the boards again and again; tells once nobody has moved for the given time."""

    def __init__(self, after_s: float) -> None:
        self.on = after_s > 0
        # Ten looks within the time make it exact to a tenth of it.
        self.pause_s = min(max(after_s / 10, 0.05), 1.0) if self.on else 1.0
        self._after_s = after_s
        self._since: float | None = None
        self._seen: dict[int, tuple[object, ...]] = {}

    def forget(self) -> None:
        """Begin again: the job was stopped meanwhile."""
        self._since = None

    def hangs(self, now: float, boards: _Boards) -> bool:
        """Tell whether no board moved, and someone has been inside one collective, for the whole time."""
        return all(self.stands(now, boards))

    def stands(self, now: float, boards: _Boards) -> tuple[bool, bool]:
        """Tell whether no board moved for the whole time, and whether someone was inside one collective as long."""
        seen = {rank: _marks(board) for rank, board in boards.items()}
        if seen != self._seen or self._since is None:
            self._seen, self._since = seen, now
            return False, False
        inside = [note for board in boards.values() if board for note in board.under_way]
        longest = max((now - (note.started_s or note.issued_s) for note in inside), default=0.0)
        return now - self._since >= self._after_s, longest >= self._after_s


def _marks(board: FlightRecorder | None) -> tuple[object, ...]:
    return tuple((note.number, note.state) for note in board.entries) if board else ()


def behind(boards: _Boards) -> tuple[int, ...]:
    """Return the ranks that the others wait for: those outside any collective, else at an earlier or another call.

    Nobody is behind where all ranks are in the same call.
    """
    inside: dict[int, Entry] = {}
    for rank, board in boards.items():
        if board and board.under_way:
            inside[rank] = board.under_way[0]
    outside = tuple(sorted(set(boards) - set(inside)))
    if outside:
        return outside if inside else ()
    if len({note.group for note in inside.values()}) == 1:
        first = min(note.sequence for note in inside.values())
        early = tuple(sorted(rank for rank, note in inside.items() if note.sequence == first))
        if len(early) < len(inside):
            return early
    calls = Counter((note.group, note.operation) for note in inside.values())
    most = calls.most_common(1)[0][0] if calls else None
    return tuple(sorted(rank for rank, note in inside.items() if (note.group, note.operation) != most))
