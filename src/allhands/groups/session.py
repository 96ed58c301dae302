"""What allhands holds beside torch's process group while it lives: the seat, the store, and what this rank is doing.

torch's global state is the only state of the group itself; a session says how it was formed and how to end it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from .. import _torch
from ..control.join import Membership
from ..control.member import Member
from ..control.messages import Status
from ..diagnosis import Diagnosis, duration, join, ranks
from ..engines.base import EngineFailure, EngineTimeout
from ..engines.cuda import nccl_errors
from ..engines.gloo import gloo_errors
from ..engines.gloo.connections import Connections
from ..errors import AllhandsError, GroupEnded, StoreTimeout, adopt, error
from ..observe import flight_recorder
from .store import MemberStore

__all__ = ["NOT_THE_USERS", "Session", "call_site", "current", "is_transport_error", "set_current"]

adopt(dist.DistError, dist.DistStoreError)

# How long a failed collective waits to hear from the coordinator who it was that failed: first before it asks
# what the others are doing, then, where nobody is found missing, once more.
_VERDICT_S, _VERDICT_AGAIN_S = 0.2, 0.6

# How long an operation may take to notice that its connections were ended.
_DEAF_S = 0.5

# Frames that are not the user's; compared with co_filename, which is a string.
NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    contextlib.__file__,
    threading.__file__,
    # torch wraps the functions that it has newer names for in its `deprecated`.
    typing_extensions.__file__,
)

# A message of Gloo is a page of C++; the exception it becomes keeps its first line.
_MOST_MESSAGE = 300

_current: Session | None = None


def current() -> Session | None:
    """Return the session of this process's default group, None where there is none."""
    return _current


def set_current(session: Session | None) -> None:
    """Put ``session`` in place (or take it away)."""
    global _current  # noqa: PLW0603  # one default group per process, as in torch
    _current = session


def call_site(frame: FrameType | None = None) -> str:
    """Return ``file:line`` of the innermost caller that is neither allhands nor torch."""
    frame = frame if frame is not None else sys._getframe(1)  # noqa: SLF001  # inspect.currentframe, one frame up
    last = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(NOT_THE_USERS):
            # Not pathlib: this stands in every collective, and making a Path takes longer than a small one.
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        last, frame = frame, frame.f_back
    return f"{last.f_code.co_filename.rpartition('/')[2]}:{last.f_lineno}"


def engine_failure(problem: BaseException) -> EngineFailure | None:
    """Return ``problem`` as an engine's failure where it is one, of ours or of torch's; None otherwise."""
    if isinstance(problem, EngineFailure):
        return problem
    if isinstance(problem, StoreTimeout):
        return EngineTimeout(str(problem))
    return gloo_errors.failure_of(problem) or nccl_errors.failure_of(problem)


def is_transport_error(problem: BaseException) -> bool:
    """Return whether ``problem`` reports that a peer is gone or late."""
    return engine_failure(problem) is not None


def abort_nccl() -> None:
    """End what torch's NCCL groups wait for: a kernel that waits for a peer ends no other way."""
    for group in _torch.groups():
        for backend in _torch.backends(group):
            if type(backend).__name__ == "ProcessGroupNCCL":
                backend.abort()


