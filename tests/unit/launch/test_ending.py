from __future__ import annotations

import signal

from allhands.launch.ending import EXPLAIN_S, Ending


def test_nothing_is_due_while_all_is_well() -> None:
    """A job that does not end is sent nothing."""
    ending = Ending(10.0)
    assert not ending.begun
    assert ending.due(1e9) == 0


def test_after_a_failure() -> None:
    """The others get a moment, then SIGTERM once, then after the grace SIGKILL until they are gone."""
    ending = Ending(10.0)
    ending.fail(100.0)
    ending.fail(101.0)
    assert ending.due(100.0 + EXPLAIN_S - 0.01) == 0
    assert ending.due(100.0 + EXPLAIN_S) == signal.SIGTERM
    assert ending.due(105.0) == 0
    assert ending.due(112.0) == signal.SIGKILL
    assert ending.due(112.1) == signal.SIGKILL


def test_a_signal_is_passed_on_and_the_second_kills() -> None:
    """Ctrl-C reaches the workers as it is, at once; the second one as SIGKILL."""
    ending = Ending(10.0)
    ending.stop(5.0, signal.SIGINT)
    assert ending.due(5.0) == signal.SIGINT
    ending.stop(5.5, signal.SIGINT)
    assert ending.due(5.5) == signal.SIGKILL


def test_a_signal_cuts_the_moment_short() -> None:
    """Whoever presses Ctrl-C after a failure does not wait for explanations."""
    ending = Ending(10.0)
    ending.fail(0.0)
    ending.stop(0.5, signal.SIGINT)
    assert ending.due(0.5) == signal.SIGINT
