"""A rank's one live connection to the coordinator.

One thread owns the socket; everyone else puts messages into a queue and waits for the answer. So a call
may come from any thread, from a signal handler in the middle of another call, or at interpreter exit, and
the stream is never torn. After a fork the child holds nothing of it.
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
from collections.abc import Callable
from typing import Any

import msgspec

from ..diagnosis import Diagnosis
from ..errors import error, fail
from .desync import Teller
from .frames import FrameError, Splitter, pack
from .messages import (
    Ask,
    Census,
    Closing,
    Condemn,
    Dismissed,
    Ended,
    Failed,
    Leaving,
    Noted,
    Ping,
    Pong,
    Query,
    Recall,
    Remark,
    Reply,
    Report,
    Status,
    StoreOp,
    decode_from_coordinator,
    encode,
)

__all__ = ["BESIDE", "LAUNCHER", "Member"]

_log = logging.getLogger("allhands")

# How long a reply may be overdue before the coordinator is called silent.
_GRACE_S = 2.0

# A rank that is about to end waits this long for the coordinator to take note of its exception.
_ANNOUNCE_S = 1.0

# Where the coordinator runs, for the words.
BESIDE, LAUNCHER = "beside rank 0", "in the launcher of node 0 (allhands run)"

_live: weakref.WeakSet[Member] = weakref.WeakSet()


class _Waiter:
    """A place where one answer is laid down."""

    __slots__ = ("answer", "event")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.answer: Any = None


class Member:
    """This rank's connection, after the roll call. Made by `roll.answer`."""

    def __init__(
        self,
        sock: socket.socket,
        splitter: Splitter,
        *,
        rank: int,
        world_size: int,
        place: str,
        keeper: str = BESIDE,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.place = place
        self.keeper = keeper
        self.verdict: Diagnosis | None = None
        # Whether the caller was told of the verdict.
        self.heard = False
        self.describe: Callable[[], tuple[str, float]] = lambda: ("running", 0.0)
        self._sock = sock
        self._splitter = splitter
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # Closed when this object goes, not when the connection does: a thread that is about to poke must
        # never write into whatever was given the same number since.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        # What this rank calls in groups whose engine does not compare it.
        self.teller = Teller(self._poke, world_size)
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Diagnosis], None]] = []
        self._closing = False
        self._over = False
        sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="allhands-member", daemon=True)
        _live.add(self)

    def start(self, frames: list[bytes]) -> None:
        """Begin to read; ``frames`` came with the end of the roll call."""
        for frame in frames:
            self._heard(frame)
        self._thread.start()

    # For every thread --------------------------------------------------------------------------------------

    def ask(
        self, op: StoreOp, keys: list[str], values: list[bytes] | None = None, *, number: int = 0, wait_s: float = 0.0
    ) -> Reply:
        """Carry out a store operation. Blocks at most ``wait_s`` and a moment; raises what ended the group."""
        made = next(self._ids)
        reply = self._request(made, Ask(made, op, keys, values or [], number, wait_s), wait_s + _GRACE_S)
        self.check()
        if reply is None:
            raise self._silent(f"the store's answer to {op}")
        answer: Reply = reply
        return answer

    def census(self, wait_s: float = 1.0) -> list[Status]:
        """Ask what every rank is doing; [] where the coordinator cannot say."""
        made = next(self._ids)
        report = self._request(made, Census(made, wait_s), wait_s + _GRACE_S, even_if_ended=True)
        return list(report.everyone) if isinstance(report, Report) else []

    def announce(self, kind: str, message: str, traceback: str, *, follows: bool) -> None:
        """Tell everyone that this rank raised. Blocks at most a second; never raises."""
        made = next(self._ids)
        self._request(made, Failed(made, kind, message, traceback, follows), _ANNOUNCE_S, even_if_ended=True)

    def condemn(self, diagnosis: Diagnosis) -> Diagnosis:
        """Declare the group over because of ``diagnosis``; return what stands, which may have been said before."""
        made = next(self._ids)
        self._request(made, Condemn(made, diagnosis), _ANNOUNCE_S, even_if_ended=True)
        return self.verdict or diagnosis

    def leave(self, how: str, wait_s: float) -> list[Status]:
        """Say goodbye, wait at most ``wait_s`` for the others to do so too, return who was still there."""
        made = next(self._ids)
        self._closing = True
        goodbye = Leaving(made, "destroy" if how == "destroy" else "exit", wait_s)
        answer = self._request(made, goodbye, wait_s + _GRACE_S if wait_s else _ANNOUNCE_S, even_if_ended=True)
        return list(answer.still) if isinstance(answer, Dismissed) else []

    def wait_for_verdict(self, timeout_s: float) -> Diagnosis | None:
        """Wait until the group is known to be over, and return why; None where it is not over by then."""
        self._ended.wait(timeout_s)
        return self.verdict

    def on_end(self, callback: Callable[[Diagnosis], None]) -> None:
        """Call ``callback`` (from the member's thread) once the group is over."""
        self._callbacks.append(callback)
        if self.verdict is not None:
            callback(self.verdict)

    def check(self) -> None:
        """Raise what ended the group, where it is over."""
        if self.verdict is not None:
            self.heard = True
            raise error(self.verdict)

    def off_end(self, callback: Callable[[Diagnosis], None]) -> None:
        """Take back an `on_end`."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    @property
    def over(self) -> bool:
        """Whether the connection has ended, for whatever reason."""
        return self._over

    @property
    def forked(self) -> bool:
        """Whether this process is a child that was forked from the rank."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """End the connection. Safe at any time, any number of times."""
        if self.forked:
            return
        self._closing = True
        self._poke()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_GRACE_S)

    # Inside ------------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise forked-process in a child that was forked from this rank."""
        if self.forked:
            raise fail(
                "forked-process",
                f"process {os.getpid()} was forked from rank {self.rank} and has no place in its group",
                who=f"pid {os.getpid()}, child of pid {self._pid}",
                why="a group belongs to the process that formed it; a fork shares its sockets but not its threads",
                fix="communicate in the parent, or start the child with spawn and form a group of its own",
                ranks=(self.rank,),
            )

    def _request(self, number: int, message: Any, timeout_s: float, *, even_if_ended: bool = False) -> Any:
        self.check_process()
        if self._over or (self.verdict is not None and not even_if_ended):
            if self.verdict is None and not even_if_ended:
                raise fail(
                    "coordinator-silent",
                    f"the coordinator at {self.place} has ended",
                    who=f"rank {self.rank} (pid {self._pid})",
                    why="it closed in good order (observed), as it does once rank 0 has left",
                    fix="let rank 0 wait for the others before it destroys the group",
                    ranks=(0,),
                )
            return None
        try:
            frame = pack(encode(message))
        except FrameError as problem:
            raise fail(
                "invalid-argument",
                f"the coordinator takes no message that large: {problem}",
                who=f"rank {self.rank} (pid {self._pid})",
                why="keys and values of one store operation travel in one message",
                fix="pass large data as tensors or files, or cut it into several keys",
                ranks=(self.rank,),
            ) from None
        waiter = self._waiters[number] = _Waiter()
        self._outbox.put(frame)
        self._poke()
        try:
            deadline = time.monotonic() + timeout_s
            while not waiter.event.wait(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    break
        finally:
            self._waiters.pop(number, None)
        return waiter.answer

    def _silent(self, missing: str) -> Exception:
        return fail(
            "coordinator-silent",
            f"the coordinator at {self.place} did not give {missing}",
            who=f"rank {self.rank} (pid {self._pid})",
            why="its connection stands but nothing comes (observed); probably its process is stopped or starved",
            fix=f"look at the coordinator's process, {self.keeper}: `ps -o stat,cmd -p PID` (T is stopped)",
            ranks=(0,),
            certain=False,
        )

    def _poke(self) -> None:
        try:
            os.eventfd_write(self._wake, 1)
        except BlockingIOError:
            return  # Awake already.

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        unsent = bytearray()
        try:
            while True:
                poller.register(self._sock, select.POLLIN | (select.POLLOUT if unsent else 0))
                pending = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()
                poller.poll(0 if pending else self._patience_ms(unsent))
                self._drain()
                unsent += self._told(unsent)
                while not self._outbox.empty():
                    unsent += self._outbox.get_nowait()
                self._write(unsent)
                if not self._read():
                    break
                if self._closing and not unsent and not self._waiters and self._outbox.empty():
                    break
        except (OSError, FrameError, msgspec.MsgspecError) as problem:
            self._broke(f"{type(problem).__name__}: {problem}")
        finally:
            self._finish()

    def _patience_ms(self, unsent: bytearray) -> float | None:
        """Return how long to wait before there are calls to tell of; None where there are none."""
        wait_s = None if unsent else self.teller.wait_s(time.monotonic())
        return None if wait_s is None else wait_s * 1000 + 1

    def _told(self, unsent: bytearray) -> bytes:
        """Return what is to be told of calls: now and then, and before anything else that is said.

        A coordinator that does not read is told nothing: the calls are folded together meanwhile.
        """
        if unsent or self.verdict is not None:
            return b""
        told = self.teller.take(time.monotonic(), at_once=not self._outbox.empty())
        return pack(encode(told)) if told is not None else b""

    def _drain(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def _write(self, unsent: bytearray) -> None:
        while unsent:
            try:
                sent = self._sock.send(unsent)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            del unsent[:sent]

    def _read(self) -> bool:
        """Take in what has come; False once the coordinator closed."""
        while True:
            try:
                data = self._sock.recv(262_144)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return True
            if not data:
                self._broke("the connection closed")
                return False
            for frame in self._splitter.feed(data):
                self._heard(frame)

    def _heard(self, frame: bytes) -> None:
        message = decode_from_coordinator(frame)
        match message:
            case Reply() | Noted() | Dismissed() | Report():
                waiter = self._waiters.get(message.id)
                if waiter is not None:
                    waiter.answer = message
                    waiter.event.set()
            case Ping():
                self._outbox.put(pack(encode(Pong())))
                self._poke()
            case Query():
                doing, since_s = self.describe()
                self._outbox.put(pack(encode(Status(self.rank, "busy", doing, since_s))))
                self._poke()
            case Recall():
                self._outbox.put(pack(encode(self.teller.recall(message))))
                self._poke()
            case Ended(diagnosis):
                self._end(diagnosis)
            case Remark(text):
                _log.warning("the coordinator reports: %s", text)
            case Closing():
                self._closing = True
            case _:
                raise FrameError(f"a {type(message).__name__} after the roll call")

    def _broke(self, how: str) -> None:
        if self._closing:
            return
        self._end(
            Diagnosis(
                "coordinator-lost",
                f"the coordinator at {self.place} is gone",
                who=f"rank {self.rank} (pid {self._pid}) noticed",
                why=f"{how} without a goodbye (observed); it runs {self.keeper}, so rank 0's host may be gone too",
                fix="look at rank 0's output and host, and run the job again",
                ranks=(0,),
            )
        )

    def _end(self, diagnosis: Diagnosis) -> None:
        if self.verdict is not None:
            return
        self.verdict = diagnosis
        self._ended.set()
        # Whoever waits for the store waits for someone who may be dead.
        for waiter in list(self._waiters.values()):
            waiter.event.set()
        for callback in list(self._callbacks):
            callback(diagnosis)

    def _finish(self) -> None:
        self._over = True
        self._ended.set()
        for waiter in list(self._waiters.values()):
            waiter.event.set()
        _live.discard(self)
        self._sock.close()

    def _let_go(self) -> None:
        """In a forked child: drop the descriptors, so that the parent's death is seen by the coordinator."""
        try:
            os.close(self._sock.detach())
        except OSError:
            return  # The parent was closing it at the moment of the fork.


def _after_fork() -> None:
    for member in list(_live):
        member._let_go()  # noqa: SLF001  # one module, one secret
    _live.clear()


os.register_at_fork(after_in_child=_after_fork)
