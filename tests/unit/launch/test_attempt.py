from __future__ import annotations

from allhands.launch.attempt import StallDetector
from allhands.observe.flight_recorder import Entry, FlightRecorder


def call(number: int = 1, state: str = "running", *, sequence: int = 0, operation: str = "all_reduce") -> Entry:
    """Return a call that began at 100 s."""
    return Entry(
        number, "default", sequence, operation, "SUM", "float32", (4,), 16, -1, "a.py:1", state, True, 100.0, 100.0, 0.0
    )  # fmt: skip


def recording(*calls: Entry) -> FlightRecorder:
    """Return a flight recorder with these calls."""
    return FlightRecorder(1, 0, 2, calls)


def test_stall() -> None:
    """A job stalls once no recorder changed for the timeout, and one call has taken as long."""
    detector = StallDetector(10.0)
    recordings = {0: recording(call()), 1: recording(call(1, "done"))}
    assert detector.update(100.0, recordings) == (False, False)
    assert detector.update(109.9, recordings) == (False, False)
    assert detector.update(110.0, recordings) == (True, True)


def test_progress_restarts_the_timeout() -> None:
    """A call that any rank finishes restarts the timeout."""
    detector = StallDetector(10.0)
    before = {0: recording(call()), 1: recording(call(1, "done"))}
    after = {0: recording(call()), 1: recording(call(2, "done"))}
    detector.update(100.0, before)
    assert detector.update(110.0, after) == (False, False)
    assert detector.update(119.0, after) == (False, True)
    assert detector.update(120.0, after) == (True, True)


def test_computing_is_no_stall() -> None:
    """Where no rank is in a collective, ranks may compute as long as they like; so may ranks without a group."""
    detector = StallDetector(10.0)
    recordings = {0: recording(call(1, "done")), 1: None}
    assert detector.update(100.0, recordings) == (False, False)
    assert detector.update(500.0, recordings) == (True, False)


def test_suspension_is_no_stall() -> None:
    """The time in which the job was suspended does not count."""
    detector = StallDetector(10.0)
    recordings = {0: recording(call()), 1: None}
    detector.update(100.0, recordings)
    detector.reset()
    assert detector.update(200.0, recordings) == (False, False)
    assert detector.update(210.0, recordings) == (True, True)


def test_disabled_detector() -> None:
    """Without --hang-timeout stalls are not detected."""
    assert not StallDetector(0.0).enabled
