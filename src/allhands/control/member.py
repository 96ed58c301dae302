"""A rank's connection to the coordinator, from its claim in the roll call to its end.

One thread owns the socket; other threads queue messages and wait for the replies. A call may therefore be made in
any thread, in a signal handler that interrupts another call, or at interpreter exit, without mixing two messages on the
stream. A forked child closes its copy of the connection.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, duration
from ..errors import AllhandsError, error, fail
from . import messages
from .messages import FrameError, Splitter, decode_from_coordinator, encode, pack

__all__ = ["IN_LAUNCHER", "IN_OWN_PROCESS", "Member"]

_log = logging.getLogger("allhands")

# How long a reply may be overdue before the coordinator is reported as silent.
_GRACE_S = 2.0

# A rank that is about to exit waits this long for the coordinator to acknowledge its exception.
_ACKNOWLEDGE_S = 1.0

# The id under which the decision of the roll call is awaited; requests count from 1.
_ROLL_CALL = 0

# How soon a signal is noticed that another thread received.
_SIGNALS_S = 0.1

# Where the coordinator runs, for messages ("it runs ...").
IN_OWN_PROCESS, IN_LAUNCHER = "in a process of rank 0", "in the launcher of node 0 (allhands run)"

_live: weakref.WeakSet[Member] = weakref.WeakSet()


def _next(replies: queue.SimpleQueue[Any], timeout_s: float) -> Any:
    """Return the next reply; raise queue.Empty after ``timeout_s``.

    If another thread receives a signal, Python's handler runs only when the main thread wakes.
    """
    until = time.monotonic() + timeout_s
    while True:
        left_s = until - time.monotonic()
        try:
            return replies.get(timeout=max(0.0, min(left_s, _SIGNALS_S)))
        except queue.Empty:
            if left_s <= _SIGNALS_S:
                raise


class Member:
    """This rank's connection. Made by `join.answer_roll_call`."""

    def __init__(
        self,
        sock: socket.socket,
        splitter: Splitter,
        *,
        rank: int,
        world_size: int,
        place: str,
        runs: str = IN_OWN_PROCESS,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.place = place
        self.runs = runs
        self.verdict: Diagnosis | None = None
        # Whether the connection has ended, for any reason.
        self.over = False
        # Whether the verdict was raised to the caller.
        self.verdict_raised = False
        # Returns what this rank is doing and for how long (seconds).
        self.describe: Callable[[], tuple[str, float]] = lambda: ("in the roll call", 0.0)
        # Shows the line about ranks that are missing.
        self.show_waiting: Callable[[str], None] = lambda _: None
        self._sock = sock
        self._splitter = splitter
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        # The reply to each request; None wakes a request that gets none. SimpleQueue is safe in a signal handler.
        self._replies: dict[int, queue.SimpleQueue[Any]] = {}
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # Closed with this object, not with the connection: a thread about to write to it must never write to another
        # file that was given the same number.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._ended = threading.Event()
        self._callbacks: deque[Callable[[Diagnosis], None]] = deque()
        self._closing = False
        sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="allhands-member", daemon=True)
        _live.add(self)

    def start(self, frames: list[bytes]) -> None:
        """Start the thread. ``frames`` arrived together with the coordinator's proof."""
        for frame in frames:
            self._receive(frame)
        self._thread.start()

    def claim(self, claim: messages.Claim, frames: list[bytes], timeout_s: float) -> messages.Complete | None:
        """Start, send ``claim`` and wait for the end of the roll call; raise the refusal.

        None: the coordinator is that of an earlier group, and is closing.
        """
        decision = self._replies[_ROLL_CALL] = queue.SimpleQueue()
        self._send(pack(encode(claim)))
        self.start(frames)
        try:
            decided: messages.Complete | messages.Refused | None = _next(decision, timeout_s)
        except queue.Empty:
            why = f"it accepted our claim and sent no decision within {duration(claim.timeout_s)} (observed)"
            raise self._silent("did not decide by the deadline", why) from None
        finally:
            del self._replies[_ROLL_CALL]
        if isinstance(decided, messages.Refused):
            raise error(decided.diagnosis)
        if decided is None:
            self.check()
        return decided

    # For any thread ----------------------------------------------------------------------------------------------

    def store_request(
        self,
        op: messages.StoreOp,
        keys: list[str],
        values: list[bytes] | None = None,
        *,
        number: int = 0,
        wait_s: float = 0.0,
    ) -> messages.StoreReply:
        """Execute a store operation. Blocks ``wait_s`` and a grace period at most; raises the verdict, if any."""
        self.check_process()
        self.check()
        if self.over:
            why = "it exited normally (observed), as it does once rank 0 has left"
            raise self._silent("has exited", why, "let rank 0 wait for the others before it destroys the group")
        reply: messages.StoreReply | None = self._request(
            lambda made: messages.StoreRequest(made, op, keys, values or [], number, wait_s), wait_s + _GRACE_S
        )
        self.check()
        if reply is None:
            why = "its connection is open but nothing arrives (observed); probably its process is stopped or starved"
            raise self._silent(f"did not answer the store operation {op}", why)
        return reply

    def statuses(self, wait_s: float = 1.0) -> list[messages.Status]:
        """Return what every rank is doing; [] if the coordinator does not answer."""
        report = self._request(lambda made: messages.StatusRequest(made, wait_s), wait_s + _GRACE_S)
        return [] if report is None else list(report.everyone)

    def report_failure(self, kind: str, message: str, traceback: str, *, follows: bool) -> None:
        """Report an exception of this rank to all ranks. Blocks a second at most; never raises."""
        self._request(lambda made: messages.Failed(made, kind, message, traceback, follows), _ACKNOWLEDGE_S)

    def end_group(self, diagnosis: Diagnosis) -> Diagnosis:
        """End the group because of ``diagnosis``; return the verdict, which may be an earlier diagnosis."""
        self._request(lambda made: messages.EndGroup(made, diagnosis), _ACKNOWLEDGE_S)
        return self.verdict or diagnosis

    def leave(self, how: str, wait_s: float) -> list[messages.Status]:
        """Leave the group, wait at most ``wait_s`` for the others to leave, and return those that have not."""
        self._closing = True
        granted = self._request(
            lambda made: messages.Leave(made, "destroy" if how == "destroy" else "exit", wait_s),
            wait_s + _GRACE_S if wait_s else _ACKNOWLEDGE_S,
        )
        return [] if granted is None else list(granted.still)

    def wait_for_verdict(self, timeout_s: float) -> Diagnosis | None:
        """Wait at most ``timeout_s`` for the end of the group; return its diagnosis, None if it has not ended."""
        self._ended.wait(timeout_s)
        return self.verdict

    def on_end(self, callback: Callable[[Diagnosis], None]) -> None:
        """Call ``callback`` once when the group ends: from the member's thread, or at once if it has ended.

        An exception of a callback is logged.
        """
        self._callbacks.append(callback)
        if self.verdict is not None:
            self._run_callbacks(self.verdict)

    def off_end(self, callback: Callable[[Diagnosis], None]) -> None:
        """Remove a callback that has not been called."""
        with suppress(ValueError):  # It was called, or is being called.
            self._callbacks.remove(callback)

    def check(self) -> None:
        """Raise the verdict if the group has ended."""
        if self.verdict is not None:
            self.verdict_raised = True
            raise error(self.verdict)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the rank."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """End the connection. May be called at any time, repeatedly."""
        if self.forked:
            return
        self._closing = True
        self._wake_thread()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_GRACE_S)

    def check_process(self) -> None:
        """Raise forked-process in a forked child of the rank."""
        if self.forked:
            raise fail(
                "forked-process",
                f"process {os.getpid()} was forked from rank {self.rank} and is no member of its group",
                who=f"pid {os.getpid()}, child of pid {self._pid}",
                why="a group belongs to the process that formed it; a fork shares its sockets but not its threads",
                fix="communicate in the parent, or start the child with spawn and form a group of its own",
                ranks=(self.rank,),
            )

    # Internal ----------------------------------------------------------------------------------------------------

    def _request(self, message: Callable[[int], messages.FromMember], timeout_s: float) -> Any:
        """Send the message made with a new id; return its reply, None if there is none in time or the group ends."""
        self.check_process()
        number = next(self._ids)
        try:
            frame = pack(encode(message(number)))
        except FrameError as problem:
            raise fail(
                "invalid-argument",
                f"the store operation is too large: {problem}",
                who=f"rank {self.rank} (pid {self._pid})",
                why="the keys and values of one store operation are sent in one message",
                fix="pass large data as tensors or files, or split it into several keys",
                ranks=(self.rank,),
            ) from None
        replies = self._replies[number] = queue.SimpleQueue()
        try:
            if self.over:
                return None
            self._send(frame)
            return _next(replies, timeout_s)
        except queue.Empty:
            return None
        finally:
            del self._replies[number]

    def _silent(self, how: str, why: str, fix: str = "") -> AllhandsError:
        return fail(
            "coordinator-silent",
            f"the coordinator at {self.place} {how}",
            who=f"rank {self.rank} (pid {self._pid})",
            why=why,
            fix=fix or f"look at the coordinator's process, {self.runs}: `ps -o stat,cmd -p PID` (T is stopped)",
            ranks=(0,),
            certain=bool(fix),
        )

    def _send(self, frame: bytes) -> None:
        self._outbox.put(frame)
        self._wake_thread()

    def _wake_thread(self) -> None:
        with suppress(BlockingIOError):  # The counter is at its maximum: the thread is awake.
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        unsent = bytearray()
        try:
            while True:
                poller.register(self._sock, select.POLLIN | (select.POLLOUT if unsent else 0))
                # TLS may hold decrypted data that poll does not see.
                pending = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()
                poller.poll(0 if pending else None)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while not self._outbox.empty():
                    unsent += self._outbox.get_nowait()
                self._write(unsent)
                if not self._read():
                    break
                if self._closing and not unsent and not self._replies and self._outbox.empty():
                    break
        except (OSError, FrameError, msgspec.MsgspecError) as problem:
            self._connection_lost(f"{type(problem).__name__}: {problem}")
        finally:
            self._finish()

    def _write(self, unsent: bytearray) -> None:
        while unsent:
            try:
                sent = self._sock.send(unsent)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                # The coordinator has closed. Its last messages may still be unread; without any, a coordinator that
                # closed before it read the claim is that of an earlier group.
                unsent.clear()
                self._closing |= _ROLL_CALL in self._replies
                return
            del unsent[:sent]

    def _read(self) -> bool:
        """Handle everything that has arrived; return False if the coordinator closed."""
        while True:
            try:
                data = self._sock.recv(262_144)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            if not data:
                self._connection_lost("the connection closed")
                return False
            for frame in self._splitter.feed(data):
                self._receive(frame)

    def _receive(self, frame: bytes) -> None:
        message = decode_from_coordinator(frame)
        match message:
            case messages.StoreReply() | messages.Acknowledged() | messages.LeaveGranted() | messages.StatusReport():
                replies = self._replies.get(message.id)
                if replies is not None:
                    replies.put(message)
            case messages.Complete() | messages.Refused() if _ROLL_CALL in self._replies:
                self._replies[_ROLL_CALL].put(message)
            case messages.Waiting(line):
                self.show_waiting(line)
            case messages.Ping():
                self._send(pack(encode(messages.Pong())))
            case messages.StatusQuery():
                self._send(pack(encode(self._status())))
            case messages.Ended(diagnosis):
                self._end(diagnosis)
            case messages.LogLine(text):
                _log.warning("the coordinator reports: %s", text)
            case messages.Closing():
                self._closing = True
            case _:
                raise FrameError(f"a {type(message).__name__} after the roll call")

    def _status(self) -> messages.Status:
        try:
            doing, since_s = self.describe()
        except Exception:  # noqa: BLE001  # the caller's code; this thread must go on
            _log.exception("cannot describe what rank %d is doing", self.rank)
            doing, since_s = "running", 0.0
        return messages.Status(self.rank, "busy", doing, since_s)

    def _connection_lost(self, how: str) -> None:
        if self._closing:
            return
        self._end(
            Diagnosis(
                "coordinator-lost",
                f"the coordinator at {self.place} is gone",
                who=f"rank {self.rank} (pid {self._pid}) noticed",
                why=f"{how} without notice (observed); it runs {self.runs}, so rank 0's host may be gone too",
                fix="look at rank 0's output and host, and run the job again",
                ranks=(0,),
            )
        )

    def _end(self, diagnosis: Diagnosis) -> None:
        if self.verdict is not None:
            return
        self.verdict = diagnosis
        # A store operation may wait for a key that a dead rank would have set.
        self._wake_waiting()
        self._run_callbacks(diagnosis)

    def _wake_waiting(self) -> None:
        self._ended.set()
        for replies in list(self._replies.values()):
            replies.put(None)

    def _run_callbacks(self, diagnosis: Diagnosis) -> None:
        # `on_end` and the member's thread may be here at the same time: popleft gives each callback to one of them.
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(diagnosis)
            except Exception:  # noqa: BLE001  # the caller's code; the other callbacks must run
                _log.exception("a callback for the end of the group failed on rank %d", self.rank)

    def _finish(self) -> None:
        self.over = True
        self._wake_waiting()
        _live.discard(self)
        self._sock.close()

    def _close_in_child(self) -> None:
        """Close a forked child's copies, so that the coordinator sees the parent's death."""
        with suppress(OSError):  # The parent was closing it during the fork.
            os.close(self._sock.detach())


def _after_fork() -> None:
    for member in list(_live):
        member._close_in_child()  # noqa: SLF001  # this module's own class
    _live.clear()


os.register_at_fork(after_in_child=_after_fork)
