"""The queue of asynchronous calls, and waits that end with the group."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from allhands.groups import work
from allhands.groups.session import Session
from allhands.groups.work import CallQueue, interruptible


class _Member:
    """The callbacks of a coordinator's member."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []
        self.verdict: Exception | None = None

    def on_end(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def off_end(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.remove(callback)

    def check(self) -> None:
        if self.verdict is not None:
            raise self.verdict


def _session(member: _Member) -> Session:
    return cast("Session", SimpleNamespace(member=member))


def test_calls_run_in_the_order_in_which_they_were_made() -> None:
    """Queued calls run one after the other; a failed one raises in `wait` and does not stop the next."""
    calls = CallQueue("test-queue")
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("second")

    first = calls.submit(lambda: ran.append(1), [], later=True)
    second = calls.submit(fail, [], later=True)
    third = calls.submit(lambda: ran.append(3), [torch.ones(2)], later=True)
    assert third.wait()
    assert first.is_success()
    with pytest.raises(ValueError, match="second"):
        second.wait()
    assert ran == [1, 3]
    calls.close(1.0)
    with pytest.raises(Exception, match="shut down"):
        calls.submit(lambda: None, [], later=True)


def test_two_callers_start_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers in several threads start the queue's thread once; calls never run at the same time."""
    started: list[str] = []

    class Slow(threading.Thread):
        def __init__(self, **parts: Any) -> None:
            time.sleep(0.05)  # The other callers reach the same line meanwhile.
            super().__init__(**parts)

        def start(self) -> None:
            started.append(self.name)
            super().start()

    callers = [threading.Thread(target=lambda: calls.submit(lambda: None, [], later=True).wait()) for _ in range(4)]
    calls = CallQueue("test-queue")
    monkeypatch.setattr(work.threading, "Thread", Slow)
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    calls.close(1.0)
    assert started == ["test-queue"]


def test_a_callback_may_call_and_wait() -> None:
    """A call made by the callback of a future runs at once, in the queue's thread."""
    calls = CallQueue("test-queue")
    ran: list[str] = []

    def follow(_: Any) -> None:
        calls.submit(lambda: ran.append("callback"), [], later=True).wait()

    begun = threading.Event()
    first = calls.submit(begun.wait, [], later=True)  # type: ignore[arg-type]  # its result is not used
    first.get_future().add_done_callback(follow)
    second = calls.submit(lambda: ran.append("second"), [], later=True)
    begun.set()
    second.wait()
    calls.close(1.0)
    assert ran == ["callback", "second"]


def test_an_interruptible_call_returns_and_raises() -> None:
    """The function's result and exception arrive in the caller's thread; no callback remains."""
    member = _Member()
    assert interruptible(_session(member), lambda x: x + 1)(2) == 3

    def fail() -> None:
        raise RuntimeError("in the engine")

    with pytest.raises(RuntimeError, match="in the engine"):
        interruptible(_session(member), fail)()
    assert member.callbacks == []


def test_an_interruptible_call_ends_with_the_group() -> None:
    """The end of the group raises its reason although the engine still waits."""
    member, release = _Member(), threading.Event()

    def end() -> None:
        while not member.callbacks:
            time.sleep(0.001)
        member.verdict = ConnectionError("rank 1 died")
        for callback in list(member.callbacks):
            callback(None)

    ender = threading.Thread(target=end)
    ender.start()
    with pytest.raises(ConnectionError, match="rank 1 died"):
        interruptible(_session(member), release.wait)()
    ender.join(10)
    release.set()
    assert member.callbacks == []


def test_ctrl_c_leaves_no_callback() -> None:
    """A wait that KeyboardInterrupt ends is forgotten by the member, and its thread ends with the receive."""
    member, release, main = _Member(), threading.Event(), threading.get_ident()

    def interrupt() -> None:
        while not member.callbacks:
            time.sleep(0.001)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        interruptible(_session(member), release.wait)()
    assert member.callbacks == []
    release.set()
    for thread in threading.enumerate():
        if thread.name == "allhands-receive":
            thread.join(10)
            assert not thread.is_alive()
