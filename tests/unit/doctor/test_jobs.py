"""Processes that count as ranks: those that a launcher started, and not their own children."""

from __future__ import annotations

import os

from allhands.doctor.jobs import Rank, _without_descendants
from allhands.doctor.proc_status import read_status
from allhands.observe.flight_recorder import FlightRecorder


def rank(number: int, size: int, *, child: bool) -> Rank:
    """Return this process as a rank with a flight recorder, or a child of it without one."""
    status = read_status(os.getpid() if not child else 1)
    assert status is not None
    if child:
        return Rank(10**9 + number, number, size, type(status)(**{**vars(status), "parent": os.getpid()}), None)
    return Rank(os.getpid(), number, size, status, FlightRecorder(os.getpid(), number, size, (), os.getpid()))


def test_child_of_a_rank_is_no_rank() -> None:
    """A DataLoader worker has the variables of its rank; a job that a rank starts has others."""
    parent = rank(0, 2, child=False)
    assert _without_descendants([parent, rank(0, 2, child=True)]) == [parent]
    other, smaller = rank(1, 2, child=True), rank(0, 1, child=True)
    assert _without_descendants([parent, other, smaller]) == [parent, other, smaller]
