"""What the agents of a job's nodes say to each other, as typed messages on one connection for each node."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ...control.messages import Claim, Closing, LogLine, Ping, Pong, Refused, Waiting
from ..attempt import Story

__all__ = [
    "Begin",
    "Data",
    "Failing",
    "Finish",
    "FromConvenor",
    "FromDelegate",
    "Inquire",
    "Opened",
    "Over",
    "Seated",
    "Shut",
    "Still",
    "Stop",
    "Stopping",
    "Told",
    "decode_from_convenor",
    "decode_from_delegate",
]


class Opened(msgspec.Struct, tag=True, frozen=True):
    """Delegate: a worker of mine connected; what it says comes under this channel."""

    channel: int


class Data(msgspec.Struct, tag=True, frozen=True):
    """Either: bytes of a worker's connection, towards the coordinator or back."""

    channel: int
    body: bytes


class Shut(msgspec.Struct, tag=True, frozen=True):
    """Either: a worker's connection is over. ``half``: nothing more comes from here, but what comes is still read."""

    channel: int
    how: str = ""
    half: bool = False


class Failing(msgspec.Struct, tag=True, frozen=True):
    """Delegate: a worker of mine failed, so the job is over."""

    attempt: int


class Still(msgspec.Struct, tag=True, frozen=True):
    """Delegate: whether my workers stand still, and whether one of them is inside a collective all the while."""

    attempt: int
    still: bool
    inside: bool


class Stopping(msgspec.Struct, tag=True, frozen=True):
    """Delegate: someone asked for the end here, with this signal, for the ``times``-th time."""

    number: int
    times: int


class Told(msgspec.Struct, tag=True, frozen=True):
    """Delegate: my workers are gone, and this is how each ended. ``clock_s`` is my monotonic clock at this moment."""

    attempt: int
    story: Story
    clock_s: float


FromDelegate = Claim | Pong | Opened | Data | Shut | Failing | Still | Stopping | Told


class Seated(msgspec.Struct, tag=True, frozen=True):
    """Convenor: all nodes are there. You are ``node``; ``ranks`` has each node's number of ranks, ``hosts`` its name.

    ``token`` is what the ranks of this job share; "" where every node was given one.
    """

    node: int
    ranks: list[int]
    hosts: list[str]
    token: str = msgspec.field(default="")

    def __repr__(self) -> str:
        return f"Seated(node={self.node}, ranks={self.ranks}, hosts={self.hosts})"


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Convenor: start your workers for this attempt, with this MASTER_ADDR and MASTER_PORT."""

    attempt: int
    host: str
    port: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Convenor: the job is over; your workers may end by themselves for ``patience_s``, then end them."""

    attempt: int
    patience_s: float


class Inquire(msgspec.Struct, tag=True, frozen=True):
    """Convenor: the whole job stands still. Find out what your workers are doing, then end them."""

    attempt: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Convenor: ``by`` asked for the end, with this signal, for the ``times``-th time."""

    number: int
    by: str
    times: int


class Over(msgspec.Struct, tag=True, frozen=True):
    """Convenor: the attempt is judged. ``again``: the next one begins soon. ``report`` is the JSON of --report."""

    attempt: int
    again: bool
    exit_code: int
    words: str
    report: str


FromConvenor = (
    Waiting | Refused | Ping | LogLine | Closing | Seated | Begin | Finish | Inquire | Stop | Over | Data | Shut
)

_Message = TypeVar("_Message")

_from_delegate: msgspec.msgpack.Decoder[FromDelegate] = msgspec.msgpack.Decoder(FromDelegate)
_from_convenor: msgspec.msgpack.Decoder[FromConvenor] = msgspec.msgpack.Decoder(FromConvenor)


def decode_from_delegate(frame: bytes) -> FromDelegate:
    """Read a delegate's message; raise msgspec.MsgspecError for anything else."""
    return _checked(_from_delegate, frame)


def decode_from_convenor(frame: bytes) -> FromConvenor:
    """Read the convenor's message; raise msgspec.MsgspecError for anything else."""
    return _checked(_from_convenor, frame)


def _checked(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message:
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as problem:
        raise msgspec.DecodeError(str(problem)) from None
