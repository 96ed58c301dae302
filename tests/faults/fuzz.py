"""Malformed input for a coordinator: mutations of every message, at every stage of a connection, from a seed.

The attacker is an asyncio client in the test's process; the coordinator and the two members that must not notice
are processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from allhands.control import handshake, messages
from allhands.control.coordinator_process import CoordinatorProcess, Options, start
from allhands.control.messages import GREETING, HEADER, MOST_BEFORE_PROOF, MOST_BYTES, Splitter, pack
from allhands.control.process_identity import this_process
from allhands.control.rendezvous import random_socket_name
from allhands.diagnosis import Diagnosis

__all__ = [
    "STAGES",
    "TOKEN",
    "Attacker",
    "Members",
    "claim",
    "coordinator",
    "descriptors",
    "odd",
    "resident",
    "samples",
]

TOKEN = b"a token that strangers do not have"

# The stage of a connection at which the malformed input is sent.
STAGES = ("greeting", "hello", "proof", "claim", "member")

# A real member: joins by the launcher's local socket, sets and reads back keys until its standard input closes,
# and reports the number of calls, the slowest, and all warnings of coordinator and store.
MEMBER = """
import json, logging, sys, threading, time
from allhands.control.join import answer_roll_call
from allhands.control.messages import Claim
from allhands.control.process_identity import this_process
from allhands.settings import Settings
from allhands.environments.world import World

rank, socket_name, token = int(sys.argv[1]), sys.argv[2], sys.argv[3]
remarks = []
class Collector(logging.Handler):
    def emit(self, record):
        remarks.append(record.getMessage())
logging.getLogger("allhands").addHandler(Collector())
world = World(rank, 2, local_rank=rank, local_world_size=2, node_rank=0, source="launcher", socket=socket_name)
claim = Claim(this_process(), "gloo", "", "", "2.11.0", "0", "launcher", 60.0)
joined = answer_roll_call(world, claim, settings=Settings(token=token), deadline=time.monotonic() + 60)
member = joined.member
print("joined", flush=True)
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
done, slowest = 0, 0.0
while not stop.is_set():
    begun = time.monotonic()
    value = f"{rank}:{done}".encode()
    member.store_request("set", [f"key/{rank}/{done % 10}"], [value])
    got = member.store_request("get", [f"key/{rank}/{done % 10}"], wait_s=5.0).values
    assert got == [value], (got, value)
    member.store_request("add", ["count"], number=1)
    slowest = max(slowest, time.monotonic() - begun)
    done += 1
    time.sleep(0.01)
verdict = member.verdict
member.leave("destroy", 5.0)
member.close()
print(json.dumps({"done": done, "slowest": slowest, "remarks": remarks, "verdict": str(verdict or "")}), flush=True)
"""


@contextlib.contextmanager
def coordinator(world_size: int = 2) -> Iterator[CoordinatorProcess]:
    """Start a real coordinator's process for the length of a block."""
    options = Options(unix=random_socket_name(), host="127.0.0.1", token=TOKEN, world_size=world_size)
    made = start(options, time.monotonic() + 30)
    try:
        yield made
    finally:
        made.kill()


