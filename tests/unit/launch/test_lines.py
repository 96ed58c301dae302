from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allhands.launch.lines import MOST_LINE, Lines, label, prefixed


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\xff", b" "]), max_size=60), st.integers(1, 7))
def test_nothing_is_lost_however_it_is_cut(parts: list[bytes], size: int) -> None:
    """Whatever pieces a stream comes in, its lines are the same; the last one gets its newline."""
    whole = b"".join(parts)
    lines = Lines()
    found = b"".join(lines.feed(whole[at : at + size]) for at in range(0, len(whole), size)) + lines.rest()
    assert found == (whole if whole.endswith(b"\n") or not whole else whole + b"\n")


@given(st.lists(st.sampled_from([b"1%", b"\r", b"\n", b"2%"]), max_size=40), st.integers(1, 5))
def test_carriage_returns_do_not_depend_on_the_cut(parts: list[bytes], size: int) -> None:
    """A line that is redrawn is shown in its last state, however its pieces come."""
    whole = b"".join(parts) + b"\n"
    lines, once = Lines(), Lines()
    pieces = b"".join(lines.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    assert pieces == once.feed(whole)


def test_what_a_terminal_would_show() -> None:
    """What was overwritten is left out; a carriage return before a newline is part of it."""
    assert Lines().feed(b"a\rb\rc\nd\r\ne\n") == b"c\nd\r\ne\n"


def test_a_bar_in_between() -> None:
    """While a bar is drawn its last state can be asked for; an unfinished line that is not redrawn has none."""
    lines = Lines()
    assert lines.feed(b"\r10%\r20%") == b""
    assert lines.redrawn() == b"20%\n"
    assert lines.feed(b"\r30%\n") == b"30%\n"
    lines.feed(b"name? ")
    assert lines.redrawn() == b""
    assert lines.take() == b"name? "
    assert lines.rest() == b""


def test_a_line_without_end_takes_no_memory_without_end() -> None:
    """A line longer than the most is shown in pieces."""
    lines = Lines()
    shown = b"".join(lines.feed(b"z" * 100_000) for _ in range(25))
    assert len(lines.partial) <= MOST_LINE
    assert (shown + lines.rest()).replace(b"\n", b"") == b"z" * 2_500_000


def test_prefix() -> None:
    """Each line gets the prefix; in colour where asked for."""
    assert prefixed(label("3", None), b"a\n\nb\n") == b"[3] a\n[3] \n[3] b\n"
    assert prefixed(b"", b"a\n") == b"a\n"
    assert label("0-7", 1) == b"\x1b[33m[0-7]\x1b[0m "
