"""What two doctors say to each other, and the measures that both ends take part in.

After the greeting of the control plane, with its proof where there is a token, frames of msgpack go both ways. The one
that came in asks; the one that listens answers. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..control.handshake import receive, send
from ..control.messages import FrameError, Splitter, pack
from .interfaces import interfaces
from .ports import knock

__all__ = [
    "ANSWER_S",
    "FIRST",
    "LARGEST",
    "Conversation",
    "Knock",
    "Knocked",
    "Lost",
    "Message",
    "Open",
    "Opened",
    "Pour",
    "Poured",
    "Rate",
    "Ready",
    "Tick",
    "Tock",
    "Told",
    "Welcome",
    "doors",
    "enough",
    "family_of",
    "knock_at",
    "port_range",
    "pour",
    "swallow",
    "welcome",
]

# How long either end waits for the other's next word; TCP repeats what was lost within this.
ANSWER_S = 2.5

# How many ports of the kernel's range are tried: one in each part of it, because firewalls open parts.
_DOORS = 8

# Neighbours that are tried where a port is taken already.
_NEIGHBOURS = 50

# The first flood only tells how large the second one has to be to take a moment, which is at most the last of these.
FIRST, _POUR_S, LARGEST = 1 << 20, 0.2, 1 << 28

# What is sent and taken at a time.
_PIECE = 1 << 20

# Linux's own default, for where it cannot be read.
_RANGE = (32768, 60999)


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The listener: who I am, and how you look from here."""

    host: str
    allhands: str
    torch: str
    address: str
    interface: str
    mtu: int
    seen_as: str


class Tick(msgspec.Struct, tag=True, frozen=True):
    """The visitor: what time is it?"""


class Tock(msgspec.Struct, tag=True, frozen=True):
    """The listener: this, in seconds since the epoch."""

    now: float


class Open(msgspec.Struct, tag=True, frozen=True):
    """The visitor: open some ports, for as long as this conversation lasts."""


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The listener: these, at this address."""

    address: str
    ports: list[int]


class Knock(msgspec.Struct, tag=True, frozen=True):
    """The visitor: try these ports of mine."""

    address: str
    ports: list[int]


class Knocked(msgspec.Struct, tag=True, frozen=True):
    """The listener: what stood in the way of each; "" where nothing did."""

    outcomes: dict[int, str]


class Pour(msgspec.Struct, tag=True, frozen=True):
    """The visitor: now so many bytes come from me (``back`` False, once you are ready), or send me as many."""

    back: bool
    size: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The listener: let them come."""


class Poured(msgspec.Struct, tag=True, frozen=True):
    """Whoever swallowed the flood: all of it came."""


class Rate(msgspec.Struct, tag=True, frozen=True):
    """The listener: that was my flood, at so many bytes a second."""

    bytes_per_s: float


class Told(msgspec.Struct, tag=True, frozen=True):
    """The visitor: this is what I found, in lines for your screen; ``red`` is whether something is red."""

    lines: list[str]
    red: bool


Message = Welcome | Tick | Tock | Open | Opened | Knock | Knocked | Pour | Ready | Poured | Rate | Told

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Lost(Exception):
    """The other doctor closed the connection, or said nothing in time."""

    def __init__(self, *, silent: bool, why: str) -> None:
        super().__init__(why)
        self.silent = silent


class Conversation:
    """A connection between two doctors, after the greeting."""

    def __init__(self, link: socket.socket, splitter: Splitter, rest: list[bytes]) -> None:
        self.link = link
        self._splitter = splitter
        self._frames = rest
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def own(self) -> str:
        """The address of this end."""
        return _plain(self.link.getsockname()[0])

    @property
    def peer(self) -> str:
        """The address of the other end, as it looks from here."""
        return _plain(self.link.getpeername()[0])

    def say(self, message: Message, seconds: float = ANSWER_S) -> None:
        """Send one message; raises Lost."""
        try:
            send(self.link, pack(_encode(message)), time.monotonic() + seconds)
        except TimeoutError:
            raise Lost(silent=True, why="it does not take what is sent") from None
        except OSError as problem:
            raise Lost(silent=False, why=problem.strerror or str(problem)) from problem

    def hear(self, seconds: float = ANSWER_S) -> Message:
        """Return the next message; raises Lost where none comes, or one that is none."""
        deadline = time.monotonic() + seconds
        try:
            while not self._frames:
                frames = receive(self.link, self._splitter, deadline)
                if frames is None:
                    raise Lost(silent=True, why=f"no word within {seconds:g} s")
                if not frames:
                    raise Lost(silent=False, why="it closed the connection")
                self._frames += frames
            heard: Message = _decode(self._frames.pop(0))
        except OSError as problem:
            raise Lost(silent=False, why=problem.strerror or str(problem)) from problem
        except (msgspec.MsgspecError, FrameError) as problem:
            raise Lost(silent=False, why=f"it said something that makes no sense ({problem})") from problem
        return heard


