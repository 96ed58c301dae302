"""The protocol of the check between two machines: its messages, the connection, and the measurements of both ends.

After the handshake of the control plane, with its proof if there is a token, both ends send length-prefixed frames of
msgpack. The client (`allhands doctor HOST:PORT`) sends requests, the server (`--listen`) answers. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ..control.handshake import receive, send
from ..control.messages import FrameError, Splitter, pack
from .ports import connect_all
from .request import interfaces

__all__ = [
    "ANSWER_S",
    "FIRST_BYTES",
    "MOST_BYTES",
    "ClockReply",
    "ClockRequest",
    "ConnectReply",
    "ConnectRequest",
    "ConnectionFailed",
    "ListenReply",
    "ListenRequest",
    "PeerConnection",
    "PeerInfo",
    "Report",
    "TransferDone",
    "TransferRate",
    "TransferReady",
    "TransferRequest",
    "connect_to_ports",
    "listen_on_ports",
    "local_info",
    "receive_bytes",
    "send_bytes",
    "transfer_size",
]

# Limit for the peer's next message. TCP retransmits a lost packet within this.
ANSWER_S = 2.5

# Ports that are tried: one in each part of the kernel's range, because firewalls open parts of it.
_PORTS = 8

# If a port is in use, so many of its neighbours are tried.
_NEIGHBOURS = 50

# The first transfer determines the size of the second, which takes `_TRANSFER_S`; no transfer is larger than the last.
FIRST_BYTES, _TRANSFER_S, MOST_BYTES = 1 << 20, 0.2, 1 << 28

# Bytes per send or receive.
_CHUNK = 1 << 20

# Linux's default, if it cannot be read.
_PORT_RANGE = (32768, 60999)


class PeerInfo(msgspec.Struct, tag=True, frozen=True):
    """Server: its name, versions and interface, and the client's address as it sees it."""

    host: str
    allhands: str
    torch: str
    address: str
    interface: str
    mtu: int
    seen_as: str


class ClockRequest(msgspec.Struct, tag=True, frozen=True):
    """Client: send the time."""


class ClockReply(msgspec.Struct, tag=True, frozen=True):
    """Server: the time, in seconds since the epoch."""

    now: float


class ListenRequest(msgspec.Struct, tag=True, frozen=True):
    """Client: listen on some ports until this connection ends."""


class ListenReply(msgspec.Struct, tag=True, frozen=True):
    """Server: it listens on these."""

    address: str
    ports: list[int]


class ConnectRequest(msgspec.Struct, tag=True, frozen=True):
    """Client: connect to these ports of mine."""

    address: str
    ports: list[int]


class ConnectReply(msgspec.Struct, tag=True, frozen=True):
    """Server: the error of each port, "" if there was none."""

    outcomes: dict[int, str]


class TransferRequest(msgspec.Struct, tag=True, frozen=True):
    """Client: receive so many bytes from me, or, if ``back``, send me as many."""

    back: bool
    size: int


class TransferReady(msgspec.Struct, tag=True, frozen=True):
    """Server: ready to receive."""


class TransferDone(msgspec.Struct, tag=True, frozen=True):
    """The receiving end: all bytes have arrived."""


class TransferRate(msgspec.Struct, tag=True, frozen=True):
    """Server: the rate at which it sent."""

    bytes_per_s: float


class Report(msgspec.Struct, tag=True, frozen=True):
    """Client: the findings as lines for the server's screen; ``red`` is whether any is red."""

    lines: list[str]
    red: bool


