"""The messages between members and the coordinator (msgspec structs, never pickled) and their framing on the wire.

A connection starts with the line `GREETING`; after it each frame is a 4-byte big-endian length and a msgpack body.
The length is checked before the body is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from ..diagnosis import Diagnosis
from .process_identity import Identity

__all__ = [
    "GREETING",
    "HEADER",
    "MOST_BEFORE_PROOF",
    "MOST_BYTES",
    "Acknowledged",
    "Challenge",
    "Claim",
    "Closing",
    "Complete",
    "EndGroup",
    "Ended",
    "Failed",
    "FrameError",
    "FromCoordinator",
    "FromMember",
    "Hello",
    "Leave",
    "LeaveGranted",
    "LogLine",
    "Ping",
    "Pong",
    "Proof",
    "Refused",
    "Reply",
    "Splitter",
    "State",
    "Status",
    "StatusQuery",
    "StatusReport",
    "StatusRequest",
    "StoreOp",
    "StoreReply",
    "StoreRequest",
    "Waiting",
    "checked",
    "decode_challenge",
    "decode_from_coordinator",
    "decode_from_member",
    "decode_hello",
    "decode_proof",
    "encode",
    "pack",
]

# A line of text and a blank line: services with text protocols (HTTP, Redis, SSH) answer at once and are recognised.
GREETING = b"ALLHANDS/1\r\n\r\n"

HEADER = struct.Struct(">I")

# The limit before authentication: enough for the handshake, too small for an attack on memory.
MOST_BEFORE_PROOF = 8 * 1024

# Store values are addresses and pickled plans; checkpoint plans of large models reach tens of MiB.
MOST_BYTES = 64 * 1024 * 1024


class FrameError(Exception):
    """The bytes received are not a frame of this protocol. Never leaves the control plane."""


def pack(body: bytes) -> bytes:
    """Return ``body`` as one frame."""
    if len(body) > MOST_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {MOST_BYTES}")
    return HEADER.pack(len(body)) + body


class Splitter:
    """Splits a byte stream into frames. Buffers at most one frame of ``most`` bytes."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Append ``data`` and return the frames that are complete. Raises FrameError on a length over the limit."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            if size > self.most:
                raise FrameError(f"a frame of {size} bytes is over the limit of {self.most}")
            end = start + HEADER.size + size
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + HEADER.size : end]))
            start = end
        del buffer[:start]
        return frames

    @property
    def held(self) -> bytes:
        """The bytes of the incomplete frame: evidence if the other end is another service."""
        return bytes(self._buffer)


# The handshake, in this order: Hello, Challenge, Proof -----------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Member: its identity in the job. The proofs of both sides cover every field."""

    protocol: int
    job: str
    attempt: int
    rank: int
    world_size: int
    nonce: bytes
    has_token: bool


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: its proof, and the nonce that the member's proof must cover."""

    protocol: int
    nonce: bytes
    proof: bytes
    has_token: bool


class Proof(msgspec.Struct, tag=True, frozen=True):
    """Member: its proof."""

    proof: bytes


# From a member ---------------------------------------------------------------------------------------------------


class Claim(msgspec.Struct, tag=True, frozen=True):
    """Answer the roll call. ``trouble`` is an error that this rank found before it connected."""

    identity: Identity
    backend: str
    device: str
    gpu: str
    torch: str
    allhands: str
    launcher: str
    timeout_s: float
    node_rank: int = -1
    local_world_size: int = -1
    mixed_versions: bool = False
    trouble: Diagnosis | None = None
    # How many groups this process joined before: distinguishes a retry from a late answer to the failed roll call.
    generation: int = 0


_Read = Literal["get", "multi_get", "wait", "check", "length", "num_keys", "list_keys"]
StoreOp = Literal[_Read, "set", "multi_set", "append", "add", "compare_set", "delete", "push", "pop"]


class StoreRequest(msgspec.Struct, tag=True, frozen=True):
    """One operation on the key-value store; ``wait_s`` limits those that wait for a key."""

    id: int
    op: StoreOp
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0
    wait_s: float = 0.0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """This rank raised. ``follows``: the exception is probably a consequence of another rank's failure."""

    id: int
    kind: str
    message: str
    traceback: str
    follows: bool


