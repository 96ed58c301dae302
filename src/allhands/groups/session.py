"""The state of a default group beside torch's own: the member, the store, the calls under way, how to end their waits.

torch's global state is the only state of the group itself. A session begins with the roll call and ends with
`lifecycle.end`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from .. import _torch
from ..control.join import Membership
from ..control.member import Member
from ..diagnosis import Diagnosis
from ..engines.gloo.connections import Connections
from ..errors import adopt, fail
from ..observe import flight_recorder
from .store import MemberStore

__all__ = ["NOT_THE_USERS", "Session", "begin_entry", "call_site", "current", "positive_timeout", "set_current"]

adopt(dist.DistError, dist.DistStoreError)

# How long an operation of Gloo may take to notice that its connections were closed.
_NOTICE_S = 0.5

# Frames that are not the user's; compared with co_filename, which is a string.
NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    contextlib.__file__,
    threading.__file__,
    # torch wraps functions that were renamed in its `deprecated`.
    typing_extensions.__file__,
)

_current: Session | None = None


def current() -> Session | None:
    """Return the session of this process's default group, None where there is none."""
    return _current


def set_current(session: Session | None) -> None:
    """Set the session of this process's default group."""
    global _current  # noqa: PLW0603  # one default group per process, as in torch
    _current = session


def call_site(frame: FrameType | None = None) -> str:
    """Return ``file:line`` of the innermost caller that is neither allhands nor torch."""
    frame = frame if frame is not None else sys._getframe(1)  # noqa: SLF001  # inspect.currentframe, one frame up
    last = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(NOT_THE_USERS):
            # Not pathlib: every collective computes this, and making a Path takes longer than a small one.
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        last, frame = frame, frame.f_back
    return f"{last.f_code.co_filename.rpartition('/')[2]}:{last.f_lineno}"


def begin_entry(  # noqa: PLR0917  # what a call is
    name: str, group: str, tensors: Sequence[torch.Tensor], site: str, reduction: str = "", root: int = -1
) -> int:
    """Begin an entry of the flight recorder for a call with ``tensors``; return its number."""
    shape = tuple(tensors[0].shape) if tensors else ()
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    # Not nbytes, which sparse tensors do not have.
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return flight_recorder.own().begin(name, group, dtype, reduction, shape, size, root, site)


def positive_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """Return ``timeout`` as torch takes it, from that or seconds; raise for one that is not positive."""
    if not isinstance(timeout, timedelta | int | float | None):
        raise TypeError(f"timeout must be a datetime.timedelta or a number of seconds, not {type(timeout).__name__}")
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if limit is not None and limit <= timedelta(0):
        raise fail("invalid-argument", f"timeout={timeout} leaves no time", who="this process", fix="pass more than 0")
    return limit


class Session:
    """One default group, from the roll call to its end."""

    def __init__(
        self, membership: Membership, timeout: timedelta, formed_at: str, local_world_size: int | None = None
    ) -> None:
        self.member: Member = membership.member
        self.coordinator_process = membership.coordinator_process
        self.one_host = membership.complete.one_host
        self.own_address = membership.own_address
        self.local_world_size = local_world_size
        self.timeout = timeout
        # Whether the default group is there; the roll call is held before torch forms it.
        self.formed = False
        self.formed_at = formed_at
        self.connections = Connections()
        self.store = MemberStore(membership.member, self.connections)
        # Whether this rank reported an exception of its own, or left without the others.
        self.failed = False
        flight_recorder.own().set_rank(membership.member.rank, membership.member.world_size)
        # Closed at the end.
        self.undo = contextlib.ExitStack()
        # By group: compares the calls of torch's own groups (`desync_check.DesyncCheck`).
        self.desync_checks: dict[Any, Any] = {}
        # Of threads that wait for an operation in Python; ``abandoned`` once their waits were ended.
        self.waiting: set[threading.Event] = set()
        self.abandoned = False
        self._main = threading.main_thread().ident
        # By thread: name, line and begin of the call that it is in.
        self._calls: dict[int, tuple[str, str, float]] = {}
        membership.member.describe = self._describe
        membership.member.on_end(self._end_waits)

    # The calls of this rank --------------------------------------------------------------------------------

    def enter(self, name: str, site: str, since: float | None = None) -> tuple[str, str, float] | None:
        """Record that this thread is in the call ``name``, ``since`` now; return what to pass to `leave`."""
        thread = threading.get_ident()
        before = self._calls.get(thread)
        self._calls[thread] = (name, site, since if since is not None else time.monotonic())
        return before

    def leave(self, before: tuple[str, str, float] | None) -> None:
        """Record that the call has ended."""
        if before is None:
            self._calls.pop(threading.get_ident(), None)
        else:
            self._calls[threading.get_ident()] = before

    @property
    def busy(self) -> bool:
        """Whether this thread is in a call."""
        return threading.get_ident() in self._calls

    def waited_s(self) -> float | None:
        """Return for how long this thread has been in its call, None where it is in none."""
        call = self._calls.get(threading.get_ident())
        return time.monotonic() - call[2] if call is not None else None

    def _describe(self) -> tuple[str, float]:
        """Return the call that the rank is in, else the line of its main thread, and since when in seconds."""
        others = list(self._calls.values())
        call = self._calls.get(self._main or 0, others[0] if others else None)
        if call is not None:
            name, site, since = call
            return f"in {name} at {site}", time.monotonic() - since
        # The fast path writes to the flight recorder only.
        running = [entry for entry in flight_recorder.board().entries if entry.state == "running"]
        for entry in sorted(running, key=lambda entry: not entry.main)[:1]:
            return f"in {entry.operation} at {entry.site}", entry.age_s
        # Not assigned to a name: the frames include this one, a cycle that would keep the callers' objects alive until
        # Python's collector runs.
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001  # the documented way to see another thread
        if frame is None:
            return "running", 0.0
        return f"at {call_site(frame)} in {frame.f_code.co_name}", 0.0

    # Ending the waits of this rank -------------------------------------------------------------------------

    def _end_waits(self, _: Diagnosis) -> None:
        """The group is over: end what this rank waits in. Runs in the member's thread."""
        self.connections.close_all()
        # NCCL's abort may take seconds, and must not delay the groups in shared memory, whose callbacks follow.
        threading.Thread(target=_abort_nccl, name="allhands-nccl-abort", daemon=True).start()
        if self.waiting:
            # Some operations of Gloo do not notice that their connection was closed.
            late = threading.Timer(_NOTICE_S, self._release)
            late.daemon = True
            late.start()

    def wait_for(self, done: threading.Event, work: Any) -> None:
        """Wait until ``done``, which ``work`` sets; raise what ended the group where the engine does not."""
        self.waiting.add(done)
        try:
            # A wait that begins after the group's end is not among those that `_release` ends.
            over = self.member.verdict is not None
            if not done.wait(_NOTICE_S if over else None):
                self.abandoned = True
        finally:
            self.waiting.discard(done)
        if self.abandoned and not work.is_completed():
            self.member.check()

    def _release(self) -> None:
        """End the waits for operations in Python."""
        waiting = list(self.waiting)
        self.abandoned = self.abandoned or bool(waiting)
        for done in waiting:
            done.set()


def _abort_nccl() -> None:
    """End what torch's NCCL groups wait for: a kernel that waits for a peer ends no other way."""
    for group in _torch.groups():
        for backend in _torch.backends(group):
            if type(backend).__name__ == "ProcessGroupNCCL":
                backend.abort()
