from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from allhands.control import waiting_line
from allhands.control.waiting_line import WaitingLine


class Stream(io.StringIO):
    """A stream that is a terminal or not."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        """Return what the test chose."""
        return self.terminal


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the module."""
    made = Clock()
    monkeypatch.setattr(waiting_line, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def run(stream: Stream, clock: Clock, seconds: float, **kw: bool) -> WaitingLine:
    """Wait for ``seconds``, with a new line each half second."""
    shown = WaitingLine("allhands rank 0", stream=stream, **kw)
    for half in range(int(seconds * 2) + 1):
        clock.now = 1000.0 + half / 2
        shown(f"line {half / 2:g}")
    return shown


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_printed_in_the_first_second(clock: Clock, *, terminal: bool) -> None:
    """A group that forms at once prints nothing, and leaves nothing to erase."""
    stream = Stream(terminal=terminal)
    run(stream, clock, 0.5).done()
    assert stream.getvalue() == ""


def test_a_log_gets_one_line_each_ten_seconds(clock: Clock) -> None:
    """In a log the first line is printed after a second and the next ones every ten seconds, without escape codes."""
    stream = Stream(terminal=False)
    run(stream, clock, 25).done()
    assert stream.getvalue() == "allhands rank 0: line 1\nallhands rank 0: line 11\nallhands rank 0: line 21\n"


def test_a_terminal_has_one_line_that_changes(clock: Clock) -> None:
    """On a terminal each line replaces the previous one, and the last is erased at the end, once."""
    stream = Stream(terminal=True)
    shown = run(stream, clock, 2)
    assert stream.getvalue().split("\r\x1b[K") == [
        "",
        "allhands rank 0: line 1",
        "allhands rank 0: line 1.5",
        "allhands rank 0: line 2",
    ]
    shown.done()
    shown.done()
    assert stream.getvalue().endswith("line 2\r\x1b[K")
    assert "\n" not in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_that_is_not_shown_prints_nothing(clock: Clock, *, terminal: bool) -> None:
    """With shown=False nothing is written, however long the wait."""
    stream = Stream(terminal=terminal)
    run(stream, clock, 30, shown=False).done()
    assert stream.getvalue() == ""


class Broken(Stream):
    """A stream that counts writes and refuses them."""

    writes = 0

    def write(self, _: str) -> int:
        """Refuse, as a closed pipe does."""
        self.writes += 1
        raise BrokenPipeError


def test_a_broken_stream_is_written_to_once(clock: Clock) -> None:
    """After the first error nothing more is written, and the caller continues."""
    stream = Broken(terminal=True)
    run(stream, clock, 30)
    assert stream.writes == 1


def test_a_process_without_stderr_prints_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without standard error nothing is printed, even if one is opened later."""
    monkeypatch.setattr(sys, "stderr", None)
    shown = WaitingLine("allhands rank 0")
    later = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", later)
    clock.now += 20
    shown("line")
    shown.done()
    assert later.getvalue() == ""
