"""A follower against a leader that the test plays, over a real connection."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from allhands.control.messages import Ping, Pong, Splitter, pack
from allhands.launch.attempt import NodeReport
from allhands.launch.multinode.agent_messages import (
    CollectStacks,
    EndAttempt,
    FromFollower,
    FromLeader,
    JobLayout,
    ReportNode,
    StallChanged,
    StartAttempt,
    Stop,
    WorkerFailed,
    decode_from_follower,
)
from allhands.launch.multinode.follower import Follower, JoinedConnection
from allhands.launch.options import Job
from allhands.launch.verdict import AttemptResult, Outcome

DEADLINE_S = 10.0

LAYOUT = JobLayout(1, [2, 1], ["host-a", "host-b"], "token")


class Leader:
    """The leader's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._splitter = Splitter()
        self._frames: list[bytes] = []

    def send(self, message: FromLeader) -> None:
        """Send ``message``."""
        self.writer.write(pack(msgspec.msgpack.encode(message)))

    async def receive(self) -> FromFollower:
        """Return the next message."""
        while not self._frames:
            data = await asyncio.wait_for(self.reader.read(1 << 16), DEADLINE_S)
            assert data, "the follower closed the connection"
            self._frames = list(self._splitter.feed(data))
        return decode_from_follower(self._frames.pop(0))


class Workers:
    """The attempt of a follower: records the requests to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.changed = asyncio.Event()

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        self.changed.set()

    def end(self, wait_s: float | None = None) -> None:
        """Note the request to end."""
        self._note("end", wait_s)

    def end_stalled(self) -> None:
        """Note the request to collect stacks."""
        self._note("end_stalled")

    def stop(self, number: int) -> None:
        """Note the signal."""
        self._note("stop", number)

    async def wait_for(self, count: int) -> list[tuple[Any, ...]]:
        """Return the requests once there are ``count``."""
        while len(self.calls) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), DEADLINE_S)
        return self.calls


def play(scene: Callable[[Follower, Leader], Awaitable[None]]) -> None:
    """Run ``scene`` with a follower that has joined, and the leader's end of its connection."""

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        mine = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        listener.close()
        leader = Leader(*await asyncio.open_connection(sock=theirs))
        job = Job("train.py", nodes=2, node_rank=-1)
        follower = Follower(job, JoinedConnection(mine, Splitter(), [], LAYOUT), token="")
        await follower.connect()
        try:
            await asyncio.wait_for(scene(follower, leader), 3 * DEADLINE_S)
        finally:
            leader.writer.close()
            await follower.close()

    asyncio.run(run())


def ended(status: int, sent: int = 0) -> NodeReport:
    """Return the report of a node with one worker."""
    return NodeReport([Outcome(2, "host-b", 802, status, sent=sent, node=1)], None, 0, [])


def test_layout() -> None:
    """The layout gives a follower its node rank, its ranks and the token."""

    async def scene(follower: Follower, _: Leader) -> None:
        assert (follower.job.node_rank, follower.job.world_size, follower.job.rank(0)) == (1, 3, 2)
        assert (follower.token, follower.address) == ("token", "127.0.0.1")

    play(scene)


def test_attempt_starts_at_start_attempt() -> None:
    """`begin` returns at StartAttempt, with the leader's MASTER_ADDR and its attempt number."""

    async def scene(follower: Follower, leader: Leader) -> None:
        beginning = asyncio.create_task(follower.begin(0))
        await asyncio.sleep(0)
        assert not beginning.done()
        leader.send(StartAttempt(2, "host-a", 4000))
        assert await beginning is None
        assert (follower.number, follower.master.host, follower.master.port) == (2, "host-a", 4000)

    play(scene)


def test_early_messages_apply_to_the_attempt() -> None:
    """Messages that arrive before the attempt exists are applied once its workers were started."""

    async def scene(follower: Follower, leader: Leader) -> None:
        leader.send(StartAttempt(0, "host-a", 4000))
        leader.send(EndAttempt(0, 1.5))
        leader.send(EndAttempt(7, 1.5))
        await follower.begin(0)
        leader.send(Ping())
        assert isinstance(await leader.receive(), Pong)
        workers = Workers()
        follower.attempt = workers  # type: ignore[assignment]  # has what a follower calls
        await follower.serve("allhands-test-follower")
        assert workers.calls == [("end", 1.5)]
        leader.send(CollectStacks(0))
        assert (await workers.wait_for(2))[1] == ("end_stalled",)

    play(scene)


def test_stop_requests() -> None:
    """A signal is reported to the leader; the same request of another node stops the workers no second time."""

    async def scene(follower: Follower, leader: Leader) -> None:
        workers = Workers()
        follower.attempt = workers  # type: ignore[assignment]  # as above
        assert follower.stop(signal.SIGTERM) == 1
        assert await leader.receive() == Stop(signal.SIGTERM, 1)
        leader.send(Stop(signal.SIGTERM, 1, "node 0 (host-a)"))
        leader.send(Stop(signal.SIGTERM, 2, "node 0 (host-a)"))
        assert await workers.wait_for(1) == [("stop", signal.SIGTERM)]

    play(scene)


def test_reports_to_the_leader() -> None:
    """Failures, stalls and the report of the node are sent with the attempt's number."""

    async def scene(follower: Follower, leader: Leader) -> None:
        leader.send(StartAttempt(3, "host-a", 4000))
        await follower.begin(0)
        follower.worker_failed()
        follower.stall_changed(stalled=True, in_collective=False)
        assert await leader.receive() == WorkerFailed(3)
        assert await leader.receive() == StallChanged(3, stalled=True, in_collective=False)
        settling = asyncio.create_task(follower.settle(ended(4)))
        sent = await leader.receive()
        assert isinstance(sent, ReportNode)
        assert (sent.attempt, sent.report) == (3, ended(4))
        leader.send(AttemptResult(4, "verdict\n", "{}", restart=True))
        result = await settling
        assert (result.exit_code, result.text, result.report, result.restart) == (4, "verdict\n", "{}", True)

    play(scene)


def test_lost_leader() -> None:
    """A follower whose leader is gone ends its workers, and judges by itself that it was cut off."""

    async def scene(follower: Follower, leader: Leader) -> None:
        leader.send(StartAttempt(0, "host-a", 4000))
        await follower.begin(0)
        workers = Workers()
        follower.attempt = workers  # type: ignore[assignment]  # as above
        leader.writer.close()
        assert await workers.wait_for(1) == [("end", None)]
        result = await follower.settle(ended(-signal.SIGTERM, sent=signal.SIGTERM))
        assert result.exit_code == 1
        assert "node 0 (host-a, 127.0.0.1) was lost, and ranks 0 and 1 with it" in result.text
        assert "this node ended its ranks" in result.text
        assert not result.restart

    play(scene)


def test_malformed_message_of_the_leader() -> None:
    """Bytes that are no message end the connection, and count as the loss of the leader."""

    async def scene(follower: Follower, leader: Leader) -> None:
        leader.writer.write(pack(b"\xc1"))
        result = await follower.begin(0)
        assert result is not None
        assert "it sent what is no message" in result.text

    play(scene)