_Message = (
    PeerInfo
    | ClockRequest
    | ClockReply
    | ListenRequest
    | ListenReply
    | ConnectRequest
    | ConnectReply
    | TransferRequest
    | TransferReady
    | TransferDone
    | TransferRate
    | Report
)
_Expected = TypeVar("_Expected", bound=msgspec.Struct)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class ConnectionFailed(Exception):
    """The peer closed the connection, sent an invalid message, or, if ``silent``, nothing in time."""

    def __init__(self, why: str, *, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent


class PeerConnection:
    """A connection between two doctors, after the handshake."""

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
        """The address of the other end, as seen from here."""
        return _plain(self.link.getpeername()[0])

    def send(self, message: msgspec.Struct, timeout_s: float = ANSWER_S) -> None:
        """Send one message. Raises ConnectionFailed."""
        with _translated("it does not receive what is sent"):
            send(self.link, pack(_encode(message)), time.monotonic() + timeout_s)

    def receive(self, timeout_s: float = ANSWER_S) -> msgspec.Struct:
        """Return the next message. Raises ConnectionFailed if none arrives, or an invalid one."""
        deadline = time.monotonic() + timeout_s
        try:
            with _translated(f"no message within {timeout_s:g} s"):
                while not self._frames:
                    frames = receive(self.link, self._splitter, deadline)
                    if frames is None:
                        raise TimeoutError
                    if not frames:
                        raise ConnectionFailed("it closed the connection")
                    self._frames += frames
            message: msgspec.Struct = _decode(self._frames.pop(0))
        except (msgspec.MsgspecError, FrameError) as problem:
            raise ConnectionFailed(f"it sent an invalid message ({problem})") from problem
        return message

    def expect(self, kind: type[_Expected], timeout_s: float = ANSWER_S) -> _Expected:
        """Return the next message, which must be of this ``kind``. Raises ConnectionFailed."""
        message = self.receive(timeout_s)
        if not isinstance(message, kind):
            raise ConnectionFailed(f"it sent {type(message).__name__} instead of {kind.__name__}")
        return message


@contextlib.contextmanager
def _translated(timed_out: str) -> Iterator[None]:
    """Raise ConnectionFailed for errors of a socket."""
    try:
        yield
    except TimeoutError:
        raise ConnectionFailed(timed_out, silent=True) from None
    except OSError as problem:
        raise ConnectionFailed(problem.strerror or str(problem)) from problem


def _plain(address: str) -> str:
    """Return an address without its scope, and an IPv4 address of an IPv6 socket without its prefix."""
    return str(address).partition("%")[0].removeprefix("::ffff:")


def local_info(connection: PeerConnection, allhands: str, torch: str) -> PeerInfo:
    """Return the description of this end."""
    own = connection.own
    interface = next((each for each in interfaces() if own in each.addresses), None)
    name, mtu = (interface.name, interface.mtu) if interface is not None else ("", 0)
    return PeerInfo(socket.gethostname(), allhands, torch, own, name, mtu, connection.peer)


# Ports --------------------------------------------------------------------------------------------------------


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _port_range() -> tuple[int, int]:
    """Return the range from which the kernel chooses ports, those of Gloo and NCCL too."""
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    return _PORT_RANGE


@contextlib.contextmanager
def listen_on_ports(address: str) -> Iterator[list[int]]:
    """Listen on some ports of ``address``, spread over the kernel's range, while the block runs."""
    low, high = _port_range()
    step = max(1, (high - low + 1) // _PORTS)
    with contextlib.ExitStack() as sockets:
        ports = []
        for part in range(_PORTS):
            start = low + part * step + step // 2
            for port in range(start, min(start + _NEIGHBOURS, high + 1)):
                sock = sockets.enter_context(socket.socket(_family(address), socket.SOCK_STREAM))
                try:
                    sock.bind((address, port))
                    # The kernel completes connections without accept.
                    sock.listen(4)
                except OSError as problem:
                    sock.close()
                    if problem.errno != errno.EADDRINUSE:
                        break
                else:
                    ports.append(port)
                    break
        yield ports


def connect_to_ports(address: str, ports: list[int]) -> dict[int, str]:
    """Connect to ``ports`` of ``address`` concurrently; return the error of each, "" if there was none."""
    outcomes = connect_all([(_family(address), address, port) for port in ports])
    return {
        port: "" if isinstance(outcome, float) else (outcome.strerror or str(outcome)).lower()
        for (_, port), outcome in outcomes.items()
    }


# Transfers ----------------------------------------------------------------------------------------------------


def send_bytes(connection: PeerConnection, size: int) -> float:
    """Send ``size`` bytes; return the bytes per second until the peer reported that all arrived."""
    chunk, left, started = memoryview(bytes(_CHUNK)), size, time.monotonic()
    connection.link.settimeout(ANSWER_S)
    with _translated(f"it received nothing more for {ANSWER_S:g} s"):
        while left:
            left -= connection.link.send(chunk[:left])
    connection.expect(TransferDone)
    return size / max(1e-9, time.monotonic() - started)


def receive_bytes(connection: PeerConnection, size: int) -> None:
    """Receive ``size`` bytes and report it. They are not parsed, so no message may be under way."""
    chunk, left = bytearray(_CHUNK), min(size, MOST_BYTES)
    connection.link.settimeout(ANSWER_S)
    with _translated(f"nothing more arrived for {ANSWER_S:g} s"):
        while left:
            received = connection.link.recv_into(chunk, min(left, _CHUNK))
            if not received:
                raise ConnectionFailed("it closed the connection")
            left -= received
    connection.send(TransferDone())


def transfer_size(rate: float) -> int:
    """Return the number of bytes that take a fraction of a second at ``rate`` bytes per second."""
    return int(min(max(FIRST_BYTES, rate * _TRANSFER_S), MOST_BYTES))
