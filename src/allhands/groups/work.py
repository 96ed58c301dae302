"""Operations under way, as torch knows them (`torch.distributed.Work`), and how a thread waits for one.

torch's C++ code (DDP) only ever calls `wait` and `get_future` of a Work. The future it gets is one made with `then`: a
failed future passed on as it is ends the process, one made so raises.
"""

from __future__ import annotations

import _thread
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _core, _torch
from ..diagnosis import Diagnosis
from ..errors import fail

if TYPE_CHECKING:
    from .session import Session

__all__ = ["CallQueue", "Done", "Operation", "Queued", "interruptible", "wait_for_future"]

# Which operations are kept after their caller dropped them, and how many: those of a few numbers, which cost nothing
# to keep, and more of them than a model has between a forward pass and the end of its backward pass.
_KEPT_BYTES = 64
_KEPT = 1024


@_torch.untraced
class Operation(dist.Work):
    """An operation as torch asks about it. Subclasses define `is_completed` and how to wait."""

    # Named in the error of a wait with a timeout.
    name = "it"
    # What it raised, if anything.
    _problem: BaseException | None = None

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def _finish_by(self, limit_s: float | None, /) -> bool:
        """Wait at most ``limit_s``; return whether it is done."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raise what it raised. A ``timeout`` of the caller raises without ending it."""
        limit_s = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        if not self._finish_by(limit_s):
            raise RuntimeError(f"Operation timed out: {self.name} was not done within {limit_s} s")
        if self._problem is not None:
            raise self._problem
        return True

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether it is done and did not fail."""
        return self.is_completed() and self._problem is None

    def exception(self) -> BaseException | None:
        """Return what it raised, if anything."""
        return self._problem

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        """Complete ``future``, now that it is done."""
        if self._problem is not None:
            future.set_exception(self._problem)
        else:
            future.set_result(self._tensors)


@_torch.untraced
class Done(Operation):
    """An operation that was complete when it was returned; a failure was raised by the call itself."""

    def _finish_by(self, _: float | None) -> bool:
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Return a completed future of its tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._settle(future)
        return future


@_torch.untraced
class Queued(Operation):
    """An operation that waits in a `CallQueue` or is running there."""

    def __init__(self, function: Callable[[], None], tensors: list[torch.Tensor], calls: CallQueue) -> None:
        super().__init__(tensors)
        self._calls = calls
        self._function: Callable[[], None] | None = function
        self._finished = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self) -> None:
        """Run it. Never raises: an exception is raised by `wait`."""
        # Dropped once it has run: it holds all tensors of the call.
        function, self._function = self._function, None
        try:
            if function is not None:
                function()
        except BaseException as problem:  # noqa: BLE001  # raised by `wait`
            self._problem = problem
        self._finished.set()

    def run_callbacks(self) -> None:
        """Complete its future. Callbacks of that may call into the group again, and wait there."""
        self._settle(self._future)

    def _finish_by(self, limit_s: float | None) -> bool:
        if self._calls.in_thread():
            self._calls.run_until(self)
        try:
            return self._finished.wait(limit_s)
        except KeyboardInterrupt:
            # torch's C++ code (DDP) turns it into a RuntimeError. Raised once more, it arrives unchanged when the
            # interpreter is back in Python. A caller in Python has "wait" among its names, and has received it.
            if "wait" not in sys._getframe(2).f_code.co_names:  # noqa: SLF001  # inspect.currentframe, two frames up
                _thread.interrupt_main()
            raise

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._finished.is_set()

    def get_future(self) -> Any:
        """Return a future of its tensors, which raises where the operation failed."""
        future = self._future
        if self._finished.is_set() and not future.done():
            # A caller that has waited must find the future done, even if callbacks of earlier calls still run.
            future = torch.futures.Future()
            self._settle(future)
        return future.then(lambda future: future.value())


class CallQueue:
    """Runs calls one after the other in the order in which they were made, in a thread of its own.

    A call whose caller waits anyway runs in the caller's thread if the queue is empty. Callbacks of a call's future run
    in the queue's thread before the next call: calls made by a callback run at once, on every rank at the same place in
    the order.
    """

    def __init__(self, name: str, call_lock: _core.Segment | None = None) -> None:
        """Create a queue whose calls hold ``call_lock``; its fast path is told how many are queued."""
        self._name = name
        self._counted = call_lock
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        # Held while a call runs.
        self.call_lock: AbstractContextManager[Any] = call_lock if call_lock is not None else threading.Lock()
        # Guards what follows. Reentrant: a signal's handler may destroy the group in the middle.
        self._lock = threading.RLock()
        # Calls that are queued or running, callbacks included.
        self._pending = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._kept: deque[Queued] = deque(maxlen=_KEPT)

    def submit(self, function: Callable[[], None], tensors: list[torch.Tensor], *, later: bool) -> dist.Work:
        """Run ``function``: before this returns, or with ``later`` in the queue's thread."""
        if not later and (self._pending == 0 or self.in_thread()):
            with self.call_lock:
                function()
            return Done(tensors)
        work = Queued(function, tensors, self)
        if self.in_thread():
            if self._closed:
                raise _shut_down()
            self._run_one(work)
            return work
        with self._lock:
            if self._closed:
                raise _shut_down()
            # DDP's C++ code holds one between passes (how many ranks have not joined yet), but that does not keep its
            # Python object alive.
            # Not nbytes, which sparse tensors do not have.
            if sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _KEPT_BYTES:
                self._kept.append(work)
            self._add(1)
            self._queue.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        if not later:
            work.wait()
        return work

    def in_thread(self) -> bool:
        """Return whether the caller is the queue's thread."""
        return threading.current_thread() is self._thread

    def run_until(self, work: Queued) -> None:
        """Run the queued calls up to ``work``, for a callback that waits for it in the queue's thread."""
        while not work.is_completed() and (following := self._queue.get()) is not None:
            self._run_one(following)
            with self._lock:
                self._add(-1)

    def close(self, within_s: float) -> None:
        """End the thread after what is queued, and wait for that at most ``within_s``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._kept.clear()
            thread = self._thread
            if thread is not None:
                self._queue.put(None)
        if thread is not None and not self.in_thread():
            thread.join(within_s)

    def _run_one(self, work: Queued) -> None:
        with self.call_lock:
            work.run()
        work.run_callbacks()

    def _add(self, more: int) -> None:
        self._pending += more
        if self._counted is not None:
            self._counted.queued = self._pending

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._run_one(work)
            with self._lock:
                self._add(-1)


def _shut_down() -> Exception:
    return fail("already-destroyed", "an operation was begun on a group that has been shut down")


# Waiting ---------------------------------------------------------------------------------------------------------


def interruptible(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` run in another thread, so that the caller's can leave when the group ends or on Ctrl-C.

    Gloo's receive from any source waits on no particular connection, so ending connections does not end it. A thread
    that was left behind ends with the receive, at the latest at its timeout.
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
        try:
            threading.Thread(target=run, name="allhands-receive", daemon=True).start()
            done.wait()
        finally:
            session.member.off_end(ended)
        if problems:
            raise problems[0]
        if not outcome:
            session.member.check()
        return outcome[0]

    return call


def wait_for_future(work: Any, session: Session) -> None:
    """Wait for ``work`` so that a signal's Python handler runs meanwhile, and Ctrl-C raises; raise if the group ends.

    Inside torch's own wait a handler runs only once the operation is over, at its timeout or never: Gloo does not
    always wake an operation whose connections end between two of its steps.
    """
    if work.is_completed():
        return
    done = threading.Event()
    try:
        future = work.get_future()
    except RuntimeError:
        return  # Gloo's reduce_scatter has none.
    future.add_done_callback(lambda _: done.set())
    session.wait_for(done, work)
