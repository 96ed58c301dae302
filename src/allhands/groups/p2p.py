"""Point-to-point messages of a group on one host: `send`, `recv` and their Work.

A caller that waits makes progress on its message itself. Messages that nobody waits for are progressed by a thread,
which runs from the first such message to the end of the group and sleeps while there are none.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ..engines.dtypes import dtype_code
from ..errors import fail
from ..observe import flight_recorder
from . import failure
from . import session as _session
from .staging import Staged
from .work import Operation

if TYPE_CHECKING:
    from .. import _core
    from .._core import Request
    from .process_group import Group

__all__ = ["Message", "Messages"]

# How often the end of a group checks whether the last sends have been delivered.
_POLL_S = 0.002

# torch's own functions that wait at once for what `isend` and `irecv` begin.
_WAITING = frozenset(inspect.unwrap(function).__code__ for function in (dist.send, dist.recv))

# Frames between torch's `send` and here, and some more: other libraries wrap it.
_FRAMES = 5

# The core's outcome of a message that is not complete.
_UNDER_WAY = -1


class Message(Operation):
    """One call of `send` or `recv`. A thread that waits for it makes progress on it.

    Its entry in the flight recorder is open until it is complete.
    """

    def __init__(self, messages: Messages, name: str, tensors: list[torch.Tensor], peer: int | None, tag: int) -> None:
        super().__init__(tensors)
        self.name = name
        self.site = _session.call_site()
        self.peer = peer
        # Once it is posted: its number, and what the core knows it by.
        self.key = -1
        self.request: Request | None = None
        self._messages = messages
        self._staged = Staged(tensors[0], back=name == "recv")
        number = -1 if peer is None else peer
        # Address, bytes, type, peer and tag, as the core takes them.
        self.arguments = (*self._staged.place, dtype_code(tensors[0].dtype), number, tag)
        self._lock = threading.Lock()
        self._done = False
        self._source = -1
        self._future: torch.futures.Future[Any] | None = None
        self._entry = _session.begin_entry(name, messages.group.getGroupName(), tensors, self.site, root=number)
        flight_recorder.own().run(self._entry, 0)

    def _finish_by(self, limit_s: float | None, /) -> bool:
        if not self._done:
            self.finish(self._messages.wait(self, -1 if limit_s is None else int(limit_s * 1e9)))
        return self._done

    def finish(self, outcome: int) -> None:
        """Complete it with the core's outcome, unless it is under way or was completed before."""
        if outcome == _UNDER_WAY:
            return
        with self._lock:
            if self._done:
                return
            try:
                self._source = self._messages.source(self, outcome)
                self._staged.copy_back()
            except BaseException as problem:  # noqa: BLE001  # raised by `wait`
                self._problem = problem
            self.close_entry(well=self._problem is None)
            self._done = True
            future = self._future
        self._messages.pending.pop(self.key, None)
        if future is not None:
            self._settle(future)

    def close_entry(self, *, well: bool) -> None:
        """Close its entry in the flight recorder."""
        flight_recorder.own().end(self._entry, well)

    def is_completed(self) -> bool:
        """Make progress, and return whether it is complete."""
        if not self._done and self.request is not None:
            self.finish(self._messages.test(self.request))
        return self._done

    def source_rank(self) -> int:
        """Return the group rank that sent it, -1 before it is complete."""
        return self._source

    # torch's `recv` from any source calls it so.
    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of its tensors, which raises where the message failed."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            over = self._done
            if not over:
                if self._future is None:
                    self._future = future
                future = self._future
        if over:
            self._settle(future)
        elif self.request is not None:
            self._messages.core.start_timeout(self.request)
        # A failed future passed on as it is ends the process in torch's C++ code; one made with `then` raises.
        return future.then(lambda done: done.value())


