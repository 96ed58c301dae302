"""The call lock: one call at a time, and every waiting thread gets its turn."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import pytest

from threads import segments, together

pytest.importorskip("allhands._core", reason="the C core is built on Linux only")

THREADS = 6
TURNS = 300

# Far longer than a turn, far shorter than a test may take.
PATIENCE_S = 30.0


def test_only_one_has_the_turn() -> None:
    """Critical sections of several threads never overlap, and none is lost."""
    with segments(1, 1 << 16) as (view,):
        inside: list[int] = []
        seen: list[tuple[int, int]] = []

        def work(number: int) -> None:
            for turn in range(TURNS):
                with view:
                    assert not inside
                    inside.append(number)
                    if turn % 50 == 0:
                        time.sleep(0.001)  # lets others come and wait
                    seen.append((number, turn))
                    inside.pop()

        together(THREADS, work)
    assert sorted(seen) == [(number, turn) for number in range(THREADS) for turn in range(TURNS)]


def test_a_waiting_thread_is_woken() -> None:
    """Releasing the lock wakes a sleeping thread at once, not at its next check (every 50 ms)."""
    hops = 200
    with segments(1, 1 << 16) as (view,):
        held, comes, had = (threading.Semaphore(0) for _ in range(3))
        given: list[float] = []
        late: list[float] = []

        def hold() -> None:
            for _ in range(hops):
                with view:
                    held.release()
                    assert comes.acquire(timeout=PATIENCE_S)
                    time.sleep(0.002)  # the other sleeps by now
                    given.append(time.monotonic())
                assert had.acquire(timeout=PATIENCE_S)

        def wait() -> None:
            for _ in range(hops):
                assert held.acquire(timeout=PATIENCE_S)
                comes.release()
                with view:
                    late.append(time.monotonic() - given[-1])
                had.release()

        together(2, lambda number: hold() if number == 0 else wait())
    # Its own check would be 24 ms later on average; a woken thread may still wait for a core.
    assert sorted(late)[hops // 2] < 0.01


def test_a_signal_is_handled_while_waiting() -> None:
    """Ctrl-C ends the wait for a lock that is not released, and its owner keeps it."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with segments(1, 1 << 16) as (view,):
        before = signal.signal(signal.SIGALRM, handler)
        try:
            with view:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(KeyboardInterrupt):
                    view.__enter__()
            with view:  # it was given back once, by who had it
                pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
