"""Which processes are ranks: those that were started as such, and not what they start themselves."""

from __future__ import annotations

import os

from allhands.doctor.job_ranks import Rank, _outermost
from allhands.doctor.proc_status import look
from allhands.observe.flight_recorder import FlightRecorder


def rank(number: int, size: int, *, child: bool) -> Rank:
    """Return this process as a rank with a board, or a child of it without one."""
    seen = look(os.getpid() if not child else 1)
    assert seen is not None
    if child:
        return Rank(10**9 + number, number, size, type(seen)(**{**vars(seen), "parent": os.getpid()}), None)
    return Rank(os.getpid(), number, size, seen, FlightRecorder(os.getpid(), number, size, (), os.getpid()))


def test_what_a_rank_starts_with_its_own_variables_is_no_rank() -> None:
    """A loader's worker has them too; a job of its own has others."""
    parent = rank(0, 2, child=False)
    assert _outermost([parent, rank(0, 2, child=True)]) == [parent]
    other, smaller = rank(1, 2, child=True), rank(0, 1, child=True)
    assert _outermost([parent, other, smaller]) == [parent, other, smaller]
