"""Finding the convenor and answering the agents' roll call there: what the other nodes do before they have orders."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

import msgspec

from ... import settings
from ..._version import __version__
from ...control import connect, handshake
from ...control.messages import Claim, Closing, LogLine, Ping, Pong, Refused, Splitter, Waiting, pack
from ...control.process_identity import this_process
from ...control.waiting_line import WaitingLine
from ...control.wording import NODES
from ...diagnosis import duration
from ...environments.world import Address
from ...errors import AllhandsError, error, fail
from ..job import Job
from .agent_messages import FromConvenor, FromDelegate, Seated, Stop, Stopping, decode_from_convenor

__all__ = ["Joined", "Joining", "Stopped", "claim", "in_thread"]

# How soon a request to stop is looked at while we wait for others.
_LOOK_S = 0.2

# Past the deadline the convenor's own word may still be under way.
_WORD_S = 1.0

# What answers but is no convenor is asked again for this long: the job before this one may be closing there.
_AGAIN_S = 2.0

_Result = TypeVar("_Result")


class Stopped(Exception):  # not an error: someone asked for it
    """The job was stopped before it began; ``by`` is who was asked, ``number`` the signal."""

    def __init__(self, number: int, by: str) -> None:
        super().__init__(number, by)
        self.number, self.by = number, by


class Joined:
    """A seat among the nodes: the connection, what has come on it already, and who is there."""

    def __init__(self, sock: socket.socket, splitter: Splitter, rest: list[bytes], seated: Seated) -> None:
        self.sock, self.splitter, self.rest, self.seated = sock, splitter, rest, seated


def claim(job: Job) -> Claim:
    """Return this agent's answer to the roll call. Its ``local_world_size`` is how many ranks it will start."""
    try:
        # Without importing it: the workers do, and seconds later. Nodes that differ are told now.
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return Claim(
        identity=this_process(),
        backend="",
        device="",
        gpu="",
        torch=torch,
        allhands=__version__,
        launcher="allhands run",
        timeout_s=job.timeout_s,
        local_world_size=job.local_world_size,
        mixed_versions=settings.read().mixed_versions,
    )


class Joining:
    """One agent's way to its seat. `run` blocks, in a thread; `stop` may be called from another."""

    def __init__(self, job: Job, address: Address, token: bytes, deadline: float, progress: WaitingLine) -> None:
        self._job, self._address, self._token = job, address, token
        self._deadline, self._progress = deadline, progress
        self._claim = claim(job)
        self._stop = 0
        number = "this node" if job.node_rank < 0 else f"node {job.node_rank}"
        self._who = f"{number} ({self._claim.identity})"

    def stop(self, number: int) -> None:
        """Give up: someone asked for the end here."""
        self._stop = number

    def run(self) -> Joined:
        """Return the seat, or raise why there is none."""
        again_until = 0.0
        while True:
            sock = connect.connect_tcp(
                self._address,
                self._deadline,
                who=self._who,
                late_names=True,
                several_hosts=True,
                notify=self._progress,
                wording=NODES,
            )
            try:
                joined = self._answer(sock)
            except BaseException as problem:
                sock.close()
                now = time.monotonic()
                if not isinstance(problem, AllhandsError) or problem.slug != "wrong-service":
                    raise
                again_until = again_until or now + _AGAIN_S
                if now >= min(again_until, self._deadline):
                    raise
            else:
                if joined is not None:
                    return joined
                sock.close()
                if time.monotonic() >= self._deadline:
                    raise self._lost("it said goodbye")
            time.sleep(_LOOK_S)

    def _answer(self, sock: socket.socket) -> Joined | None:
        """Greet, claim, wait; None where the one that answered is just ending."""
        opening = handshake.hello(
            job=self._job.name, attempt=0, rank=self._job.node_rank, world_size=self._job.nodes, token=self._token
        )
        place = str(self._address)
        splitter, frames = handshake.authenticate(sock, opening, self._token, place, self._deadline, wording=NODES)
        left = max(0.0, self._deadline - time.monotonic())
        self._say(sock, msgspec.structs.replace(self._claim, timeout_s=left))
        while True:
            for index, frame in enumerate(frames):
                match decode_from_convenor(frame):
                    case Seated() as seated:
                        return Joined(sock, splitter, frames[index + 1 :], seated)
                    case Closing():
                        return None
                    case message:
                        self._heed(sock, message)
            frames = self._next(sock, splitter)

    def _heed(self, sock: socket.socket, message: FromConvenor) -> None:
        match message:
            case Refused(diagnosis):
                raise error(diagnosis)
            case Waiting(line):
                self._progress(line)
            case Ping():
                self._say(sock, Pong())
            case Stop(number, by):
                raise Stopped(number, by)
            case LogLine():
                pass
            case _:
                raise self._lost(f"it sent a {type(message).__name__} during the roll call")

    def _next(self, sock: socket.socket, splitter: Splitter) -> list[bytes]:
        while True:
            if self._stop:
                self._say(sock, Stopping(self._stop, 1))
                raise Stopped(self._stop, "this node")
            try:
                frames = handshake.receive(sock, splitter, min(self._deadline + _WORD_S, time.monotonic() + _LOOK_S))
            except OSError as problem:
                raise self._lost(problem.strerror or str(problem)) from problem
            if frames:
                return frames
            if frames == []:
                raise self._lost("it closed the connection without a word")
            if time.monotonic() >= self._deadline + _WORD_S:
                raise fail(
                    "coordinator-silent",
                    f"node 0's agent at {self._address} gave no word by the deadline",
                    who=self._who,
                    why=f"it took our answer and did not decide within {duration(self._job.timeout_s)} (observed)",
                    fix="look at the agent of node 0: it may be stopped or starved",
                    ranks=(0,),
                    certain=False,
                )

    def _say(self, sock: socket.socket, message: FromDelegate) -> None:
        try:
            handshake.send(sock, pack(msgspec.msgpack.encode(message)), self._deadline + _WORD_S)
        except OSError:
            return  # What it said before it closed is still to be read.

    def _lost(self, how: str) -> AllhandsError:
        return fail(
            "coordinator-lost",
            f"node 0's agent at {self._address} went away during the roll call",
            who=self._who,
            why=f"{how} (observed)",
            fix="look at the screen of node 0; start all nodes again",
            ranks=(0,),
        )


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """Do ``work``, which blocks, in a thread that nobody waits for once this is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def finish(result: _Result | None, problem: BaseException | None) -> None:
        if done.done():
            return
        if problem is not None:
            done.set_exception(problem)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is one where there is no problem

    def run() -> None:
        outcome: tuple[_Result | None, BaseException | None]
        try:
            outcome = (work(), None)
        except BaseException as problem:  # noqa: BLE001  # passed on
            outcome = (None, problem)
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, name="allhands-joining", daemon=True).start()
    return await done