class Session:
    """One default group, from the roll call to its end."""

    def __init__(self, seat: Membership, timeout: timedelta, formed_at: str) -> None:
        self.member: Member = seat.member
        self.beside = seat.coordinator_process
        self.one_host = seat.complete.one_host
        self.own_address = seat.own_address
        self.timeout = timeout
        self.formed_at = formed_at
        self.connections = Connections()
        self.store = MemberStore(seat.member, self.connections)
        self.failed = False
        flight_recorder.set_rank(seat.member.rank, seat.member.world_size)
        self.undo: list[Callable[[], None]] = []
        # By group: compares the calls of torch's own groups (`desync_check.DesyncCheck`).
        self.desync_checks: dict[Any, Any] = {}
        # Where threads wait for an operation in Python; ``abandoned`` once they were told not to.
        self.waiting: set[threading.Event] = set()
        self.abandoned = False
        self._main = threading.main_thread().ident
        # By thread: an operation beside the main thread is not what the main thread is doing.
        self._doing: dict[int, tuple[str, str, float]] = {}
        seat.member.describe = self._describe
        seat.member.on_end(self._cut)

    # What this rank is doing -------------------------------------------------------------------------------

    def enter(self, name: str, site: str, since: float | None = None) -> tuple[str, str, float] | None:
        """Note that this rank is inside the collective ``name``, ``since`` now; return what to give to `leave`."""
        thread = threading.get_ident()
        before = self._doing.get(thread)
        self._doing[thread] = (name, site, since if since is not None else time.monotonic())
        return before

    def leave(self, before: tuple[str, str, float] | None) -> None:
        """Note that it came out again."""
        if before is None:
            self._doing.pop(threading.get_ident(), None)
        else:
            self._doing[threading.get_ident()] = before

    @property
    def busy(self) -> bool:
        """Whether this thread is inside a collective."""
        return threading.get_ident() in self._doing

    def _describe(self) -> tuple[str, float]:
        """Say what the rank is doing: the collective it is in, else the line its main thread is at."""
        others = list(self._doing.values())
        doing = self._doing.get(self._main or 0, others[0] if others else None)
        if doing is not None:
            name, site, since = doing
            return f"in {name} at {site}", time.monotonic() - since
        # The short way writes on the board only.
        running = [note for note in flight_recorder.board().entries if note.state == "running"]
        for note in sorted(running, key=lambda note: not note.main)[:1]:
            return f"in {note.operation} at {note.site}", note.age_s
        # Not by a name: the frame of this very call is among them, and would keep them all, with what their callers
        # hold (a file that is not written out yet), until Python's collector comes by.
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001  # the documented way to see another thread
        if frame is None:
            return "running", 0.0
        return f"at {call_site(frame)} in {frame.f_code.co_name}", 0.0

    # The end of others -------------------------------------------------------------------------------------

    def _cut(self, _: Diagnosis) -> None:
        """The group is over: end what this rank may be waiting in. Runs in the member's thread."""
        self.connections.close_all()
        # NCCL's abort may take seconds, which must not delay the groups in shared memory, whose turn is next.
        threading.Thread(target=abort_nccl, name="allhands-nccl-abort", daemon=True).start()
        if self.waiting:
            # Of those who wait in Gloo, some do not hear that their connection ended.
            late = threading.Timer(_DEAF_S, self.release)
            late.daemon = True
            late.start()

    def wait_for(self, done: threading.Event, work: Any) -> None:
        """Wait until ``done``, which ``work`` sets; raise what ended the group where the engine does not."""
        self.waiting.add(done)
        try:
            # Whoever comes here after the end was not there to be released.
            over = self.member.verdict is not None
            if not done.wait(_DEAF_S if over else None):
                self.abandoned = True
        finally:
            self.waiting.discard(done)
        if self.abandoned and not work.is_completed():
            self.member.check()

    def release(self) -> bool:
        """Let those who wait for an operation in Python wait no longer; return whether there were any."""
        waiting = list(self.waiting)
        self.abandoned = self.abandoned or bool(waiting)
        for done in waiting:
            done.set()
        return bool(waiting)

    def cut(self) -> None:
        """End what this rank may be waiting in, on its own account."""
        self.connections.close_all()

    def explain(
        self,
        problem: BaseException,
        name: str,
        site: str,
        among: Collection[int] | None = None,
        *,
        blamed: bool = False,
        late_rank: int | None = None,
    ) -> AllhandsError | None:
        """Return the exception that says why ``problem`` came about, None where it is the caller's own mistake.

        ``among`` are the ranks that had to come, all of them by default; ``blamed`` whatever they do. ``late_rank`` is
        who an engine waited for in vain, where it knows.
        """
        if self.member.verdict is not None:
            self.member.verdict_raised = True
            return error(self.member.verdict)
        if isinstance(problem, AllhandsError) and not isinstance(problem, StoreTimeout):
            return None
        if words := nccl_errors.duplicate_gpu(problem):
            return error(self.member.end_group(self._shared_gpu(words, name, site)))
        found = engine_failure(problem)
        if found is None:
            return None
        late = isinstance(found, EngineTimeout)
        verdict = self.member.wait_for_verdict(0 if late else _VERDICT_S)
        if verdict is None:
            # All ranks that were in this call come here at about the same time; the first one's finding stands.
            verdict = self.member.end_group(
                self._from_census(found, name, site, among, blamed=blamed, late_rank=late_rank)
            )
        self.member.verdict_raised = True
        return error(verdict)

    def _shared_gpu(self, words: str, name: str, site: str) -> Diagnosis:
        """Say that ranks use one GPU, which NCCL finds out in its first collective only."""
        device, host = f"cuda:{torch.cuda.current_device()}", socket.gethostname()
        return Diagnosis(
            "gpu-shared",
            f"ranks on {host} use the same GPU ({device}), which NCCL refuses",
            who=f"rank {self.member.rank} ({host}, pid {os.getpid()}) in {name} at {site}",
            why=f"NCCL says: {words}; a rank that never calls torch.cuda.set_device is on cuda:0",
            fix="call torch.cuda.set_device(local_rank) before init, pass device_id=, or use backend='allhands', on "
            "which ranks may share a GPU",
            ranks=(self.member.rank,),
            hosts=(host,),
        )

    def _from_census(
        self,
        problem: EngineFailure,
        name: str,
        site: str,
        among: Collection[int] | None,
        *,
        blamed: bool,
        late_rank: int | None,
    ) -> Diagnosis:
        mine_now = self._doing.get(threading.get_ident())
        waited = duration(time.monotonic() - mine_now[2]) if mine_now else "the time it was given"
        census = self.member.statuses()
        everyone = [
            status for status in census if among is None or status.rank in among or status.rank == self.member.rank
        ]
        if self.member.verdict is not None:
            return self.member.verdict
        who = f"rank {self.member.rank} ({socket.gethostname()}, pid {os.getpid()}) in {name} at {site}"
        mine = self.member.rank
        silent = [status for status in everyone if status.state == "silent" and status.rank != mine]
        between = ""
        if blamed and not silent:
            # A message's peer that answers may itself wait for one that does not.
            silent = [status for status in census if status.state == "silent" and status.rank != mine]
            between = (
                f"; {ranks(among or ())} {'answers' if len(among or ()) == 1 else 'answer'}, and may wait for it too"
            )
        left = [status for status in everyone if status.state in {"left", "gone"} and status.rank != mine]
        first = str(problem).splitlines()[0][:_MOST_MESSAGE] if str(problem) else type(problem).__name__
        if not everyone and self.member.over:
            return Diagnosis(
                "peer-lost",
                f"{name} cannot finish: rank 0 left the group",
                who=who,
                why="the coordinator ended in good order (observed), as it does once rank 0 beside it has left",
                fix=f"let rank 0 come to {name} ({site}) too: every rank has to make the same calls before it ends",
                ranks=(0,),
            )
        if silent:
            return Diagnosis(
                "peer-silent",
                f"{name} did not finish within {waited}: {ranks(status.rank for status in silent)} "
                f"{'does' if len(silent) == 1 else 'do'} not answer",
                who=who,
                why=join([_silence(status) for status in silent[:8]])
                + " though connected (observed); probably stopped, swapped out, or in native code with the GIL"
                + between,
                fix=f"on {silent[0].host}: `ps -o stat,wchan,cmd -p {silent[0].pid}`; T is stopped, and `kill -CONT "
                f"{silent[0].pid}` lets it go on; D waits for a disk; else `py-spy dump --pid {silent[0].pid}`"
                + _or_cut_off(silent[0].host),
                ranks=tuple(status.rank for status in silent),
                hosts=tuple(dict.fromkeys(status.host for status in silent)),
                certain=False,
            )
        if left:
            return Diagnosis(
                "peer-lost",
                f"{name} cannot finish: {ranks(status.rank for status in left)} left the group",
                who=who,
                why=join([f"rank {status.rank} {status.doing} {duration(status.since_s)} ago" for status in left[:8]]),
                fix=f"let {ranks(status.rank for status in left)} come to {name} ({site}) too: every rank has to "
                "make the same calls before it ends",
                ranks=tuple(status.rank for status in left),
                hosts=tuple(dict.fromkeys(status.host for status in left)),
            )
        if not isinstance(problem, EngineTimeout):
            verdict = self.member.wait_for_verdict(_VERDICT_AGAIN_S)
            if verdict is not None:
                return verdict
            return Diagnosis(
                "engine-failed",
                f"{name} failed although every rank is there",
                who=who,
                why=first,
                fix="look at the network between the hosts, and at the messages of the other ranks",
                ranks=(mine,),
            )
        # Two that wait for a message from each other are both in the same call, and neither has come to the other.
        elsewhere = [
            status
            for status in everyone
            if (blamed or not status.doing.startswith(f"in {name} ")) and status.rank != mine
        ]
        if not elsewhere:
            # Everyone is in a call of this name; whoever did not come is in it in another group.
            elsewhere = [status for status in everyone if status.rank == late_rank]
        return Diagnosis(
            "collective-timeout",
            f"{name} did not finish within {waited}"
            + (f": {ranks(status.rank for status in elsewhere)} did not come" if elsewhere else ""),
            who=who,
            why="; ".join([f"rank {status.rank} is {_doing(status)}" for status in everyone[:16]]) or first,
            fix=f"see what keeps {ranks(status.rank for status in elsewhere) if elsewhere else 'a rank'} from "
            f"coming to {site} in time, or give the call a longer timeout (timeout= of init_process_group or "
            "new_group)",
            ranks=tuple(status.rank for status in elsewhere),
            hosts=tuple(dict.fromkeys(status.host for status in elsewhere)),
            certain=False,
        )

    # The end of this rank ----------------------------------------------------------------------------------

    def announce(self, problem: BaseException) -> None:
        """Tell the other ranks that this one raised, once. Never raises itself."""
        if self.failed or self.member.over or self.member.forked:
            return
        self.failed = True
        if isinstance(problem, GroupEnded):
            return  # It only passes on what everyone has been told.
        trace = "".join(traceback.format_exception(type(problem), problem, _users_part(problem)))
        message = str(problem).splitlines()[0][:_MOST_MESSAGE] if str(problem) else ""
        self.member.report_failure(type(problem).__name__, message, trace, follows=is_transport_error(problem))


def _users_part(problem: BaseException) -> TracebackType | None:
    """Return the traceback of ``problem`` from the first frame that is the user's."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(NOT_THE_USERS):
        trace = trace.tb_next
    return trace if trace is not None else problem.__traceback__


def _or_cut_off(host: str) -> str:
    """Say what else may be done about a rank elsewhere that does not answer: its machine may be out of reach."""
    if host == socket.gethostname():
        return ""
    return f"; where {host} cannot be reached, see that it is up and its network is (`ip link`), and run the job again"


def _silence(status: Status) -> str:
    return f"rank {status.rank} ({status.host}, pid {status.pid}) has said nothing for {duration(status.since_s)}"


def _doing(status: Status) -> str:
    since = f" for {duration(status.since_s)}" if status.since_s >= 0.1 else ""
    return f"{status.doing}{since}"
