"""Calls that are put into a stream of the GPU: how they are issued, what torch holds of them, and who watches them.

Nobody waits for them on the host, so nobody there would notice that a rank does not come. A thread looks at those under
way: it compares what ranks have called, knows how long each may take, and lets the stream go when the group is over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _torch
from ..engines.base import CallMismatch, EngineFailure, EngineTimeout
from ..engines.cuda.stream import StreamEngine
from ..errors import AllhandsError, error, fail
from . import failure

if TYPE_CHECKING:
    from .hostgroup import HostGroup

__all__ = ["Passing", "Streamed"]

# How often to look at what is under way: a difference is to be told within a second, and looking costs some time.
_LOOK_S = 0.05

# How often to let a stream go on that ended in the middle: it still writes numbers that others may wait behind.
_RELEASE_S = 0.002

# How long rank 0 waits for the others to let go of its memory: they end their groups at about the same time.
_GONE_S = 0.5

# As much of a refusal as the others are told, and more shapes than this tell a reader no more.
_MOST_WORDS, _MOST_SHAPES = 120, 3


@_torch.untraced
class Passing(dist.Work):
    """An operation in a stream. Waiting for it lets the caller's stream wait, not the caller, as with NCCL."""

    def __init__(self, group: Streamed, event: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._group = group
        self._event = event
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for it. With a ``timeout``, the caller waits too, at most as long."""
        self._group.check()
        torch.cuda.current_stream(self._group.device).wait_event(self._event)
        if timeout is not None and timeout > timedelta(0):
            until = time.monotonic() + timeout.total_seconds()
            while not self._event.query():
                self._group.check()
                if time.monotonic() > until:
                    raise RuntimeError(f"Operation timed out: it was not done within {timeout.total_seconds()} s")
                time.sleep(_RELEASE_S)
            self._group.check()
        return True

    def is_completed(self) -> bool:
        """Tell whether the GPU has done it."""
        return bool(self._event.query())

    def is_success(self) -> bool:
        """Tell whether the GPU has done it and the group still stands."""
        return self.is_completed() and self._group.problem is None

    def exception(self) -> BaseException | None:
        """Return why the group is over, if it is."""
        return self._group.problem

    def synchronize(self) -> None:
        """Let the current stream wait for it."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> Any:
        """Return a future that is done once the operation stands in the stream; its value is for who waits there."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._group.device])
        stream: Any = torch.cuda.Stream(self._group.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            future.set_result(self._tensors)
        return future.then(lambda done: done.value())


@dataclass(slots=True)
class _Under:
    """A call under way: until when it may take, and all that must live as long."""

    name: str
    site: str
    number: int
    event: Any  # torch's annotations of it have no types
    began: float
    until: float
    keeps: object


class Streamed:
    """The calls of a group on one GPU. Those who issue them do it in the same order on every rank."""

    def __init__(self, group: HostGroup, engine: StreamEngine) -> None:
        self.device = engine.device
        self.problem: AllhandsError | None = None
        self._group = group
        self.engine = engine
        engine.check = self.check
        # Held by whoever issues or compares.
        self._turn = threading.Lock()
        self._under: deque[_Under] = deque()
        self._came = threading.Condition(threading.Lock())
        self._closed = False
        threading.Thread(target=self._watch, name="allhands-card", daemon=True).start()

    def check(self) -> None:
        """Raise why the group is over, if it is."""
        self._group.session.member.check()
        if self.problem is not None:
            raise self.problem

    def issue(  # noqa: PLR0917  # what a call is
        self, name: str, run: Callable[[], None], tensors: list[torch.Tensor], site: str, within_ns: int, number: int
    ) -> dist.Work:
        """Put ``run`` into the stream, after what the caller's stream has to do; ``number`` is that of its note."""
        self.check()
        if torch.cuda.is_current_stream_capturing():
            raise fail(
                "invalid-argument",
                f"{name}: a collective of ranks that share a GPU cannot be captured in a CUDA graph",
                who="this process",
                why="each call waits for a number of its own, and a graph would wait for the same one again",
                fix="leave collectives out of the capture",
            )
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:_MOST_SHAPES])
        with self._turn, torch.cuda.device(self.device):
            engine, stream = self.engine, self.engine.stream
            engine.site, engine.shape = site, shapes
            stream.wait_stream(torch.cuda.current_stream(self.device))
            began, before = time.monotonic(), engine.sequence()
            try:
                with torch.cuda.stream(stream):
                    self._together(name, run, before, within_ns)
            except EngineTimeout:
                raise self._over(self._late(name, site, began)) from None
            except EngineFailure as problem:
                raise self._over(failure.of_group(self._group, problem, name, site)) from None
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._group.board.run(number, before)
        with self._came:
            self._under.append(_Under(name, site, number, event, began, began + within_ns / 1e9, (run, tensors)))
            self._came.notify()
        return Passing(self, event, tensors)

    def _together(self, name: str, run: Callable[[], None], before: int, within_ns: int) -> None:
        """Do ``run``. Where it cannot even begin here, the others are told, who would wait otherwise."""
        try:
            run()
        except EngineFailure:
            raise
        except Exception as problem:
            if self.engine.sequence() == before and self.problem is None and self._group.session.member.verdict is None:
                words = problem.diagnosis.what if isinstance(problem, AllhandsError) else str(problem)
                first = (words.splitlines() or [type(problem).__name__])[0]
                self.engine.refuse(name, first[:_MOST_WORDS], within_ns)
            raise

    def _late(self, name: str, site: str, began: float) -> AllhandsError:
        """Return the exception for a call that took too long."""
        before = self._group.session.enter(name, site, began)
        try:
            missing = self.engine.missing()
            return failure.of_group(self._group, EngineTimeout(culprit=missing[0] if missing else 0), name, site)
        finally:
            self._group.session.leave(before)

    def _over(self, problem: AllhandsError) -> AllhandsError:
        self.problem = self.problem or problem
        return problem

    # Watching ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while self._wait_for_work():
            self._settle()
            member = self._group.session.member
            if self.problem is None and member.verdict is not None:
                self._over(error(member.verdict))
            if self.problem is not None:
                self.engine.abort(self._group.rank())
                time.sleep(_RELEASE_S)
                continue
            if self._turn.acquire(blocking=False):
                try:
                    self._look()
                finally:
                    self._turn.release()
            time.sleep(_LOOK_S)

    def _wait_for_work(self) -> bool:
        with self._came:
            while not self._under and not self._closed:
                self._came.wait()
            return bool(self._under)

    def _settle(self) -> None:
        """Let go of what is done."""
        while self._under and self._under[0].event.query():
            done = self._under.popleft()
            self._group.board.end(done.number, self.problem is None)

    def _look(self) -> None:
        """Find out what is wrong, if anything is. Whoever calls next is told; the stream is let go at once."""
        if not self._under:
            return
        first = self._under[0]
        try:
            self.engine.compare()
        except CallMismatch as mismatch:
            self._over(failure.of_group(self._group, mismatch, first.name, first.site))
            return
        if time.monotonic() > first.until:
            self._over(self._late(first.name, first.site, first.began))

    # The end -----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let the stream go: the group is over. The thread does it again until the stream is empty."""
        if self.problem is None and self._group.session.member.verdict is not None:
            self._over(error(self._group.session.member.verdict))
        self.engine.abort(self._group.rank())

    def close(self, within_s: float) -> None:
        """End this rank's part after what is under way, and give the GPU's memory back once the others have let go."""
        until = time.monotonic() + within_s
        while self._under and time.monotonic() < until:
            time.sleep(_RELEASE_S)
        if self._under:
            # Somebody never came. What waits in the stream must go before the memory does.
            self._over(self.problem or fail("already-destroyed", "the group was shut down with calls under way"))
            end = time.monotonic() + within_s
            while self._under and time.monotonic() < end:
                time.sleep(_RELEASE_S)
        with self._came:
            self._closed = True
            self._came.notify()
        if self._under:
            return  # The kernel takes it all with the process.
        with torch.cuda.device(self.device):
            self.engine.close(_GONE_S)
