from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.launch.fold import WINDOW_S, Fold, ranges

WORDS = st.sampled_from([b"a", b"b", b"c", b""])


@given(st.lists(st.tuples(st.integers(0, 3), WORDS), max_size=60), st.floats(0.0, 0.2))
def test_each_rank_keeps_its_lines_in_order(said: list[tuple[int, bytes]], step: float) -> None:
    """However lines are folded and timed, each rank's are all there, in order."""
    fold, found = Fold(4), []
    for number, (rank, line) in enumerate(said):
        fold.add(rank, line + b"\n", number * step)
        found += fold.due(number * step)
    found += fold.due(0.0, all_of_it=True)
    for rank in range(4):
        assert [line for line, who in found if rank in who] == [line + b"\n" for each, line in said if each == rank]


def test_all_say_the_same() -> None:
    """A line that all ranks have said is shown at once, even behind lines of their own."""
    fold = Fold(3)
    for rank in range(3):
        fold.add(rank, b"same\nmine %d\nsame\n" % rank, 0.0)
    assert fold.due(0.0) == [(b"same\n", [0, 1, 2])]
    late = fold.due(WINDOW_S)
    assert sorted(late[:3]) == [(b"mine %d\n" % rank, [rank]) for rank in range(3)]
    assert late[3:] == [(b"same\n", [0, 1, 2])]


def test_a_line_waits_only_so_long() -> None:
    """What some ranks have not said is shown with those that have, once it is old."""
    fold = Fold(4)
    fold.add(0, b"x\n", 0.0)
    fold.add(2, b"x\n", 0.1)
    assert fold.due(WINDOW_S - 0.01) == []
    assert fold.due(WINDOW_S) == [(b"x\n", [0, 2])]


def test_a_flood_does_not_wait() -> None:
    """More lines than may wait are shown at once, so memory is bounded."""
    fold = Fold(2)
    fold.add(0, b"".join(b"%d\n" % number for number in range(30_000)), 0.0)
    assert len(fold.due(0.0)) >= 10_000


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([], "")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    """Ranks are written as short as they go."""
    assert ranges(numbers) == text
