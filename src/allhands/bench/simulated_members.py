"""Simulated members in one process: each has a socket, a handshake and a claim of its own, and sends real messages.

`rollcall` runs it as a process of its own, so that its work is not counted as the coordinator's.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil

from .._version import __version__
from ..control import handshake, messages
from ..control.process_identity import Identity
from .config import RollCallConfig
from .rank import CommandConnection, serve

__all__ = ["main"]

# The descriptors of the process besides one socket for each member.
_SPARE_DESCRIPTORS = 64

# Concurrent connection attempts: well below the kernel's usual queue (4,096), whose overflow would add the second of a
# retransmission to the measurement.
_CONNECTING = 256

# Ranks of a node, in the claims.
_NODE = 8


class _Member(asyncio.Protocol):
    """One simulated member."""

    transport: asyncio.Transport

    def __init__(self, job: _Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self._splitter = messages.Splitter()
        self._opening = handshake.hello(
            job="bench", attempt=0, rank=rank, world_size=job.plan.members, token=job.plan.token
        )
        self._proven = False
        self._leaves = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # asyncio passes a Transport to stream protocols
        self.transport.write(messages.GREETING + messages.pack(messages.encode(self._opening)))

    def data_received(self, data: bytes) -> None:
        for frame in self._splitter.feed(data):
            if self._proven:
                self._receive(frame)
            else:
                self._prove(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._leaves:
            self.job.lost(self.rank, str(exc or "closed"))

    def send(self, message: messages.FromMember | messages.Proof) -> None:
        """Send one message."""
        self.transport.write(messages.pack(messages.encode(message)))

    def end(self) -> None:
        """Close the connection without a message."""
        self._leaves = True
        self.transport.abort()

    def _prove(self, frame: bytes) -> None:
        token, answer = self.job.plan.token, messages.decode_challenge(frame)
        if not isinstance(answer, messages.Challenge) or not handshake.verify_coordinator(self._opening, answer, token):
            self.job.lost(self.rank, f"not let in: {answer}")
            return
        self._proven = True
        self.send(messages.Proof(handshake.member_proof(self._opening, answer, token)))
        self.send(self.job.claim(self.rank))

    def _receive(self, frame: bytes) -> None:
        message = messages.decode_from_coordinator(frame)
        match message:
            case messages.Ping():
                self.send(messages.Pong())
            case messages.StatusQuery():
                self.send(messages.Status(self.rank, "busy", "in the bench"))
            case messages.Refused(diagnosis):
                self.job.lost(self.rank, diagnosis.what)
            case messages.StoreReply(problem=problem) if problem:
                self.job.lost(self.rank, f"the store says {problem}")
            case _:
                self.job.answered(type(message))


class _Job:
    """All members, and the answers that they wait for."""

    def __init__(self, plan: RollCallConfig, line: CommandConnection) -> None:
        self.plan = plan
        self._line = line
        self.members = [_Member(self, rank) for rank in range(plan.members)]
        self.measured: dict[str, float] = {}
        self._process = psutil.Process(plan.coordinator)
        self._awaited: type | None = None
        self._missing = 0
        self._event = asyncio.Event()
        self._trouble = ""

    def claim(self, rank: int) -> messages.Claim:
        """Return the claim of ``rank``."""
        node = rank // _NODE
        return messages.Claim(
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
        """Note that a member failed; only the first is reported."""
        self._trouble = self._trouble or f"rank {rank}: {how}"
        self._event.set()

    @asynccontextmanager
    async def measure(self, name: str, kind: type, number: int) -> AsyncIterator[None]:
        """Time the block until ``number`` answers of ``kind`` have arrived, and the coordinator's CPU for it."""
        self._line.tell(size=self.plan.members, phase=name, wait=True)
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
        """Return the processor time of the coordinator."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def connect(self) -> None:
        """Connect all members in the order of ranks, _CONNECTING at a time."""
        loop, gate, plan = asyncio.get_running_loop(), asyncio.Semaphore(_CONNECTING), self.plan

        async def one(member: _Member) -> None:
            async with gate:
                if plan.host:
                    await loop.create_connection(lambda: member, plan.host, plan.port)
                else:
                    await loop.create_unix_connection(lambda: member, "\0" + plan.unix)

        await asyncio.gather(*map(one, self.members))

    def send(self, message: Callable[[int], messages.FromMember]) -> None:
        """Send ``message`` of its rank from each member."""
        for member in self.members:
            member.send(message(member.rank))

    async def run(self) -> None:
        """Form the job, use the store, end the job."""
        size, wait_s = self.plan.members, self.plan.timeout_s
        self.measured["rss_before"] = float(self._process.memory_info().rss)
        async with self.measure("rollcall", messages.Complete, size):
            await self.connect()
        self.measured["rss_after"] = float(self._process.memory_info().rss)
        async with self.measure("store", messages.StoreReply, 2 * size):
            self.send(lambda rank: messages.StoreRequest(1, "set", [f"bench/{rank}"], [b"x" * 64]))
            self.send(
                lambda rank: messages.StoreRequest(2, "get", [f"bench/{(rank + size // 2) % size}"], wait_s=wait_s)
            )
        if self.plan.end == "leave":
            async with self.measure("leave", messages.LeaveGranted, size):
                self.send(lambda _: messages.Leave(3, "destroy", wait_s))
        else:
            async with self.measure("death", messages.Ended, size - 1):
                self.members[-1].end()
        for member in self.members:
            member.end()
        # The transports close in the next pass of the loop.
        await asyncio.sleep(0)


def main() -> None:
    """Simulate all members; see `rank.serve`."""
    serve(RollCallConfig, _simulate)


def _simulate(plan: RollCallConfig, _: int, line: CommandConnection) -> None:
    need = plan.members + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))

    async def run() -> None:
        job = _Job(plan, line)
        await job.run()
        line.tell(size=plan.members, measured=job.measured, wait=True)

    asyncio.run(run())
