"""Everything that is said between a member and the coordinator, as typed messages. Nothing is ever pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from ..diagnosis import Diagnosis
from .identity import Identity

__all__ = [
    "Ask",
    "Census",
    "Challenge",
    "Claim",
    "Closing",
    "Complete",
    "Condemn",
    "Dismissed",
    "Ended",
    "Failed",
    "FromCoordinator",
    "FromMember",
    "Hello",
    "Leaving",
    "Noted",
    "Ping",
    "Pong",
    "Proof",
    "Query",
    "Recall",
    "Recalled",
    "Refused",
    "Remark",
    "Reply",
    "Report",
    "Said",
    "Status",
    "StoreOp",
    "Told",
    "Waiting",
    "decode_challenge",
    "decode_from_coordinator",
    "decode_from_member",
    "decode_hello",
    "decode_proof",
    "encode",
]

StoreOp = Literal[
    "set",
    "get",
    "add",
    "compare_set",
    "wait",
    "check",
    "delete",
    "append",
    "multi_get",
    "multi_set",
    "num_keys",
    "list_keys",
    "push",
    "pop",
    "length",
]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Member: who I say I am. Every field is bound by the proofs that follow."""

    protocol: int
    job: str
    attempt: int
    rank: int
    world_size: int
    nonce: bytes
    has_token: bool


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: prove that you hold the token; here is my own proof."""

    protocol: int
    nonce: bytes
    proof: bytes
    has_token: bool


class Proof(msgspec.Struct, tag=True, frozen=True):
    """Member: my proof."""

    proof: bytes


class Claim(msgspec.Struct, tag=True, frozen=True):
    """Member: my answer to the roll call. ``trouble`` is what I found wrong on my own side, if anything."""

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
    # Which attempt of its process this is: a retry must not be mistaken for a late part of what failed.
    generation: int = 0


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Member: an operation on the store; ``wait_s`` bounds those that wait for a key."""

    id: int
    op: StoreOp
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0
    wait_s: float = 0.0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Member: I raised. ``follows`` marks an exception that only passes on someone else's failure."""

    id: int
    kind: str
    message: str
    traceback: str
    follows: bool


class Condemn(msgspec.Struct, tag=True, frozen=True):
    """Member: my collective cannot finish, and this is why; the group is over for everyone."""

    id: int
    diagnosis: Diagnosis


class Leaving(msgspec.Struct, tag=True, frozen=True):
    """Member: I leave in good order, and wait at most ``wait_s`` for the others to leave too."""

    id: int
    how: Literal["destroy", "exit"]
    wait_s: float


class Census(msgspec.Struct, tag=True, frozen=True):
    """Member: what is everyone doing? Those who have not answered within ``wait_s`` are silent."""

    id: int
    wait_s: float


class Status(msgspec.Struct, tag=True, frozen=True):
    """What one rank is doing: a member's answer to a Query, and a line of a Report."""

    rank: int
    state: Literal["busy", "silent", "left", "gone"]
    doing: str
    since_s: float = 0.0
    host: str = ""
    pid: int = 0


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Member: I am here."""


class Said(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank is in one group of ``size`` ranks, and what its calls came to at some of their numbers.

    ``void`` where a call that was told was not made after all, so that the numbers of later ones are wrong.
    """

    group: str
    size: int
    upto: int
    numbers: list[int]
    digests: list[int]
    void: bool = False


class Told(msgspec.Struct, tag=True, frozen=True):
    """Member: what I have called since I last said so."""

    groups: list[Said]


class Recalled(msgspec.Struct, tag=True, frozen=True):
    """Member: the answer to a Recall ``upto`` a number: the calls from ``first`` on, as many as are remembered.

    ``codes`` has what must be the same on every rank, ``words`` what a reader is told; ``which`` of them for each call.
    ``digest`` is what all calls came to at ``upto``, 0 where that is not known; ``void`` is as in Said.
    """

    group: str
    upto: int
    first: int
    codes: list[int]
    which: list[int]
    words: list[str]
    digest: int = 0
    void: bool = False


FromMember = Claim | Ask | Failed | Condemn | Leaving | Census | Status | Pong | Told | Recalled


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """Coordinator, to one member: show people this line while the roll call goes on."""

    line: str


class Complete(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: every rank answered. ``session`` is unique to this group."""

    one_host: bool
    session: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: the group cannot form, and this is why; the same words go to every rank."""

    diagnosis: Diagnosis


class Ended(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: the group is over, and this is why."""

    diagnosis: Diagnosis


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: the answer to an Ask. ``problem`` is "" where it went well."""

    id: int
    values: list[bytes] = []
    number: int = 0
    problem: Literal["", "timeout", "full", "not-a-number", "empty", "no-such-key", "too-large"] = ""


class Noted(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: I have your Failed and have told the others."""

    id: int


class Dismissed(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: you may go; these were still there."""

    id: int
    still: list[Status]


class Report(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: the answer to a Census."""

    id: int
    everyone: list[Status]


class Query(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: what are you doing?"""


class Recall(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: which were your calls in ``group``, after number ``after`` and up to ``upto``?"""

    group: str
    after: int
    upto: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: are you there?"""


class Remark(msgspec.Struct, tag=True, frozen=True):
    """Coordinator, to one member: log this."""

    text: str


class Closing(msgspec.Struct, tag=True, frozen=True):
    """Coordinator: I end in good order."""


FromCoordinator = (
    Waiting | Complete | Refused | Ended | Reply | Noted | Dismissed | Report | Query | Recall | Ping | Remark | Closing
)

_Message = TypeVar("_Message")


def _checked(decode: Callable[[bytes], _Message]) -> Callable[[bytes], _Message]:
    """Give every malformed frame the same error: text that is not UTF-8 and endless nesting have others."""

    def decode_checked(frame: bytes) -> _Message:
        try:
            return decode(frame)
        except (UnicodeDecodeError, RecursionError) as problem:
            raise msgspec.DecodeError(str(problem)) from None

    return decode_checked


encode = msgspec.msgpack.Encoder().encode
decode_hello = _checked(msgspec.msgpack.Decoder(Hello).decode)
# A coordinator that cannot go on says why instead of answering the handshake.
decode_challenge = _checked(msgspec.msgpack.Decoder(Challenge | Refused | Closing).decode)
decode_proof = _checked(msgspec.msgpack.Decoder(Proof).decode)
decode_from_member = _checked(msgspec.msgpack.Decoder(FromMember).decode)
decode_from_coordinator = _checked(msgspec.msgpack.Decoder(FromCoordinator).decode)
