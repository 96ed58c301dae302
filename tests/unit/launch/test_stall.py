from __future__ import annotations

from allhands.launch.stall import Watch, behind
from allhands.observe.flight_recorder import Entry, FlightRecorder


def note(number: int = 1, state: str = "running", *, sequence: int = 0, operation: str = "all_reduce") -> Entry:
    """Return an operation that began at 100 s."""
    return Entry(
        number, "default", sequence, operation, "SUM", "float32", (4,), 16, -1, "a.py:1", state, True, 100.0, 100.0, 0.0
    )  # fmt: skip


def board(*entries: Entry) -> FlightRecorder:
    """Return a board with these."""
    return FlightRecorder(1, 0, 2, entries)


def test_a_job_that_stands_still() -> None:
    """It hangs once nobody moved for the whole time, and someone has been inside a collective for it."""
    watch = Watch(10.0)
    boards = {0: board(note()), 1: board(note(1, "done"))}
    assert not watch.hangs(100.0, boards)
    assert not watch.hangs(109.9, boards)
    assert watch.hangs(110.0, boards)


def test_any_move_starts_the_time_again() -> None:
    """As long as one rank gets on, the job does."""
    watch = Watch(10.0)
    watch.hangs(100.0, {0: board(note()), 1: board(note(1, "done"))})
    assert not watch.hangs(110.0, {0: board(note()), 1: board(note(2, "done"))})
    assert not watch.hangs(119.0, {0: board(note()), 1: board(note(2, "done"))})
    assert watch.hangs(120.0, {0: board(note()), 1: board(note(2, "done"))})


def test_computing_is_no_hang() -> None:
    """Where nobody is in a collective, ranks may compute as long as they like; so may ranks without a group."""
    watch = Watch(10.0)
    boards = {0: board(note(1, "done")), 1: None}
    assert not watch.hangs(100.0, boards)
    assert not watch.hangs(500.0, boards)


def test_off() -> None:
    """Without --hang-timeout nothing is looked at."""
    assert not Watch(0.0).on


def test_who_is_behind() -> None:
    """Those outside any collective, else those at an earlier call, else those at another; nobody where all agree."""
    inside = board(note())
    assert behind({0: inside, 1: board(note(1, "done")), 2: None}) == (1, 2)
    assert behind({0: board(note(3, sequence=3)), 1: board(note(2, sequence=2)), 2: board(note(3, sequence=3))}) == (1,)
    assert behind({0: inside, 1: inside, 2: board(note(1, operation="broadcast"))}) == (2,)
    assert behind({0: inside, 1: inside}) == ()
    assert behind({0: None, 1: None}) == ()
