"""Operations under way, as torch knows them: a Work that is done already, and one that another thread does.

torch's C++ code (DDP) only ever asks a Work to `wait` and for its future. The future it gets is one made with
`then`: a failed future handed over as it is ends the process, one made so raises.
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
from typing import Any

import torch
import torch.distributed as dist

from .. import _core, _torch
from ..errors import fail

__all__ = ["Done", "Line", "Queued"]

# Which operations are kept after their caller let go of them, and how many: those of a few numbers, which cost
# nothing to keep, and more of them than a model may have between a forward pass and the end of its backward pass.
_FEW_BYTES = 64
_KEPT = 1024


@_torch.untraced
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


@_torch.untraced
class Queued(dist.Work):
    """An operation that waits in a `Line` or is being done there."""

    def __init__(self, function: Callable[[], None], tensors: list[torch.Tensor], line: Line) -> None:
        super().__init__()
        self._line = line
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

    def tell(self) -> None:
        """Do what was to be done once it is over. That may call into the group again, and wait there."""
        self._settle(self._future)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._problem is not None:
            future.set_exception(self._problem)
        else:
            future.set_result(self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done; raise what went wrong. A ``timeout`` of its own raises without ending it."""
        limit = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        if self._line.is_mine():
            self._line.help(self)
        try:
            finished = self._finished.wait(limit)
        except KeyboardInterrupt:
            # torch's C++ code (DDP) makes a RuntimeError of it. Raised once more, it comes as what it is when the
            # interpreter is back in Python. A caller in Python says "wait" somewhere, and has it already.
            if "wait" not in sys._getframe(1).f_code.co_names:  # noqa: SLF001  # inspect.currentframe, one frame up
                _thread.interrupt_main()
            raise
        if not finished:
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
        future = self._future
        if self._finished.is_set() and not future.done():
            # Whoever has waited for the operation finds its future done, even if those before him are not told yet.
            future = torch.futures.Future()
            self._settle(future)
        return future.then(lambda future: future.value())


class Line:
    """Does operations one after the other in the order in which they came, in a thread of its own.

    An operation that its caller waits for anyway is done by the caller, if nothing is before it. What follows an
    operation (the callbacks of its future) runs in the thread too, before the next one: what a callback asks for is
    done at once, on every rank at the same place in the order.
    """

    def __init__(self, name: str, gate: _core.Segment | _core.Ferry | None = None) -> None:
        """Do operations that hold ``gate`` meanwhile, and tell it how many wait."""
        self._name = name
        self._gate = gate
        self._queue: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        # Held by whoever does an operation.
        self.turn: AbstractContextManager[Any] = gate if gate is not None else threading.Lock()
        self._counting = threading.Lock()
        # What is in line or being done there, callbacks included: whoever comes now comes after it.
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._kept: deque[Queued] = deque(maxlen=_KEPT)

    def do(self, function: Callable[[], None], tensors: list[torch.Tensor], *, later: bool) -> dist.Work:
        """Do ``function`` now, or ``later`` beside the caller."""
        if not later and (self._waiting == 0 or self.is_mine()):
            with self.turn:
                function()
            return Done(tensors)
        if self._closed:
            raise fail("already-destroyed", "an operation was begun on a group that has been shut down")
        work = Queued(function, tensors, self)
        if self.is_mine():
            self._do_one(work)
            return work
        # DDP's C++ code holds on to one between passes (how many ranks have not joined yet), but that does not keep
        # its Python half alive, which is the one that can do something.
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _FEW_BYTES:
            self._kept.append(work)
        self._count(1)
        self._queue.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if not later:
            work.wait()
        return work

    @property
    def busy(self) -> bool:
        """Whether something is in line: whoever comes now comes after it."""
        return self._waiting > 0

    def is_mine(self) -> bool:
        """Tell whether the thread of the line asks."""
        return threading.current_thread() is self._thread

    def help(self, work: Queued) -> None:
        """Do what is in line up to ``work``, for a callback that waits for it: nobody else can."""
        while not work.is_completed() and (following := self._queue.get()) is not None:
            self._do_one(following)
            self._count(-1)

    def close(self, within_s: float) -> None:
        """Let the thread end after what is in line, and wait for that at most ``within_s``."""
        if self._closed:
            return
        self._closed = True
        self._kept.clear()
        if self._thread is not None:
            self._queue.put(None)
            if not self.is_mine():
                self._thread.join(within_s)

    def _do_one(self, work: Queued) -> None:
        with self.turn:
            work.run()
        work.tell()

    def _count(self, more: int) -> None:
        with self._counting:
            self._waiting += more
            if self._gate is not None:
                self._gate.queued = self._waiting

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._do_one(work)
            self._count(-1)
