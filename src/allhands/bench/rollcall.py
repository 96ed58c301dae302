"""What a roll call costs: a real coordinator's process, and N members over real sockets from another process.

Each simulated member has a socket, a handshake and a claim of its own, and sends real messages. They have a process of
their own, so that their work is not counted as the coordinator's.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import psutil

from .._version import __version__
from ..control import handshake, messages
from ..control.coordinator_process import Options, start
from ..control.process_identity import Identity
from ..control.rendezvous import random_socket_name
from ..control.waiting_line import WaitingLine
from ..errors import fail
from .config import RollCallConfig
from .processes import CommandConnection, RankProcesses, serve

__all__ = ["main", "run"]

# The limit of one phase, which only ends a hang: milliseconds per thousand members are normal.
_PHASE_S = 120.0

_Notify = Callable[[str], None]


def run(
    members: list[int],
    rounds: int,
    *,
    transport: Literal["tcp", "unix"] = "tcp",
    notify: _Notify | None = None,
) -> list[dict[str, Any]]:
    """Measure a roll call for each number of ``members``, ``rounds`` times; return one row of medians for each.

    Each round is two jobs, each with a new coordinator: one ends by the death of a member, the other by the leaving of
    all. ``notify`` gets a line of progress; by default it is printed on standard error. Raises fd-limit where this
    machine does not allow that many sockets, ArgumentError for senseless numbers.
    """
    if min(members) < 2 or rounds < 1:
        raise fail(
            "invalid-argument",
            f"{min(members)} members in {rounds} rounds cannot be measured",
            who="allhands bench rollcall",
            fix="give at least 2 members and 1 round",
        )
    progress = WaitingLine("allhands bench rollcall")
    rows = []
    try:
        for number in members:
            samples: list[dict[str, float]] = []
            for turn in range(rounds):
                place = f"{number} members over {transport}, round {turn + 1} of {rounds}"
                jobs = [_job(number, transport, end, place, notify or progress) for end in ("death", "leave")]
                # Both jobs form: the slower one counts.
                samples.append({name: max(job.get(name, 0.0) for job in jobs) for name in jobs[0] | jobs[1]})
            rows.append(_row(number, rounds, transport, samples))
    finally:
        progress.done()
    return rows


def _job(members: int, transport: str, end: str, place: str, notify: _Notify) -> dict[str, float]:
    """Form and end one job; return what was measured."""
    notify(f"{place}: starting the coordinator")
    token = secrets.token_hex(16).encode()
    options = Options(
        unix=random_socket_name(), host="127.0.0.1" if transport == "tcp" else "", token=token, world_size=members
    )
    coordinator = start(options, time.monotonic() + _PHASE_S)
    try:
        address = (options.unix, coordinator.host, coordinator.port)
        plan = RollCallConfig(members, coordinator.pid, *address, token, end, _PHASE_S)
        measured: dict[str, float] = {}
        with RankProcesses(plan, program="rollcall") as processes:
            for message in processes.messages():
                if "measured" in message:
                    measured = message["measured"]
                else:
                    notify(f"{place}: {message['phase']}")
        return measured
    finally:
        coordinator.end(5.0)


def _row(members: int, rounds: int, transport: str, samples: list[dict[str, float]]) -> dict[str, Any]:
    middle = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    growth = statistics.median(sample["rss_after"] - sample["rss_before"] for sample in samples)
    row = {
        "members": members,
        "rounds": rounds,
        "transport": transport,
        "coordinator_cpu_us_per_member": middle["rollcall_cpu_s"] / members * 1e6,
        "coordinator_rss_before_kib": middle["rss_before"] / 1024,
        "coordinator_rss_after_kib": middle["rss_after"] / 1024,
        "kib_per_member": growth / 1024 / members,
    }
    for phase in ("rollcall", "store", "death", "leave"):
        row[f"{phase}_s"] = middle[f"{phase}_s"]
        row[f"{phase}_us_per_member"] = middle[f"{phase}_s"] / members * 1e6
    return row


# In the process of the simulated members -------------------------------------------------------------------------

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
    """Simulate all members; see `processes.serve`."""
    serve(RollCallConfig, _simulate_members)


def _simulate_members(plan: RollCallConfig, _: int, line: CommandConnection) -> None:
    need = plan.members + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))

    async def run() -> None:
        job = _Job(plan, line)
        await job.run()
        line.tell(size=plan.members, measured=job.measured, wait=True)

    asyncio.run(run())
