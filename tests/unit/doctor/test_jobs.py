"""Processes that count as ranks: those that a launcher started, and not their own children."""

from __future__ import annotations

from allhands.doctor.jobs import Rank, _without_descendants
from allhands.observe.flight_recorder import FlightRecorder


def rank(number: int, size: int, *, child: bool) -> Rank:
    """Return process 7 as a rank with a flight recorder, or a grandchild of it without one."""
    if child:
        return Rank(1000 + number, number, size, (500, 7, 1), {}, None)
    return Rank(7, number, size, (1,), {}, FlightRecorder(7, number, size, (), 7))


def test_child_of_a_rank_is_no_rank() -> None:
    """A DataLoader worker has the variables of its rank; a job that a rank starts has others."""
    parent = rank(0, 2, child=False)
    assert _without_descendants([parent, rank(0, 2, child=True)]) == [parent]
    other, smaller = rank(1, 2, child=True), rank(0, 1, child=True)
    assert _without_descendants([parent, other, smaller]) == [parent, other, smaller]
