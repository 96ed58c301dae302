"""Concurrent work, with and without threads."""

from __future__ import annotations

import threading

import pytest

from allhands.doctor.concurrent import run_concurrently


def test_all_at_the_same_time() -> None:
    """Items that wait for each other run concurrently; results are in the order of the items."""
    meeting = threading.Barrier(8, timeout=10)

    def meet(number: int) -> int:
        meeting.wait()
        return number * 2

    assert run_concurrently(meet, range(8)) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert run_concurrently(meet, []) == []


def test_first_exception_is_raised() -> None:
    """Of several items that fail, the exception of the first is raised."""
    with pytest.raises(ZeroDivisionError):
        run_concurrently(lambda number: 1 // number, [1, 0])


def test_without_threads_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, the calling thread does all the work in turn."""
    started = []

    def refuse(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        thread.run()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run_concurrently(lambda number: (number, threading.get_ident()), range(5)) == [
        (number, threading.get_ident()) for number in range(5)
    ]
    assert len(started) == 2