def _plain(address: str) -> str:
    """Return an address without its scope; an IPv4 one that came to an IPv6 socket as what it is."""
    return str(address).partition("%")[0].removeprefix("::ffff:")


def family_of(address: str) -> int:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# Ports --------------------------------------------------------------------------------------------------------


def port_range() -> tuple[int, int]:
    """Return the ports that the kernel gives to whoever asks for any: those of Gloo and NCCL."""
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    return _RANGE


@contextlib.contextmanager
def doors(address: str) -> Iterator[list[int]]:
    """Listen on a few ports of ``address``, spread over the kernel's range, as long as the block lasts."""
    low, high = port_range()
    step = max(1, (high - low + 1) // _DOORS)
    opened: list[socket.socket] = []
    try:
        for part in range(_DOORS):
            start = low + part * step + step // 2
            for port in range(start, min(start + _NEIGHBOURS, high + 1)):
                door = socket.socket(family_of(address), socket.SOCK_STREAM)
                try:
                    door.bind((address, port))
                    # Nobody has to take the connections: the kernel answers for a door that is open.
                    door.listen(4)
                except OSError as problem:
                    door.close()
                    if problem.errno != errno.EADDRINUSE:
                        break
                else:
                    opened.append(door)
                    break
        yield [int(door.getsockname()[1]) for door in opened]
    finally:
        for door in opened:
            door.close()


def knock_at(address: str, ports: list[int]) -> dict[int, str]:
    """Try ``ports`` of ``address`` at once; return for each what stood in the way, "" for nothing."""
    outcomes = knock([(family_of(address), address, port) for port in ports])
    return {
        port: "" if isinstance(outcome, float) else (outcome.strerror or str(outcome)).lower()
        for (_, port), outcome in outcomes.items()
    }


# Floods -------------------------------------------------------------------------------------------------------


def pour(talk: Conversation, size: int) -> float:
    """Send ``size`` bytes as they are; return how many came in a second, until the other end said that all did."""
    piece, left, started = memoryview(bytes(_PIECE)), size, time.monotonic()
    talk.link.settimeout(ANSWER_S)
    try:
        while left:
            left -= talk.link.send(piece[:left])
    except TimeoutError:
        raise Lost(silent=True, why=f"it took nothing more for {ANSWER_S:g} s") from None
    except OSError as problem:
        raise Lost(silent=False, why=problem.strerror or str(problem)) from problem
    if not isinstance(talk.hear(), Poured):
        raise Lost(silent=False, why="it did not say that all came")
    return size / max(1e-9, time.monotonic() - started)


def swallow(talk: Conversation, size: int) -> None:
    """Take ``size`` bytes and say so. Nothing else may be under way: what comes is not looked at."""
    piece, left = bytearray(_PIECE), min(size, LARGEST)
    talk.link.settimeout(ANSWER_S)
    try:
        while left:
            taken = talk.link.recv_into(piece, min(left, _PIECE))
            if not taken:
                raise Lost(silent=False, why="it closed the connection")
            left -= taken
    except TimeoutError:
        raise Lost(silent=True, why=f"nothing more came for {ANSWER_S:g} s") from None
    except OSError as problem:
        raise Lost(silent=False, why=problem.strerror or str(problem)) from problem
    talk.say(Poured())


def enough(rate: float) -> int:
    """Return how many bytes take a moment at ``rate`` bytes a second."""
    return int(min(max(FIRST, rate * _POUR_S), LARGEST))


def welcome(talk: Conversation, allhands: str, torch: str) -> Welcome:
    """Return what this end says of itself."""
    own = talk.own
    by = next((each for each in interfaces() if own in each.addresses), None)
    return Welcome(
        socket.gethostname(), allhands, torch, own, by.name if by is not None else "", by.mtu if by else 0, talk.peer
    )
