"""Operations under way, as torch knows them: a Work that is done already, and one that another thread does.

torch's C++ code (DDP) only ever asks a Work to `wait` and for its future. The future it gets is one made with
`then`: a failed future handed over as it is ends the process, one made so raises.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Done", "Line", "Queued"]

# Which operations are kept after their caller let go of them, and how many: those of a few numbers, which cost
# nothing to keep, and more of them than a model may have between a forward pass and the end of its backward pass.
_FEW_BYTES = 64
_KEPT = 1024


class Done(dist.Work):
    """An operation that was done before it was asked for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """Tell that it is done."""
        return True

    def is_success(self) -> bool:
        """Tell that it went well; otherwise it would have raised."""
        return True

    def exception(self) -> None:
        """Return nothing: nothing went wrong."""

    def synchronize(self) -> None:
        """Return at once."""

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> Any:
        """Return a future that has its tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Queued(dist.Work):
    """An operation that waits in a `Line` or is being done there."""

    def __init__(self, function: Callable[[], None], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._function: Callable[[], None] | None = function
        self._tensors = tensors
        self._finished = threading.Event()
        self._problem: BaseException | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self) -> None:
        """Do it. Never raises: what goes wrong is raised where it is waited for."""
        # Let go of once it is done: it holds all tensors of the call.
        function, self._function = self._function, None
        try:
            if function is not None:
                function()
        except BaseException as problem:  # noqa: BLE001  # kept for whoever waits
            self._problem = problem
            self._finished.set()
            self._future.set_exception(problem)
        else:
            self._finished.set()
            self._future.set_result(self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raise what went wrong. A ``timeout`` of its own raises without ending it."""
        limit = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        if not self._finished.wait(limit):
            raise RuntimeError(f"Operation timed out: it was not done within {limit} s")
        if self._problem is not None:
            raise self._problem
        return True

    def is_completed(self) -> bool:
        """Tell whether it is done."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Tell whether it went well."""
        return self._finished.is_set() and self._problem is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, if anything."""
        return self._problem

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> Any:
        """Return a future that has its tensors, or raises, once it is done."""
        if self.is_success():
            # Who has waited counts on a future that is done (DDP), which the common one may be a moment later.
            return Done(self._tensors).get_future()
        return self._future.then(lambda future: future.value())


class Line:
    """Does operations one after the other in the order in which they came, in a thread of its own.

    An operation that its caller waits for anyway is done by the caller, if nothing is before it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        # Held by whoever does an operation.
        self.turn = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._kept: deque[Queued] = deque(maxlen=_KEPT)

    def do(self, function: Callable[[], None], tensors: list[torch.Tensor], *, later: bool) -> dist.Work:
        """Do ``function`` now, or ``later`` beside the caller."""
        if not later and self._waiting == 0:
            with self.turn:
                function()
            return Done(tensors)
        work = Queued(function, tensors)
        if threading.current_thread() is self._thread:
            # Asked for by what follows on an operation of this line (a callback of its future), which may wait for it
            # here. That it comes before all that is in line is the same on every rank.
            work.run()
            return work
        # DDP's C++ code holds on to one between passes (how many ranks have not joined yet), but that does not keep
        # its Python half alive, which is the one that can do something.
        if sum(tensor.nbytes for tensor in tensors) <= _FEW_BYTES:
            self._kept.append(work)
        with self._counting:
            self._waiting += 1
        self._queue.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if not later:
            work.wait()
        return work

    @property
    def idle(self) -> bool:
        """Whether nothing is in line: an operation that is done now comes after all that were asked for before."""
        return self._waiting == 0

    def close(self, within_s: float) -> None:
        """Let the thread end after what is in line, and wait for that at most ``within_s``."""
        if self._thread is not None and not self._closed:
            self._closed = True
            self._kept.clear()
            self._queue.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(within_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            with self.turn:
                work.run()
            with self._counting:
                self._waiting -= 1
