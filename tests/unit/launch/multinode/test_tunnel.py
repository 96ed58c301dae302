"""The leader's end of the tunnel, with a real coordinator and without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from allhands.control import handshake
from allhands.control.coordinator import Coordinator
from allhands.control.messages import (
    GREETING,
    MOST_BYTES,
    Challenge,
    Claim,
    Closing,
    Complete,
    Ended,
    Proof,
    Splitter,
    StoreReply,
    StoreRequest,
    decode_challenge,
    decode_from_coordinator,
    encode,
    pack,
)
from allhands.control.process_identity import Identity
from allhands.launch.multinode.agent_messages import ChannelClosed, ChannelData, ChannelOpened
from allhands.launch.multinode.tunnel import CoordinatorTunnel

IDENTITY = Identity("host-b", "key", 7, 1.0, "shell")


class Worker:
    """A member on node ``node`` whose bytes go through ``tunnel``."""

    def __init__(
        self,
        tunnel: CoordinatorTunnel,
        sent: list[tuple[int, ChannelData | ChannelClosed]],
        node: int,
        channel: int,
        rank: int,
    ) -> None:
        self.tunnel, self.sent, self.node, self.channel, self.rank = tunnel, sent, node, channel, rank
        self.splitter = Splitter()

    def open(self) -> None:
        """Connect and send the greeting."""
        self.opening = handshake.hello(job="j", attempt=0, rank=self.rank, world_size=2, token=b"t")
        self.tunnel.received(self.node, "10.0.0.2", ChannelOpened(self.channel))
        self.send(GREETING + pack(encode(self.opening)))

    def send(self, body: bytes) -> None:
        """Send ``body``."""
        self.tunnel.received(self.node, "10.0.0.2", ChannelData(self.channel, body))

    def received(self) -> list[bytes]:
        """Return the frames that arrived since the last call."""
        mine = [m for node, m in self.sent if (node, m.channel) == (self.node, self.channel)]
        self.sent[:] = [(n, m) for n, m in self.sent if (n, m.channel) != (self.node, self.channel)]
        return [frame for m in mine if isinstance(m, ChannelData) for frame in self.splitter.feed(m.body)]

    def claim(self) -> None:
        """Send proof and claim."""
        challenge = decode_challenge(self.received()[0])
        assert isinstance(challenge, Challenge)
        self.send(pack(encode(Proof(handshake.member_proof(self.opening, challenge, b"t")))))
        self.send(pack(encode(Claim(IDENTITY, "", "", "", "", "", "", 60.0))))


Scene = Callable[[CoordinatorTunnel, Coordinator, list[tuple[int, ChannelData | ChannelClosed]]], Awaitable[None]]


def play(scene: Scene) -> None:
    """Run ``scene`` in an event loop, with a coordinator that is not attached yet."""

    async def run() -> None:
        sent: list[tuple[int, ChannelData | ChannelClosed]] = []
        tunnel = CoordinatorTunnel(lambda node, message: sent.append((node, message)))
        await scene(tunnel, Coordinator(token=b"t"), sent)

    asyncio.run(run())


def complete_group(
    tunnel: CoordinatorTunnel, sent: list[tuple[int, ChannelData | ChannelClosed]]
) -> tuple[Worker, Worker]:
    """Return two members on two nodes, with the same channel number, whose group is complete."""
    workers = Worker(tunnel, sent, 1, 1, 0), Worker(tunnel, sent, 2, 1, 1)
    for worker in workers:
        worker.open()
        worker.claim()
    for worker in workers:
        assert isinstance(decode_from_coordinator(worker.received()[-1]), Complete)
    return workers


def test_early_bytes_are_kept() -> None:
    """Bytes of a worker that arrive before there is a coordinator are kept for it."""

    async def scene(
        tunnel: CoordinatorTunnel, coordinator: Coordinator, sent: list[tuple[int, ChannelData | ChannelClosed]]
    ) -> None:
        worker = Worker(tunnel, sent, 1, 1, 0)
        worker.open()
        assert sent == []
        tunnel.coordinator = lambda: coordinator
        tunnel.attach()
        worker.claim()
        assert coordinator.roll.present[0].came_from == "10.0.0.2"

    play(scene)


def test_large_messages_are_split() -> None:
    """The largest message of the coordinator is sent in several messages of the agents."""

    async def scene(
        tunnel: CoordinatorTunnel, coordinator: Coordinator, sent: list[tuple[int, ChannelData | ChannelClosed]]
    ) -> None:
        tunnel.coordinator = lambda: coordinator
        first, second = complete_group(tunnel, sent)
        body = b"x" * (MOST_BYTES - 1000)
        first.send(pack(encode(StoreRequest(1, "set", ["k"], [body]))))
        second.send(pack(encode(StoreRequest(1, "get", ["k"]))))
        assert max(len(msgspec.msgpack.encode(message)) for _, message in sent) < MOST_BYTES / 8
        reply = decode_from_coordinator(second.received()[0])
        assert isinstance(reply, StoreReply)
        assert reply.values == [body]

    play(scene)


def test_lost_node() -> None:
    """Members on other nodes receive the reason that a node was lost; later messages from it are ignored."""

    async def scene(
        tunnel: CoordinatorTunnel, coordinator: Coordinator, sent: list[tuple[int, ChannelData | ChannelClosed]]
    ) -> None:
        tunnel.coordinator = lambda: coordinator
        first, second = complete_group(tunnel, sent)
        tunnel.node_lost(2, "the agent of its node was lost: gone")
        ended = decode_from_coordinator(first.received()[0])
        assert isinstance(ended, Ended)
        assert ended.diagnosis.ranks == (1,)
        assert "the agent of its node was lost: gone" in ended.diagnosis.why
        second.send(b"late")
        assert second.received() == []

    play(scene)


def test_closed_connections() -> None:
    """A member whose connection closed is lost; the connection of another program is closed."""

    async def scene(
        tunnel: CoordinatorTunnel, coordinator: Coordinator, sent: list[tuple[int, ChannelData | ChannelClosed]]
    ) -> None:
        tunnel.coordinator = lambda: coordinator
        first, _ = complete_group(tunnel, sent)
        tunnel.received(2, "10.0.0.3", ChannelOpened(9))
        tunnel.received(2, "10.0.0.3", ChannelData(9, b"GET / HTTP/1.1\r\n\r\n"))
        assert sent == [(2, ChannelClosed(9))]
        tunnel.received(2, "10.0.0.2", ChannelClosed(1, "its process ended"))
        ended = decode_from_coordinator(first.received()[0])
        assert isinstance(ended, Ended)
        assert "its process ended" in ended.diagnosis.why

    play(scene)


def test_no_data_after_half_close() -> None:
    """A rank of the next group that connects to a closing coordinator receives Closing, and nothing after it.

    Data after the end of a stream would break the connection, and on node 0 that of a whole node.
    """

    async def scene(
        tunnel: CoordinatorTunnel, coordinator: Coordinator, sent: list[tuple[int, ChannelData | ChannelClosed]]
    ) -> None:
        tunnel.coordinator = lambda: coordinator
        worker = Worker(tunnel, sent, 1, 1, 0)
        tunnel.received(1, "10.0.0.2", ChannelOpened(1))
        closing = asyncio.create_task(coordinator.close())
        await asyncio.sleep(0)
        assert isinstance(sent[-1][1], ChannelClosed)
        words = [decode_from_coordinator(frame) for frame in worker.received()]
        worker.send(GREETING + pack(encode(handshake.hello(job="j", attempt=0, rank=0, world_size=2, token=b"t"))))
        assert (words, sent) == ([Closing()], [])
        tunnel.received(1, "10.0.0.2", ChannelClosed(1))
        await closing

    play(scene)
