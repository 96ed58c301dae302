"""Operations under way that allhands returns for torch's own groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from allhands.groups.collectives import Pending
from allhands.observe import flight_recorder
from unit.groups.fakes import FakeMember, make_session


class _Work:
    """A Work of an engine that is done, or late."""

    def __init__(self, *, late: bool = False) -> None:
        self.late = late

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.late:
            raise RuntimeError(f"Operation timed out after {timeout}")
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return not self.late


def _pending(work: _Work) -> tuple[Pending, Callable[[], str]]:
    """Return the operation with an entry of its own, and what reads the state of that entry."""
    recorder = flight_recorder.own()
    number = recorder.begin("all_reduce", "", "", "", (), 0, -1, "test_collectives.py:1")
    recorder.run(number, 0)
    made = Pending(work, make_session(FakeMember()), "all_reduce", "test_collectives.py:1", entry=number)

    def state() -> str:
        return next(str(note.state) for note in flight_recorder.board().entries if note.number == number)

    assert state() == "running"
    return made, state


@pytest.mark.parametrize(
    "finish",
    [
        lambda pending: pending.wait(),
        lambda pending: pending.wait(timedelta(seconds=1)),
        lambda pending: pending.synchronize(),
        lambda pending: pending.is_completed(),
    ],
    ids=["wait", "wait with a timeout", "synchronize", "is_completed"],
)
def test_every_way_to_wait_closes_the_entry(finish: Callable[[Pending], Any]) -> None:
    """The flight recorder shows an operation as done, however its end was noticed."""
    pending, state = _pending(_Work())
    finish(pending)
    assert state() == "done"


def test_a_wait_that_runs_into_its_own_timeout_leaves_the_entry_open() -> None:
    """The operation is still under way then; a later wait closes it."""
    work = _Work(late=True)
    pending, state = _pending(work)
    with pytest.raises(RuntimeError, match="timed out"):
        pending.wait(timedelta(seconds=1))
    assert state() == "running"
    work.late = False
    pending.wait(timedelta(seconds=1))
    assert state() == "done"


def test_a_failed_operation_is_shown_as_failed() -> None:
    """`synchronize` and `wait` close the entry where the engine raises, too."""
    for finish in (Pending.wait, Pending.synchronize):
        pending, state = _pending(_Work(late=True))
        with pytest.raises(RuntimeError, match="did not finish"):
            finish(pending)
        assert state() == "failed"