class EndGroup(msgspec.Struct, tag=True, frozen=True):
    """A collective of this rank cannot finish: end the group on every rank with this diagnosis."""

    id: int
    diagnosis: Diagnosis


class Leave(msgspec.Struct, tag=True, frozen=True):
    """This rank leaves the group normally and waits at most ``wait_s`` for the others to leave."""

    id: int
    how: Literal["destroy", "exit"]
    wait_s: float


class StatusRequest(msgspec.Struct, tag=True, frozen=True):
    """Request the status of every rank. Ranks that do not answer within ``wait_s`` are reported as silent."""

    id: int
    wait_s: float


State = Literal["busy", "silent", "left", "gone"]


class Status(msgspec.Struct, tag=True, frozen=True):
    """What one rank is doing: the answer to a StatusQuery, and an item of a StatusReport."""

    rank: int
    state: State
    doing: str
    since_s: float = 0.0
    host: str = ""
    pid: int = 0


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to a Ping."""


FromMember = Claim | StoreRequest | Failed | EndGroup | Leave | StatusRequest | Status | Pong


# From the coordinator --------------------------------------------------------------------------------------------


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """Show this line while the roll call is open. Sent to one member only."""

    line: str


class Complete(msgspec.Struct, tag=True, frozen=True):
    """Every rank answered the roll call. ``session`` is unique to this group."""

    one_host: bool
    session: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The group cannot form. Every rank receives the same diagnosis."""

    diagnosis: Diagnosis


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The group has ended because of ``diagnosis``."""

    diagnosis: Diagnosis


class StoreReply(msgspec.Struct, tag=True, frozen=True):
    """The result of a StoreRequest; ``problem`` is "" on success."""

    id: int
    values: list[bytes] = []
    number: int = 0
    problem: Literal["", "timeout", "full", "not-a-number", "empty", "no-such-key", "too-large"] = ""


class Acknowledged(msgspec.Struct, tag=True, frozen=True):
    """The Failed or EndGroup with this id was received and passed to the other ranks."""

    id: int


class LeaveGranted(msgspec.Struct, tag=True, frozen=True):
    """The end of the wait of a Leave; ``still`` are the ranks that have not left."""

    id: int
    still: list[Status]


class StatusReport(msgspec.Struct, tag=True, frozen=True):
    """The answer to a StatusRequest."""

    id: int
    everyone: list[Status]


class StatusQuery(msgspec.Struct, tag=True, frozen=True):
    """Request for the Status of the member."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Request for a Pong."""


class LogLine(msgspec.Struct, tag=True, frozen=True):
    """Write this text to the log. Sent to one member only."""

    text: str


class Closing(msgspec.Struct, tag=True, frozen=True):
    """The coordinator exits normally."""


Reply = StoreReply | Acknowledged | LeaveGranted | StatusReport
FromCoordinator = Waiting | Complete | Refused | Ended | Reply | StatusQuery | Ping | LogLine | Closing

_Message = TypeVar("_Message")


def checked(decode: Callable[[bytes], _Message]) -> Callable[[bytes], _Message]:
    """Raise msgspec.DecodeError also for text that is not UTF-8 and for too deep nesting."""

    def decode_checked(frame: bytes) -> _Message:
        try:
            return decode(frame)
        except (UnicodeDecodeError, RecursionError) as problem:
            raise msgspec.DecodeError(str(problem)) from None

    return decode_checked


encode = msgspec.msgpack.Encoder().encode
decode_hello = checked(msgspec.msgpack.Decoder(Hello).decode)
# A coordinator that cannot continue sends Refused or Closing in place of the Challenge.
decode_challenge = checked(msgspec.msgpack.Decoder(Challenge | Refused | Closing).decode)
decode_proof = checked(msgspec.msgpack.Decoder(Proof).decode)
decode_from_member = checked(msgspec.msgpack.Decoder(FromMember).decode)
decode_from_coordinator = checked(msgspec.msgpack.Decoder(FromCoordinator).decode)
