"""Members as the tests of the coordinator write them: real connections, driven message by message."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from allhands.control import handshake
from allhands.control.coordinator import Coordinator
from allhands.control.messages import (
    GREETING,
    Challenge,
    Claim,
    Complete,
    Hello,
    Ping,
    Proof,
    Splitter,
    Waiting,
    decode_challenge,
    decode_from_coordinator,
    encode,
    pack,
)
from allhands.control.process_identity import Identity
from allhands.control.rendezvous import random_socket_name

TOKEN = b"open sesame"


def claim(rank: int, **other: Any) -> Claim:
    """Return the claim of ``rank``; ``other`` replaces fields of it or of its identity."""
    identity = Identity("node-a", "kernel:1", os.getpid() * 1000 + rank, 5.0, "shell")
    parts = {name: other.pop(name) for name in ("host", "key", "pid", "started") if name in other}
    usual: dict[str, Any] = {
        "identity": msgspec.structs.replace(identity, **parts),
        "backend": "gloo",
        "device": "",
        "gpu": "",
        "torch": "2.13.0",
        "allhands": "0.1.0",
        "launcher": "torchrun",
        "timeout_s": 60.0,
    }
    return Claim(**(usual | other))


class Peer:
    """One member's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.splitter, self.frames = Splitter(), list[bytes]()

    @classmethod
    async def connect(cls, name: str) -> Peer:
        """Connect to the Unix socket ``name``."""
        return cls(*await asyncio.open_unix_connection("\0" + name))

    def send(self, *messages: Any) -> None:
        """Send messages."""
        self.writer.write(b"".join(pack(encode(message)) for message in messages))

    async def frame(self) -> bytes | None:
        """Return the next frame, None at the end of the connection."""
        while not self.frames:
            data = await asyncio.wait_for(self.reader.read(65536), 10)
            if not data:
                return None
            self.frames += self.splitter.feed(data)
        return self.frames.pop(0)

    async def receive(self, *skip: type) -> Any:
        """Return the next message but Ping, Waiting and ``skip``; None at the end of the connection."""
        while (frame := await self.frame()) is not None:
            message = decode_from_coordinator(frame)
            if not isinstance(message, (Ping, Waiting, *skip)):
                return message
        return None

    async def authenticate(self, rank: int, world_size: int, *, token: bytes = b"", **hello: Any) -> Any:
        """Do the handshake; return the Challenge, or what the coordinator answers in its place."""
        usual = {"job": "night", "attempt": 0} | hello
        opening = handshake.hello(**usual, rank=rank, world_size=world_size, token=token)
        return await self.continue_from(opening, token)

    async def continue_from(self, opening: Hello, token: bytes) -> Any:
        """Do the handshake with a given Hello."""
        self.writer.write(GREETING)
        self.send(opening)
        frame = await self.frame()
        answer = decode_challenge(frame) if frame is not None else None
        if isinstance(answer, Challenge):
            self.send(Proof(handshake.member_proof(opening, answer, token)))
        return answer

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()


class Job:
    """A coordinator that listens, and its members."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.name = random_socket_name()
        self.peers: list[Peer] = []

    async def connect(self) -> Peer:
        """Return a connection that has sent nothing."""
        self.peers.append(await Peer.connect(self.name))
        return self.peers[-1]

    async def join(self, rank: int, world_size: int, *, token: bytes = b"", **claimed: Any) -> Peer:
        """Return a member that has sent its claim."""
        peer = await self.connect()
        await peer.authenticate(rank, world_size, token=token)
        peer.send(claim(rank, **claimed))
        return peer

    async def form(self, world_size: int) -> list[Peer]:
        """Return the members of a complete group."""
        peers = [await self.join(rank, world_size) for rank in range(world_size)]
        for peer in peers:
            assert isinstance(await peer.receive(), Complete)
        return peers


@contextlib.asynccontextmanager
async def job(*, ticking: bool = False, **kw: Any) -> AsyncIterator[Job]:
    """Run a coordinator; without ``ticking`` nothing happens by the clock."""
    made = Job(Coordinator(**kw))
    await made.coordinator.listen_unix(made.name)
    if ticking:
        made.coordinator.start()
    try:
        yield made
    finally:
        for peer in made.peers:
            peer.close()
        await made.coordinator.close()
