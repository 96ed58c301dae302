"""Waits that end with the group: what an engine is in may not end by itself when its connections do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..diagnosis import Diagnosis

if TYPE_CHECKING:
    from .session import Session

__all__ = ["interruptible", "watched"]


def interruptible(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` run beside this thread, so that this thread can leave when the group ends.

    Gloo's receive from any source waits on no connection in particular, so ending connections does not end it.
    What is left behind ends with its timeout.
    """

    def call(*args: Any, **kw: Any) -> Any:
        outcome: list[Any] = []
        problems: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                outcome.append(function(*args, **kw))
            except BaseException as problem:  # noqa: BLE001  # raised in the caller's thread
                problems.append(problem)
            done.set()

        def ended(_: Diagnosis) -> None:
            done.set()

        session.member.on_end(ended)
        threading.Thread(target=run, name="allhands-receive", daemon=True).start()
        done.wait()
        session.member.off_end(ended)
        if problems:
            raise problems[0]
        if not outcome:
            session.member.check()
        return outcome[0]

    return call


def watched(work: Any, session: Session) -> None:
    """Wait for ``work`` so that a signal's Python handler runs meanwhile, and Ctrl-C raises; raise if the group ends.

    Inside torch's own wait a handler would run only once the operation is over, which may be at its timeout, or never:
    Gloo does not always wake an operation whose connections end between two of its steps, and may have given up
    (`Session.release`).
    """
    done = threading.Event()
    try:
        future = work.get_future()
    except RuntimeError:
        return  # Gloo's reduce_scatter has none.
    future.add_done_callback(lambda _: done.set())
    session.listen(done, work)
