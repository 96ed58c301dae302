from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.launch.output import FOLD_WINDOW_S, MOST_LINE_BYTES, Fold, LineBuffer, label, prefixed
from allhands.launch.verdict import rank_ranges


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\xff", b" "]), max_size=60), st.integers(1, 7))
def test_lines_do_not_depend_on_the_reads(parts: list[bytes], size: int) -> None:
    """Lines are the same however a stream is read; the last one gets its newline."""
    whole = b"".join(parts)
    lines = LineBuffer()
    found = b"".join(lines.feed(whole[at : at + size]) for at in range(0, len(whole), size)) + lines.rest()
    assert found == (whole if whole.endswith(b"\n") or not whole else whole + b"\n")


@given(st.lists(st.sampled_from([b"1%", b"\r", b"\n", b"2%"]), max_size=40), st.integers(1, 5))
def test_carriage_returns_do_not_depend_on_the_cut(parts: list[bytes], size: int) -> None:
    """A redrawn line is kept in its last state, however it is read."""
    whole = b"".join(parts) + b"\n"
    lines, once = LineBuffer(), LineBuffer()
    pieces = b"".join(lines.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    assert pieces == once.feed(whole)


def test_overwritten_states_are_dropped() -> None:
    """Overwritten states are dropped; a carriage return before a newline belongs to it."""
    assert LineBuffer().feed(b"a\rb\rc\nd\r\ne\n") == b"c\nd\r\ne\n"


def test_state_of_a_progress_bar() -> None:
    """The last state of a redrawn line is available; an unfinished line that is not redrawn has none."""
    lines = LineBuffer()
    assert lines.feed(b"\r10%\r20%") == b""
    assert lines.redrawn() == b"20%\n"
    assert lines.feed(b"\r30%\n") == b"30%\n"
    lines.feed(b"name? ")
    assert lines.redrawn() == b""
    assert lines.pop_partial() == b"name? "
    assert lines.rest() == b""


def test_long_lines_are_split() -> None:
    """A line longer than the limit is returned in pieces."""
    lines = LineBuffer()
    shown = b"".join(lines.feed(b"z" * 100_000) for _ in range(25))
    assert len(lines.partial) <= MOST_LINE_BYTES
    assert (shown + lines.rest()).replace(b"\n", b"") == b"z" * 2_500_000


def test_prefix() -> None:
    """Each line gets the prefix; in colour where asked for."""
    assert prefixed(label("3", None), b"a\n\nb\n") == b"[3] a\n[3] \n[3] b\n"
    assert prefixed(b"", b"a\n") == b"a\n"
    assert label("0-7", 1) == b"\x1b[33m[0-7]\x1b[0m "


# Folding ---------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from([b"a", b"b", b"c", b""])


@given(st.lists(st.tuples(st.integers(0, 3), WORDS), max_size=60), st.floats(0.0, 0.2))
def test_each_rank_keeps_its_lines_in_order(lines: list[tuple[int, bytes]], step: float) -> None:
    """However lines are folded and timed, each rank keeps all its lines, in order."""
    fold, found = Fold(4), []
    for number, (rank, line) in enumerate(lines):
        fold.add(rank, line + b"\n", number * step)
        found += fold.due(number * step)
    found += fold.due(0.0, everything=True)
    for rank in range(4):
        assert [line for line, who in found if rank in who] == [line + b"\n" for each, line in lines if each == rank]


def test_line_of_all_ranks_is_due_at_once() -> None:
    """A line that all ranks have printed is due at once; lines of single ranks wait."""
    fold = Fold(3)
    for rank in range(3):
        fold.add(rank, b"same\nmine %d\nsame\n" % rank, 0.0)
    assert fold.due(0.0) == [(b"same\n", [0, 1, 2])]
    late = fold.due(FOLD_WINDOW_S)
    assert sorted(late[:3]) == [(b"mine %d\n" % rank, [rank]) for rank in range(3)]
    assert late[3:] == [(b"same\n", [0, 1, 2])]


def test_line_of_some_ranks_is_due_after_the_window() -> None:
    """A line that only some ranks have printed is due with their ranks once it is old."""
    fold = Fold(4)
    fold.add(0, b"x\n", 0.0)
    fold.add(2, b"x\n", 0.1)
    assert fold.due(FOLD_WINDOW_S - 0.01) == []
    assert fold.due(FOLD_WINDOW_S) == [(b"x\n", [0, 2])]


def test_flood_is_due_at_once() -> None:
    """More lines than may wait are due at once, which bounds the memory."""
    fold = Fold(2)
    fold.add(0, b"".join(b"%d\n" % number for number in range(30_000)), 0.0)
    assert len(fold.due(0.0)) >= 10_000


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([], "")]
)
def test_rank_ranges(numbers: list[int], text: str) -> None:
    """Consecutive ranks are written as a range."""
    assert rank_ranges(numbers) == text
