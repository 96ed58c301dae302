from __future__ import annotations

import signal

from allhands.launch.termination import EXPLAIN_S, Termination


def test_no_signal_before_the_end() -> None:
    """No signal is due before the job ends."""
    termination = Termination(10.0)
    assert not termination.begun
    assert termination.due(1e9) == 0


def test_after_a_failure() -> None:
    """After a failure, SIGTERM is due once in a moment, and SIGKILL after the grace until all are gone."""
    termination = Termination(10.0)
    termination.begin(100.0)
    termination.begin(101.0)
    assert termination.due(100.0 + EXPLAIN_S - 0.01) == 0
    assert termination.due(100.0 + EXPLAIN_S) == signal.SIGTERM
    assert termination.due(105.0) == 0
    assert termination.due(112.0) == signal.SIGKILL
    assert termination.due(112.1) == signal.SIGKILL


def test_first_request_forwards_second_kills() -> None:
    """The first Ctrl-C is forwarded at once; the second makes SIGKILL due."""
    termination = Termination(10.0)
    termination.request(5.0, signal.SIGINT)
    assert termination.due(5.0) == signal.SIGINT
    termination.request(5.5, signal.SIGINT)
    assert termination.due(5.5) == signal.SIGKILL


def test_request_skips_the_wait_after_a_failure() -> None:
    """Ctrl-C after a failure is forwarded at once."""
    termination = Termination(10.0)
    termination.begin(0.0)
    termination.request(0.5, signal.SIGINT)
    assert termination.due(0.5) == signal.SIGINT
