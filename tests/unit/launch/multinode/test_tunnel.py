"""Workers' connections inside their agent's, at node 0's end, with a real coordinator and no sockets."""

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
from allhands.launch.multinode.agent_messages import Data, Opened, Shut
from allhands.launch.multinode.tunnel import Far

IDENTITY = Identity("host-b", "key", 7, 1.0, "shell")


class Worker:
    """A member on node ``node`` whose bytes go through ``far``."""

    def __init__(self, far: Far, said: list[tuple[int, Data | Shut]], node: int, channel: int, rank: int) -> None:
        self.far, self.said, self.node, self.channel, self.rank = far, said, node, channel, rank
        self.splitter = Splitter()

    def open(self) -> None:
        """Connect and greet."""
        self.opening = handshake.hello(job="j", attempt=0, rank=self.rank, world_size=2, token=b"t")
        self.far.heard(self.node, "10.0.0.2", Opened(self.channel))
        self.send(GREETING + pack(encode(self.opening)))

    def send(self, body: bytes) -> None:
        """Say ``body``."""
        self.far.heard(self.node, "10.0.0.2", Data(self.channel, body))

    def heard(self) -> list[bytes]:
        """Return the frames that came since the last time."""
        mine = [m for node, m in self.said if (node, m.channel) == (self.node, self.channel)]
        self.said[:] = [(n, m) for n, m in self.said if (n, m.channel) != (self.node, self.channel)]
        return [frame for m in mine if isinstance(m, Data) for frame in self.splitter.feed(m.body)]

    def claim(self) -> None:
        """Prove and claim."""
        challenge = decode_challenge(self.heard()[0])
        assert isinstance(challenge, Challenge)
        self.send(pack(encode(Proof(handshake.member_proof(self.opening, challenge, b"t")))))
        self.send(pack(encode(Claim(IDENTITY, "", "", "", "", "", "", 60.0))))


Scene = Callable[[Far, Coordinator, list[tuple[int, Data | Shut]]], Awaitable[None]]


def play(scene: Scene) -> None:
    """Run ``scene`` in an event loop, with a coordinator that is not attached yet."""

    async def run() -> None:
        said: list[tuple[int, Data | Shut]] = []
        far = Far(lambda node, message: said.append((node, message)))
        await scene(far, Coordinator(token=b"t"), said)

    asyncio.run(run())


def seated(far: Far, said: list[tuple[int, Data | Shut]]) -> tuple[Worker, Worker]:
    """Return two members of two nodes, under the same channel, whose group is complete."""
    workers = Worker(far, said, 1, 1, 0), Worker(far, said, 2, 1, 1)
    for worker in workers:
        worker.open()
        worker.claim()
    for worker in workers:
        assert isinstance(decode_from_coordinator(worker.heard()[-1]), Complete)
    return workers


def test_who_comes_early_is_heard_later() -> None:
    """What a worker says before there is a coordinator is kept for it."""

    async def scene(far: Far, coordinator: Coordinator, said: list[tuple[int, Data | Shut]]) -> None:
        worker = Worker(far, said, 1, 1, 0)
        worker.open()
        assert said == []
        far.coordinator = lambda: coordinator
        far.attach()
        worker.claim()
        assert coordinator.roll.present[0].came_from == "10.0.0.2"

    play(scene)


def test_a_large_answer_comes_in_pieces() -> None:
    """The largest message of the coordinator fits into messages of the agents."""

    async def scene(far: Far, coordinator: Coordinator, said: list[tuple[int, Data | Shut]]) -> None:
        far.coordinator = lambda: coordinator
        first, second = seated(far, said)
        body = b"x" * (MOST_BYTES - 1000)
        first.send(pack(encode(StoreRequest(1, "set", ["k"], [body]))))
        second.send(pack(encode(StoreRequest(1, "get", ["k"]))))
        assert max(len(msgspec.msgpack.encode(message)) for _, message in said) < MOST_BYTES / 8
        reply = decode_from_coordinator(second.heard()[0])
        assert isinstance(reply, StoreReply)
        assert reply.values == [body]

    play(scene)


def test_a_node_that_is_lost_takes_its_members_along() -> None:
    """Members of other nodes are told that the agent is gone; what still comes from there is nobody's."""

    async def scene(far: Far, coordinator: Coordinator, said: list[tuple[int, Data | Shut]]) -> None:
        far.coordinator = lambda: coordinator
        first, second = seated(far, said)
        far.lose(2, "the agent of its node was lost: gone")
        ended = decode_from_coordinator(first.heard()[0])
        assert isinstance(ended, Ended)
        assert ended.diagnosis.ranks == (1,)
        assert "the agent of its node was lost: gone" in ended.diagnosis.why
        second.send(b"late")
        assert second.heard() == []

    play(scene)


def test_a_connection_that_ends() -> None:
    """A worker whose connection its agent saw closing is lost; a stranger's is only closed, and its agent told."""

    async def scene(far: Far, coordinator: Coordinator, said: list[tuple[int, Data | Shut]]) -> None:
        far.coordinator = lambda: coordinator
        first, _ = seated(far, said)
        far.heard(2, "10.0.0.3", Opened(9))
        far.heard(2, "10.0.0.3", Data(9, b"GET / HTTP/1.1\r\n\r\n"))
        assert said == [(2, Shut(9))]
        far.heard(2, "10.0.0.2", Shut(1, "its process ended"))
        ended = decode_from_coordinator(first.heard()[0])
        assert isinstance(ended, Ended)
        assert "its process ended" in ended.diagnosis.why

    play(scene)


def test_nothing_is_said_after_the_last_word() -> None:
    """A rank of the next group that speaks to a coordinator which is closing hears the goodbye, and no more.

    What is written after the end of a stream would break the connection, and on node 0 that of a whole node.
    """

    async def scene(far: Far, coordinator: Coordinator, said: list[tuple[int, Data | Shut]]) -> None:
        far.coordinator = lambda: coordinator
        worker = Worker(far, said, 1, 1, 0)
        far.heard(1, "10.0.0.2", Opened(1))
        closing = asyncio.create_task(coordinator.close())
        await asyncio.sleep(0)
        assert isinstance(said[-1][1], Shut)
        words = [decode_from_coordinator(frame) for frame in worker.heard()]
        worker.send(GREETING + pack(encode(handshake.hello(job="j", attempt=0, rank=0, world_size=2, token=b"t"))))
        assert (words, said) == ([Closing()], [])
        far.heard(1, "10.0.0.2", Shut(1))
        await closing

    play(scene)