def descriptors(pid: int) -> int:
    """Return how many file descriptors ``pid`` has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> int:
    """Return the resident memory of ``pid`` in bytes."""
    return int(psutil.Process(pid).memory_info().rss)


class Members:
    """The two real members, each in its own process."""

    def __init__(self, beside: CoordinatorProcess) -> None:
        self._beside = beside
        self._processes: list[subprocess.Popen[str]] = []

    def join(self, rank: int) -> None:
        """Start ``rank``."""
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(rank), self._beside.unix, TOKEN.decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def joined(self) -> None:
        """Wait until both are in the complete group."""
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"

    def leave(self) -> list[dict[str, Any]]:
        """Let them leave; return the report of each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        found = []
        for process in self._processes:
            assert process.stdout is not None
            text = process.stdout.read()
            assert process.wait(20) == 0, text
            found.append(json.loads(text))
        return found

    def end(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def claim(**changes: Any) -> messages.Claim:
    """Return a sound claim."""
    made = messages.Claim(this_process(), "gloo", "", "", "2.11.0", "0", "launcher", 60.0)
    return msgspec.structs.replace(made, **changes)


def samples() -> list[bytes]:
    """Return one encoded message of each kind, in both directions."""
    diagnosis = Diagnosis("peer-lost", "what", "who", "why", "fix", (1, 2), ("a", "b"), certain=False, traceback="t")
    status = messages.Status(1, "busy", "in all_reduce", 1.5, "host", 7)
    made: list[msgspec.Struct] = [
        handshake.hello(job="job", attempt=1, rank=1, world_size=2, token=TOKEN),
        messages.Challenge(1, b"n" * 32, b"p" * 32, has_token=True),
        messages.Proof(b"p" * 32),
        claim(trouble=diagnosis),
        messages.StoreRequest(1, "multi_set", ["a", "b"], [b"1", b"2"], 3, 1.0),
        messages.Failed(1, "ValueError", "no", "Traceback", follows=True),
        messages.EndGroup(1, diagnosis),
        messages.Leave(1, "destroy", 1.0),
        messages.StatusRequest(1, 1.0),
        status,
        messages.Pong(),
        messages.Waiting("line"),
        messages.Complete(one_host=True, session="s"),
        messages.Refused(diagnosis),
        messages.Ended(diagnosis),
        messages.StoreReply(1, [b"v"], 2, "timeout"),
        messages.Acknowledged(1),
        messages.LeaveGranted(1, [status]),
        messages.StatusReport(1, [status]),
        messages.StatusQuery(),
        messages.Ping(),
        messages.LogLine("text"),
        messages.Closing(),
    ]
    return [messages.encode(message) for message in made]


def odd(chance: random.Random, number: int) -> messages.FromMember:
    """Return a well-formed message with strange contents, such as a broken but authenticated member would send."""
    keys = [chance.choice(["", "a", "b", "é" * 50, "x" * 2000]) for _ in range(chance.randrange(4))]
    values = [
        chance.choice([b"", b"1", b"-7", b"\xff" * 3, b"9" * 5000, b"z" * 3000]) for _ in range(chance.randrange(4))
    ]
    wait_s = chance.choice([0.0, -1.0, 1e-9, 0.05, 1e300, float("nan"), float("inf")])
    match chance.randrange(6):
        case 0:
            return messages.Status(chance.choice([0, -1, 2**62]), "silent", "x" * 500, wait_s, "h", -5)
        case 1:
            return messages.Pong()
        case 2:
            return messages.StatusRequest(number, chance.choice([0.0, -1.0, 0.01]))
        case _:
            operation = chance.choice(list(messages.StoreOp.__args__))
            amount = chance.choice([0, 1, -1, 2**63 - 1, -(2**63)])
            return messages.StoreRequest(number, operation, keys, values, amount, wait_s)


def mutate(chance: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Return ``body`` with something wrong about it."""
    data = bytearray(body)
    match chance.randrange(10):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            del data[chance.randrange(len(data) or 1) :]
        case 2:
            data += chance.randbytes(chance.randrange(1, 40))
        case 3:
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 4:
            for _ in range(chance.randrange(1, 8)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        case 5:
            # Lengths of msgpack that promise gigabytes.
            at = chance.randrange(len(data))
            data[at : at + 5] = chance.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb"]) + b"\xff\xff\xff\xff"
        case 6:
            other = chance.choice(others)
            data = data[: chance.randrange(len(data))] + other[chance.randrange(len(other)) :]
        case 7:
            # An unknown field, nested as deep as the frame allows.
            tag = b"\xa4type" + body[6 : 6 + 1 + (body[6] & 31)] if body[1:6] == b"\xa4type" else b"\xa4type\xa5Proof"
            deep = chance.choice([b"\x91", b"\x81\xa1k"]) * chance.choice([10, 500, 2000])
            data = bytearray(b"\x82" + tag + b"\xa1?" + deep + b"\xc0")
        case 8:
            at = chance.randrange(len(data))
            data[at:at] = data[chance.randrange(len(data)) :]
        case _:
            data = bytearray(chance.choice(others))
    return bytes(data)


def misframe(chance: random.Random, body: bytes, most: int) -> bytes:
    """Return ``body`` as a frame, or as a malformed one."""
    match chance.randrange(12):
        case 0:
            return HEADER.pack(chance.choice([most + 1, MOST_BYTES + 1, 2**31, 2**32 - 1])) + body
        case 1:
            return HEADER.pack(len(body) + chance.randrange(1, 1000)) + body
        case 2:
            return HEADER.pack(max(0, len(body) - chance.randrange(1, 9))) + body
        case 3:
            return body
        case 4:
            return pack(b"") + pack(body)
        case _:
            return pack(body)


@dataclass
class Attacker:
    """Sends malformed frames to one coordinator and counts them by stage."""

    beside: CoordinatorProcess
    seed: int
    sent: Counter[str] = field(default_factory=Counter)
    closed: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)  # noqa: S311  # a seed, so that a failure can be had again
        self._samples = samples()

    async def attack(self, frames: int, stages: tuple[str, ...] = STAGES, at_once: int = 24) -> None:
        """Send ``frames`` malformed frames, each on a connection of its own, ``at_once`` at a time."""
        left = iter(range(frames))

        async def worker() -> None:
            for _ in left:
                await self._one(self._chance.choice(stages))

        await asyncio.gather(*(worker() for _ in range(at_once)))

    async def linger(self, number: int, seconds: float) -> float:
        """Hold ``number`` connections that speak a byte now and then; return how long the last was tolerated."""
        begun, last = time.monotonic(), 0.0
        streams = [await self._connect(local=index % 2 == 0) for index in range(number)]
        speech = GREETING + pack(messages.encode(handshake.hello(job="", attempt=0, rank=0, world_size=2, token=b"")))
        open_ones = dict(enumerate(streams))
        position = 0
        while open_ones and time.monotonic() - begun < seconds:
            for index, (reader, writer) in list(open_ones.items()):
                if reader.at_eof() or writer.is_closing():
                    del open_ones[index]
                    last = time.monotonic() - begun
                    continue
                # Start times differ; the last byte is never sent.
                if 0 <= (offset := position - index % 8) < len(speech) - 1:
                    writer.write(speech[offset : offset + 1])
            position += 1
            await asyncio.sleep(0.2)
        for _, writer in streams:
            await _close(writer)
        return last if not open_ones else float("inf")

    async def _connect(self, *, local: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if local:
            return await asyncio.open_unix_connection("\0" + self.beside.unix)
        reader, writer = await asyncio.open_connection(self.beside.host, self.beside.port)
        # Close by reset: a hundred thousand connections must not use up the machine's ports.
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return reader, writer

    async def _one(self, stage: str) -> None:
        chance = self._chance
        reader, writer = await self._connect(local=chance.random() < 0.5)
        try:
            data = await self._begin(stage, reader, writer)
            if stage == "greeting":
                data += chance.randbytes(chance.randrange(1, 200))
            else:
                most = MOST_BEFORE_PROOF if stage in {"hello", "proof"} else MOST_BYTES
                body = mutate(chance, chance.choice(self._samples), self._samples)
                data += misframe(chance, body, most)
            if chance.random() < 0.2:
                cut = chance.randrange(len(data))
                writer.write(data[:cut])
                await writer.drain()
                data = data[cut:]
            writer.write(data)
            await writer.drain()
            if chance.random() < 0.3:
                # Most do not wait for the coordinator's reaction; some read it.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(65536), 0.05)
        except (ConnectionError, asyncio.IncompleteReadError):
            # The coordinator was faster than we.
            self.closed += 1
        finally:
            self.sent[stage] += 1
            await _close(writer)

    async def _begin(self, stage: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Bring a connection to ``stage``; return what is sent in front of the malformed frame."""
        if stage == "greeting":
            return self._chance.choice([b"", GREETING[: self._chance.randrange(len(GREETING))], b"GET / HTTP/1.1\r\n"])
        if stage == "hello":
            return GREETING
        size = self._chance.choice([1, 2, 2, 2**40])
        opening = handshake.hello(
            job="", attempt=0, rank=self._chance.choice([0, 1, 5, -3]), world_size=size, token=TOKEN
        )
        head = GREETING + pack(messages.encode(opening))
        if stage == "proof":
            return head
        writer.write(head)
        splitter, frames = Splitter(), list[bytes]()
        while not frames:
            received = await reader.read(65536)
            if not received:
                raise ConnectionResetError
            frames = splitter.feed(received)
        answer = messages.decode_challenge(frames[0])
        assert isinstance(answer, messages.Challenge)
        proof = pack(messages.encode(messages.Proof(handshake.member_proof(opening, answer, TOKEN))))
        return proof if stage == "claim" else proof + pack(messages.encode(claim()))


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