class Messages:
    """One rank's messages in a group. The methods may be called from any thread."""

    def __init__(self, group: Group) -> None:
        self.core = cast("_core.P2P", group.engine.p2p)
        self.group = group
        self._keys = itertools.count()
        # Kept until they are complete: callers may drop both the Work and the tensor.
        self.pending: dict[int, Message | None] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, name: str, tensors: list[torch.Tensor], rank: int | None, tag: int, limit_ns: int) -> dist.Work:
        """Send one tensor to a rank of the group, or receive one; None receives from any. Small ones are buffered."""
        group, core, sends = self.group, self.core, name == "send"
        # A forked child maps the segment too, and would act as its parent.
        group.session.member.check_process()
        wrong = ""
        if len(tensors) != 1:
            wrong = f"a message is one tensor, not {len(tensors)}"
        elif rank is not None and not 0 <= rank < len(group.ranks):
            wrong = f"there is no rank {rank} in a group of {len(group.ranks)}"
        elif not 0 <= tag < 1 << 64:
            wrong = f"a tag is a number from 0 on, not {tag}"
        if wrong:
            who = f"rank {group.session.member.rank}"
            raise fail("invalid-argument", f"{name}: {wrong}", who=who, fix="see the call")
        message = Message(self, name, tensors, rank, tag)
        if _is_blocking():
            before = group.session.enter(name, message.site)
            try:
                message.finish((core.send if sends else core.recv)(*message.arguments, limit_ns))
            except BaseException:
                message.close_entry(well=False)  # A signal handler raised.
                raise
            finally:
                group.session.leave(before)
            return message
        message.key = next(self._keys)
        # The progress thread may complete it before it is stored.
        self.pending[message.key] = None
        posted = (core.post_send if sends else core.post_recv)(*message.arguments, limit_ns, message.key)
        if isinstance(posted, int):
            message.finish(posted)
            return message
        message.request = posted
        self.pending[message.key] = message
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="allhands-p2p", daemon=True)
                self._thread.start()
        return message

    def close(self, within_s: float) -> None:
        """Wait for sends that nobody waited for, then end what is left, all within about ``within_s``."""
        member = self.group.session.member
        if self._closed or member.forked:
            return
        self._closed = True
        deadline = time.monotonic() + within_s
        while self.core.pending_sends() and member.verdict is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.core.stop()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(within_s)
        for message in list(self.pending.values()):
            if message is not None:
                message.is_completed()

    # For Message -------------------------------------------------------------------------------------------

    def wait(self, message: Message, limit_ns: int) -> int:
        """Wait for a posted message, and record that this rank does."""
        session = self.group.session
        session.member.check_process()
        before = session.enter(message.name, message.site)
        try:
            return self.core.wait(cast("Request", message.request), limit_ns)
        finally:
            session.leave(before)

    def test(self, request: Any) -> int:
        """Make progress and return the outcome of a posted message."""
        self.group.session.member.check_process()
        return self.core.test(request)

    def source(self, message: Message, outcome: int) -> int:
        """Return the peer of a message that is complete; raise its failure."""
        peer, code = divmod(outcome, 256)
        if not code:
            return peer
        group, mine = self.group, self.group.session.member.rank
        if self._closed and group.session.member.verdict is None:
            raise fail(
                "already-destroyed",
                f"{message.name} at {message.site} was under way when its group was destroyed",
                who=f"rank {mine}",
                why="destroy_process_group ran before the message was there",
                fix="wait() for what isend and irecv return before the group is destroyed",
            )
        peers = group.ranks if message.peer is None else [group.ranks[message.peer]]
        others = [rank for rank in peers if rank != mine]
        failed = group.engine.failure(code, peer)
        raise failure.of_group(group, failed, message.name, message.site, others) from None

    # Inside ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while keys := self.core.progress():
            for key in keys:
                message = self.pending.get(key)
                while message is None and key in self.pending:
                    time.sleep(0)  # The thread that posted it is about to store it.
                    message = self.pending.get(key)
                if message is not None:
                    message.is_completed()


def _is_blocking() -> bool:
    """Return whether the caller is torch's blocking `send` or `recv`, which waits at once."""
    frame = sys._getframe(2)  # noqa: SLF001  # inspect.currentframe, two frames up
    for _ in range(_FRAMES):
        if frame.f_code in _WAITING:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
