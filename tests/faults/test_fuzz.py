"""Malformed input for a few seconds; `tests/soak/test_fuzz.py` does the same a hundred thousand times."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time

import msgspec
import pytest

from allhands.control import handshake, messages
from allhands.control.coordinator_process import CoordinatorProcess
from allhands.control.messages import GREETING, Splitter, pack
from faults.fuzz import (
    STAGES,
    TOKEN,
    Attacker,
    Members,
    claim,
    coordinator,
    descriptors,
    mutate,
    odd,
    resident,
    samples,
)

# A connection that left only its smallest part behind would cost a hundred bytes, one that stayed whole four
# thousand; a heap that has been used in another order grows by a few hundred KiB at most.
FRAMES = 5_000
MOST_GROWTH = 4 * 2**20


def test_unauthenticated_connections_cannot_harm_a_group() -> None:
    """Malformed frames at every stage: members go on, the coordinator stays the same process and grows by nothing."""
    with coordinator() as beside:
        members, attacker = Members(beside), Attacker(beside, seed=1)
        try:
            members.join(0)
            # While the roll call is open, from clients without the token.
            asyncio.run(attacker.attack(FRAMES // 10, ("greeting", "hello", "proof")))
            members.join(1)
            members.joined()
            asyncio.run(attacker.attack(FRAMES // 10))
            held, memory, begun = descriptors(beside.pid), resident(beside.pid), time.monotonic()
            asyncio.run(attacker.attack(FRAMES - FRAMES // 5))
            seconds = time.monotonic() - begun
            assert settled(beside, held)
            growth = resident(beside.pid) - memory
            told = members.leave()
            beside.end(20.0)
        finally:
            members.end()
        assert beside.process.returncode == 0
    print(f"{FRAMES * 0.8 / seconds:.0f} frames/s; the coordinator grew by {growth / 1024:.0f} KiB")  # noqa: T201
    assert attacker.sent.total() == FRAMES
    assert set(attacker.sent) == set(STAGES)
    assert growth < MOST_GROWTH
    for each in told:
        assert each["done"] > 0
        assert each["verdict"] == ""
        # A remark is a fault of the coordinator that nothing in it was prepared for.
        assert each["remarks"] == []


def settled(beside: CoordinatorProcess, held: int) -> bool:
    """Wait until the coordinator holds no more descriptors than ``held``."""
    deadline = time.monotonic() + 20
    while descriptors(beside.pid) > held and time.monotonic() < deadline:
        time.sleep(0.05)
    return descriptors(beside.pid) <= held


class Raw:
    """A member that sends any given bytes over a plain socket."""

    def __init__(self, beside: CoordinatorProcess, rank: int, world_size: int) -> None:
        self.sock = socket.create_connection((beside.host, beside.port), timeout=10)
        self.splitter = Splitter()
        self.heard: list[bytes] = []
        opening = handshake.hello(job="", attempt=0, rank=rank, world_size=world_size, token=TOKEN)
        self.sock.sendall(GREETING + pack(messages.encode(opening)))
        answer = messages.decode_challenge(self.next())
        assert isinstance(answer, messages.Challenge)
        self.say(messages.Proof(handshake.member_proof(opening, answer, TOKEN)))
        self.say(claim())

    def say(self, message: msgspec.Struct) -> None:
        """Send one message."""
        self.sock.sendall(pack(messages.encode(message)))

    def next(self) -> bytes:
        """Return the next frame."""
        while not self.heard:
            data = self.sock.recv(1 << 20)
            if not data:
                raise ConnectionResetError("closed")
            self.heard += self.splitter.feed(data)
        return self.heard.pop(0)

    def until(self, *kinds: type) -> msgspec.Struct:
        """Return the next message that is one of ``kinds``."""
        while True:
            message = messages.decode_from_coordinator(self.next())
            if isinstance(message, kinds):
                return message

    def close(self) -> None:
        """Go without a word."""
        self.sock.close()


def test_a_strange_member_gets_an_answer() -> None:
    """A member's odd but well-formed requests are answered or wait; they neither end it nor disturb the others."""
    chance = random.Random(2)  # noqa: S311  # a seed, so that a failure can be had again
    with coordinator() as beside:
        strange, other = Raw(beside, 0, 2), Raw(beside, 1, 2)
        try:
            for member in (strange, other):
                member.until(messages.Complete)
            for number in range(1, 3001):
                strange.say(odd(chance, number))
                if number % 100 == 0:
                    # It still gets its answers, and none of them is a fault of the coordinator's own.
                    strange.say(messages.StoreRequest(10**6 + number, "check", ["nothing"]))
                    while True:
                        said = strange.until(messages.StoreReply, messages.LogLine)
                        assert isinstance(said, messages.StoreReply), said
                        if said.id == 10**6 + number:
                            break
            other.say(messages.StoreRequest(1, "set", ["still"], [b"here"]))
            assert other.until(messages.StoreReply, messages.Ended) == messages.StoreReply(1)
        finally:
            strange.close()
            other.close()
        beside.end(20.0)
        assert beside.process.returncode == 0


def babble(member: Raw, chance: random.Random) -> None:
    """Say malformed things until the coordinator hangs up."""
    member.sock.settimeout(0.05)
    while True:
        body = mutate(chance, samples()[4], samples())
        # A mutation may be a sound message of a kind that ends things; those are other tests'.
        if not body.startswith(b"\x87\xa4type\xacStoreRequest"):
            continue
        member.sock.sendall(pack(body))
        with contextlib.suppress(TimeoutError):
            member.next()


@pytest.mark.parametrize("seed", range(4))
def test_a_member_that_talks_nonsense_is_lost(seed: int) -> None:
    """A member that sends malformed bytes is disconnected, and the others get peer-lost."""
    chance = random.Random(seed)  # noqa: S311  # as above
    with coordinator() as beside:
        broken, other = Raw(beside, 0, 2), Raw(beside, 1, 2)
        try:
            for member in (broken, other):
                member.until(messages.Complete)
            with pytest.raises(ConnectionError):
                babble(broken, chance)
            ended = other.until(messages.Ended)
            assert isinstance(ended, messages.Ended)
            assert (ended.diagnosis.slug, ended.diagnosis.ranks) == ("peer-lost", (0,))
        finally:
            broken.close()
            other.close()
        beside.end(20.0)
        assert beside.process.returncode == 0
