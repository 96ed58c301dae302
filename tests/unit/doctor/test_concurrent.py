"""Several looks at once, with and without threads."""

from __future__ import annotations

import threading

import pytest

from allhands.doctor.concurrent import Together, together


def test_all_at_the_same_time() -> None:
    """Each waits for all others, which only works side by side; results come in the order asked."""
    meeting = threading.Barrier(8, timeout=10)

    def meet(number: int) -> int:
        meeting.wait()
        return number * 2

    assert together(meet, range(8)) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert together(meet, []) == []


def test_what_was_raised_is_raised_where_asked() -> None:
    """Of several that fail, the first in order."""
    work = Together(lambda number: 1 // number, [1, 0])
    with pytest.raises(ZeroDivisionError):
        work.results()


def test_without_threads_the_asker_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started, all is done by whoever asks, one after the other."""
    started = []

    def refuse(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        thread.run()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert together(lambda number: (number, threading.get_ident()), range(5)) == [
        (number, threading.get_ident()) for number in range(5)
    ]
    assert len(started) == 2
