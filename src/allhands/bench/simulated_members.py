"""A crowd of simulated members in one process: each with a socket, a handshake and a claim of its own.

What they say are the real messages; only their number is make-believe. Started by `rollcall` as a process of
its own, so that its work is not counted as the coordinator's. It reads one `Simulation` from standard input and
writes one JSON object a line: what it is at, then what it measured.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import psutil

from .. import _core
from .._version import __version__
from ..control import handshake
from ..control.messages import (
    GREETING,
    Challenge,
    Claim,
    Complete,
    Ended,
    FromMember,
    Leave,
    LeaveGranted,
    Ping,
    Pong,
    Proof,
    Refused,
    Splitter,
    Status,
    StatusQuery,
    StoreReply,
    StoreRequest,
    decode_challenge,
    decode_from_coordinator,
    encode,
    pack,
)
from ..control.process_identity import Identity

__all__ = ["SPARE_DESCRIPTORS", "Simulation", "main"]

# What the process needs besides one socket for each member.
SPARE_DESCRIPTORS = 64

# Connections under way at a time: well below the kernel's usual queue (4,096), whose overflow would cost a
# second in which nothing is measured but a retransmission.
_CONNECTING = 256

# As many ranks as a node usually has; only the claims say so.
_NODE = 8


class Simulation(msgspec.Struct, frozen=True):
    """What the crowd is to do. ``host`` "" means the Unix socket ``unix``; ``end`` is how the job ends."""

    members: int
    coordinator: int
    unix: str
    host: str
    port: int
    token: bytes
    end: Literal["death", "leave"]
    timeout_s: float


class _Member(asyncio.Protocol):
    """One simulated member."""

    def __init__(self, crowd: _Crowd, rank: int) -> None:
        self.crowd = crowd
        self.rank = rank
        self.transport: asyncio.Transport | None = None
        self._splitter = Splitter()
        self._opening = handshake.hello(
            job="bench", attempt=0, rank=rank, world_size=crowd.plan.members, token=crowd.plan.token
        )
        self._proven = False
        self._leaves = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # asyncio hands a Transport to stream protocols
        self._write(GREETING + pack(encode(self._opening)))

    def data_received(self, data: bytes) -> None:
        for frame in self._splitter.feed(data):
            if self._proven:
                self._heard(frame)
            else:
                self._challenged(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._leaves:
            self.crowd.lost(self.rank, str(exc or "closed"))

    def say(self, message: FromMember) -> None:
        """Send one message."""
        self._write(pack(encode(message)))

    def end(self) -> None:
        """Close the connection without a word."""
        self._leaves = True
        if self.transport is not None:
            self.transport.abort()

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def _challenged(self, frame: bytes) -> None:
        token, answer = self.crowd.plan.token, decode_challenge(frame)
        if not isinstance(answer, Challenge) or not handshake.verify_coordinator(self._opening, answer, token):
            self.crowd.lost(self.rank, f"not let in: {answer}")
            return
        self._proven = True
        self._write(pack(encode(Proof(handshake.member_proof(self._opening, answer, token)))))
        self.say(self.crowd.claim(self.rank))

    def _heard(self, frame: bytes) -> None:
        message = decode_from_coordinator(frame)
        match message:
            case Complete() | StoreReply(problem="") | Ended() | LeaveGranted():
                self.crowd.answered(type(message))
            case Ping():
                self.say(Pong())
            case StatusQuery():
                self.say(Status(self.rank, "busy", "in the bench"))
            case Refused(diagnosis):
                self.crowd.lost(self.rank, diagnosis.what)
            case StoreReply(problem=problem):
                self.crowd.lost(self.rank, f"the store says {problem}")
            case _:
                pass


class _Crowd:
    """All members together, and what they wait for."""

    def __init__(self, plan: Simulation) -> None:
        self.plan = plan
        self.members = [_Member(self, rank) for rank in range(plan.members)]
        self.measured: dict[str, float] = {}
        self._process = psutil.Process(plan.coordinator)
        self._awaited: type | None = None
        self._missing = 0
        self._event = asyncio.Event()
        self._trouble = ""

    def claim(self, rank: int) -> Claim:
        """Return what ``rank`` answers to the roll call."""
        node = rank // _NODE
        return Claim(
            identity=Identity(f"node-{node}", f"bench:{node}", 1000 + rank, time.time(), f"bench:{node}:1"),
            backend="gloo",
            device="",
            gpu="",
            torch="2.11.0",
            allhands=__version__,
            launcher="bench",
            timeout_s=self.plan.timeout_s,
            node_rank=node,
            local_world_size=_NODE,
        )

    def answered(self, kind: type) -> None:
        """Count one member's answer."""
        if kind is self._awaited:
            self._missing -= 1
            if self._missing == 0:
                self._event.set()

    def lost(self, rank: int, how: str) -> None:
        """Take note of a member that fell out; only the first is told."""
        self._trouble = self._trouble or f"rank {rank}: {how}"
        self._event.set()

    @asynccontextmanager
    async def measure(self, name: str, kind: type, number: int) -> AsyncIterator[None]:
        """Time the block until ``number`` answers of ``kind`` have come, and the coordinator's CPU for it."""
        _tell(at=name)
        self._awaited, self._missing = kind, number
        self._event.clear()
        cpu, started = self.cpu(), time.perf_counter()
        yield
        try:
            await asyncio.wait_for(self._event.wait(), self.plan.timeout_s)
        except TimeoutError:
            self._trouble = self._trouble or f"{self._missing} of {number} answers did not come"
        if self._trouble:
            raise ConnectionError(f"{name} of {self.plan.members} members failed: {self._trouble}")
        self.measured[f"{name}_s"] = time.perf_counter() - started
        self.measured[f"{name}_cpu_s"] = self.cpu() - cpu

    def cpu(self) -> float:
        """Return the processor time that the coordinator has used."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def connect(self) -> None:
        """Let everyone connect, in the order of ranks, _CONNECTING at a time."""
        loop, gate, plan = asyncio.get_running_loop(), asyncio.Semaphore(_CONNECTING), self.plan

        async def one(member: _Member) -> None:
            def made() -> _Member:
                return member

            async with gate:
                if plan.host:
                    await loop.create_connection(made, plan.host, plan.port)
                else:
                    await loop.create_unix_connection(made, "\0" + plan.unix)

        await asyncio.gather(*(one(member) for member in self.members))

    def everyone(self, message: Callable[[int], FromMember]) -> None:
        """Let everyone say what ``message`` gives for its rank."""
        for member in self.members:
            member.say(message(member.rank))

    async def play(self) -> None:
        """Form the job, use the store, end the job."""
        size, wait_s = self.plan.members, self.plan.timeout_s
        self.measured["rss_before"] = float(self._process.memory_info().rss)
        async with self.measure("rollcall", Complete, size):
            await self.connect()
        self.measured["rss_after"] = float(self._process.memory_info().rss)
        async with self.measure("store", StoreReply, 2 * size):
            self.everyone(lambda rank: StoreRequest(1, "set", [f"bench/{rank}"], [b"x" * 64]))
            self.everyone(lambda rank: StoreRequest(2, "get", [f"bench/{(rank + size // 2) % size}"], wait_s=wait_s))
        if self.plan.end == "leave":
            async with self.measure("leave", LeaveGranted, size):
                self.everyone(lambda _: Leave(3, "destroy", wait_s))
        else:
            async with self.measure("death", Ended, size - 1):
                self.members[-1].end()
        for member in self.members:
            member.end()
        # The transports close in the next pass of the loop.
        await asyncio.sleep(0)


def _tell(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Play the crowd of the plan on standard input."""
    # Whoever measures may be interrupted; nobody else would end this process.
    _core.set_parent_death_signal(signal.SIGKILL)
    plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Simulation)
    need = plan.members + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))

    async def play() -> dict[str, float]:
        crowd = _Crowd(plan)
        await crowd.play()
        return crowd.measured

    try:
        _tell(measured=asyncio.run(play()))
    except (OSError, psutil.Error) as problem:
        _tell(trouble=f"{type(problem).__name__}: {problem}")
        return 1
    return 0
