"""Calls on a stream of the GPU: how they are issued, their Work, and the thread that checks them.

No thread waits for them on the host, so none would notice a missing rank. A thread checks the calls under way: it
compares what the ranks called, enforces each deadline, and releases the stream when the group is over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _torch
from ..engines.base import CallMismatch, EngineFailure, EngineTimeout
from ..engines.cuda.stream import StreamEngine
from ..errors import AllhandsError, error, fail
from . import failure
from .staging import shapes
from .work import Operation

if TYPE_CHECKING:
    from .process_group import Group

__all__ = ["CudaCalls", "StreamWork"]

# How often to check the calls under way: a difference must be reported within a second, and checking costs time.
_POLL_S = 0.05

# How often to release a stream that was aborted: its next call waits for a number, too.
_RELEASE_S = 0.002

# How long rank 0 waits for the others to unmap its memory: they end their groups at about the same time.
_UNMAP_S = 0.5


@_torch.untraced
class StreamWork(Operation):
    """An operation on a stream. `wait` makes the current stream wait, not the caller, as with NCCL."""

    def __init__(self, calls: CudaCalls, event: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._calls = calls
        self._event = event

    def _finish_by(self, limit_s: float | None, /) -> bool:
        """Make the current stream wait for it. With a limit, the caller waits too, at most as long."""
        self._calls.check()
        torch.cuda.current_stream(self._calls.device).wait_event(self._event)
        if limit_s is None:
            return True
        until = time.monotonic() + limit_s
        while not self._event.query():
            self._calls.check()
            if time.monotonic() > until:
                return False
            time.sleep(_RELEASE_S)
        self._calls.check()
        return True

    @property
    def _problem(self) -> BaseException | None:  # type: ignore[override]
        return self._calls.problem

    def is_completed(self) -> bool:
        """Return whether the GPU has finished it."""
        return bool(self._event.query())

    def get_future(self) -> Any:
        """Return a future that is done once the operation is queued; its value is valid on that stream."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._calls.device])
        stream: Any = torch.cuda.Stream(self._calls.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            future.set_result(self._tensors)
        return future.then(lambda done: done.value())


@dataclass(slots=True)
class _Pending:
    """A call under way: its deadline, and what must stay alive until it is done."""

    name: str
    site: str
    number: int
    event: Any  # torch's annotations of it have no types
    began: float
    until: float
    kept: object


class CudaCalls:
    """The calls of a group on one GPU. They are issued in the same order on every rank."""

    def __init__(self, group: Group, engine: StreamEngine) -> None:
        self.device = engine.device
        self.problem: AllhandsError | None = None
        self._group = group
        self.engine = engine
        engine.check = self.check
        # Held while calls are issued or compared.
        self._call_lock = threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._issued = threading.Condition(threading.Lock())
        self._closed = False
        threading.Thread(target=self._watch, name="allhands-cuda", daemon=True).start()

    def check(self) -> None:
        """Raise what ended the group, if anything."""
        self._group.session.member.check()
        if self.problem is not None:
            raise self.problem

    def issue(  # noqa: PLR0917  # what a call is
        self, name: str, run: Callable[[], None], tensors: list[torch.Tensor], site: str, within_ns: int, number: int
    ) -> dist.Work:
        """Issue ``run`` on the stream, after the caller's stream; ``number`` is that of its recorder entry."""
        self.check()
        if torch.cuda.is_current_stream_capturing():
            raise fail(
                "invalid-argument",
                f"{name}: a collective of ranks that share a GPU cannot be captured in a CUDA graph",
                who="this process",
                why="each call waits for a number of its own, and a graph would wait for the same one again",
                fix="leave collectives out of the capture",
            )
        with self._call_lock, torch.cuda.device(self.device):
            engine, stream = self.engine, self.engine.stream
            engine.site, engine.shape = site, shapes(tensors)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            began, before = time.monotonic(), engine.sequence()
            try:
                with torch.cuda.stream(stream):
                    self._run(name, run, before, within_ns)
            except EngineTimeout:
                raise self._fail(self._late(name, site, began)) from None
            except EngineFailure as problem:
                raise self._fail(failure.of_group(self._group, problem, name, site)) from None
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._group.recorder.run(number, before)
        with self._issued:
            self._pending.append(_Pending(name, site, number, event, began, began + within_ns / 1e9, (run, tensors)))
            self._issued.notify()
        return StreamWork(self, event, tensors)

    def _run(self, name: str, run: Callable[[], None], before: int, within_ns: int) -> None:
        """Run ``run``. Where the call cannot begin here, report that to the other ranks, which would wait otherwise."""
        try:
            run()
        except EngineFailure:
            raise
        except Exception as problem:
            if self.engine.sequence() == before and self.problem is None and self._group.session.member.verdict is None:
                self.engine.refuse(name, failure.reason(problem), within_ns)
            raise

    def _late(self, name: str, site: str, began: float) -> AllhandsError:
        """Return the exception for a call that took too long."""
        before = self._group.session.enter(name, site, began)
        try:
            missing = self.engine.missing()
            return failure.of_group(self._group, EngineTimeout(culprit=missing[0] if missing else 0), name, site)
        finally:
            self._group.session.leave(before)

    def _fail(self, problem: AllhandsError) -> AllhandsError:
        self.problem = self.problem or problem
        return problem

    # Watching ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._issued:
                self._issued.wait_for(lambda: self._pending or self._closed)
            if not self._pending:
                return
            while self._pending and self._pending[0].event.query():
                done = self._pending.popleft()
                self._group.recorder.end(done.number, self.problem is None)
            self._note_verdict()
            if self.problem is not None:
                self.engine.abort(self._group.rank())
                time.sleep(_RELEASE_S)
                continue
            if self._call_lock.acquire(blocking=False):
                try:
                    self._check_calls()
                finally:
                    self._call_lock.release()
            time.sleep(_POLL_S)

    def _note_verdict(self) -> None:
        verdict = self._group.session.member.verdict
        if self.problem is None and verdict is not None:
            self._fail(error(verdict))

    def _check_calls(self) -> None:
        """Compare the calls and enforce the deadline. The next call raises; the stream is released at once."""
        if not self._pending:
            return
        first = self._pending[0]
        try:
            self.engine.compare()
        except CallMismatch as mismatch:
            self._fail(failure.of_group(self._group, mismatch, first.name, first.site))
            return
        if time.monotonic() > first.until:
            self._fail(self._late(first.name, first.site, first.began))

    # The end -----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Release the stream: the group is over. The thread repeats that until the stream is empty."""
        self._note_verdict()
        self.engine.abort(self._group.rank())

    def _drain(self, within_s: float) -> bool:
        """Return whether all calls are done within ``within_s``."""
        until = time.monotonic() + within_s
        while self._pending and time.monotonic() < until:
            time.sleep(_RELEASE_S)
        return not self._pending

    def close(self, within_s: float) -> None:
        """Finish what is under way, and free the GPU's memory once the other ranks have unmapped it."""
        if not self._drain(within_s):
            # A rank is missing. The stream must be empty before the memory is freed.
            self._fail(fail("already-destroyed", "the group was shut down with calls under way"))
            self._drain(within_s)
        with self._issued:
            self._closed = True
            self._issued.notify()
        if self._pending:
            return  # The kernel frees it with the process.
        with torch.cuda.device(self.device):
            self.engine.close(_UNMAP_S)
