from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from allhands.control import waiting_line
from allhands.control.waiting_line import WaitingLine


class Stream(io.StringIO):
    """A stream that is a terminal or not, as told."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        """Say what was told."""
        return self.terminal


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Put a clock of our own into the module."""
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
def test_the_first_second_is_quiet(clock: Clock, *, terminal: bool) -> None:
    """A group that forms at once says nothing, and leaves nothing to clean up."""
    stream = Stream(terminal=terminal)
    run(stream, clock, 0.5).done()
    assert stream.getvalue() == ""


def test_a_log_gets_one_line_each_ten_seconds(clock: Clock) -> None:
    """Where lines stay, the first comes after a second and the next each ten seconds later, with no escape codes."""
    stream = Stream(terminal=False)
    run(stream, clock, 25).done()
    assert stream.getvalue() == "allhands rank 0: line 1\nallhands rank 0: line 11\nallhands rank 0: line 21\n"


def test_a_terminal_has_one_line_that_changes(clock: Clock) -> None:
    """On a terminal each line takes the place of the one before, and the last is taken off at the end, once."""
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
def test_only_one_rank_speaks(clock: Clock, *, terminal: bool) -> None:
    """A rank that is told to be quiet writes nothing, however long it waits."""
    stream = Stream(terminal=terminal)
    run(stream, clock, 30, shown=False).done()
    assert stream.getvalue() == ""


def test_a_closed_stream_does_not_end_the_job(clock: Clock) -> None:
    """Where nobody can read any more, waiting goes on without words."""
    stream = Stream(terminal=False)
    shown = run(stream, clock, 0.5)
    stream.close()
    for clock.now in (1002.0, 1020.0):
        shown("into the void")
    shown.done()


def test_a_process_without_stderr_does_not_end_either(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some launchers start programs with no standard error at all."""
    monkeypatch.setattr(sys, "stderr", None)
    shown = WaitingLine("allhands rank 0")
    clock.now += 20
    shown("into the void")
    shown.done()
