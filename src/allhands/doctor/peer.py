"""The check between two machines: `allhands doctor HOST:PORT` on one, `allhands doctor --listen` on the other.

After the handshake of the control plane, with its proof if there is a token, both ends send length-prefixed frames of
msgpack: the client sends requests, the server answers. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .._version import __version__
from ..control import handshake, messages
from ..control.process_identity import port_owner
from ..diagnosis import Diagnosis, duration, join
from ..environments.world import Address
from ..errors import fail
from .concurrent import run_concurrently
from .engines import installed
from .finding import Finding, Section, lines
from .request import interfaces
from .routes import firewall_rules

__all__ = ["JOB", "LISTENER", "PeerConnection", "PeerServer", "Report", "check_peer", "connect_all"]

_NETWORK, _RESOURCES, _STACK = Section("network"), Section("resources"), Section("stack")

# A doctor's Hello has this job name, and a listening doctor's Challenge this protocol number. No job and no coordinator
# has either.
JOB, LISTENER = "allhands doctor", -1

# Limit for the peer's next message. TCP retransmits a lost packet within this.
_ANSWER_S = 2.5

# A client starts the handshake at once.
_HANDSHAKE_S = 5.0

# Concurrent clients: every machine of a rack may connect at once, but the number of threads must be bounded.
_MOST_CLIENTS = 64

# Ports that are tried: one in each part of the kernel's range, because firewalls open parts of it.
_PORTS = 8

# The first transfer determines the size of the second, which takes `_TRANSFER_S`; no transfer is larger than the last.
_FIRST_TRANSFER, _TRANSFER_S, _MOST_TRANSFER = 1 << 20, 0.2, 1 << 28

# Bytes per send or receive.
_CHUNK = 1 << 20

# Of so many round trips, the fastest is a good estimate.
_ROUND_TRIPS = 20


# Messages -----------------------------------------------------------------------------------------------------


class _PeerInfo(msgspec.Struct, frozen=True):
    """The server's first message: its name, versions and interface, and the client's address as it sees it."""

    host: str
    allhands: str
    torch: str
    address: str
    interface: str
    mtu: int
    seen_as: str


class _ClockRequest(msgspec.Struct, tag=True, frozen=True):
    """Send the time. Reply: seconds since the epoch, a float."""


class _ListenRequest(msgspec.Struct, tag=True, frozen=True):
    """Listen on some ports until this connection ends. Reply: the ports, a list[int]."""


class _ConnectRequest(msgspec.Struct, tag=True, frozen=True):
    """Connect to these ports of the client. Reply: the error of each, "" if there was none, a dict[int, str]."""

    address: str
    ports: list[int]


class _ReceiveRequest(msgspec.Struct, tag=True, frozen=True):
    """Receive so many bytes. Replies: True once ready to receive, and True when all have arrived."""

    size: int


class _SendRequest(msgspec.Struct, tag=True, frozen=True):
    """Send so many bytes. They are the reply."""

    size: int


class Report(msgspec.Struct, tag=True, frozen=True):
    """The client's findings as lines for the server's screen; ``red`` is whether any is red. There is no reply."""

    lines: list[str]
    red: bool


_Request = _ClockRequest | _ListenRequest | _ConnectRequest | _ReceiveRequest | _SendRequest | Report
_decode_request = msgspec.msgpack.Decoder(_Request).decode
_Reply = TypeVar("_Reply")


# The connection -----------------------------------------------------------------------------------------------


class _ConnectionFailed(Exception):
    """The peer closed the connection, sent an invalid message, or, if ``silent``, nothing in time."""

    def __init__(self, why: str, *, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent


class PeerConnection:
    """A connection between two doctors; `frame` also serves the handshake.

    ``own`` and ``peer`` are the addresses of both ends as seen from here.
    """

    def __init__(self, link: socket.socket, splitter: messages.Splitter, rest: list[bytes]) -> None:
        self.link = link
        self.splitter = splitter
        self.own, self.peer = _plain(link.getsockname()[0]), _plain(link.getpeername()[0])
        self._frames = rest
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def interface(self) -> tuple[str, int]:
        """Return name and MTU of the interface of this end, ("", 0) if there is none with its address."""
        return next(((each.name, each.mtu) for each in interfaces() if self.own in each.addresses), ("", 0))

    def send(self, message: Any) -> None:
        """Send one message. Raises _ConnectionFailed."""
        with _translated("it does not receive what is sent"):
            handshake.send(self.link, messages.pack(messages.encode(message)), time.monotonic() + _ANSWER_S)

    def frame(self, timeout_s: float) -> bytes:
        """Return the next frame. Raises _ConnectionFailed if none arrives, or an invalid one."""
        deadline = time.monotonic() + timeout_s
        with _translated(f"no message within {timeout_s:g} s"):
            while not self._frames:
                frames = handshake.receive(self.link, self.splitter, deadline)
                if frames is None:
                    raise TimeoutError
                if not frames:
                    raise _ConnectionFailed("it closed the connection")
                self._frames += frames
        return self._frames.pop(0)

    def receive(self, kind: type[_Reply], timeout_s: float = _ANSWER_S) -> _Reply:
        """Return the next message, which must be of this ``kind``. Raises _ConnectionFailed."""
        frame = self.frame(timeout_s)
        with _translated():
            return msgspec.msgpack.decode(frame, type=kind)

    def ask(self, request: _Request, kind: type[_Reply], timeout_s: float = _ANSWER_S) -> _Reply:
        """Send ``request`` and return the reply. Raises _ConnectionFailed."""
        self.send(request)
        return self.receive(kind, timeout_s)

    def send_bytes(self, size: int) -> None:
        """Send ``size`` bytes, which are not parsed. Raises _ConnectionFailed."""
        chunk = memoryview(bytes(_CHUNK))
        self.link.settimeout(_ANSWER_S)
        with _translated(f"it received nothing more for {_ANSWER_S:g} s"):
            while size:
                size -= self.link.send(chunk[:size])

    def receive_bytes(self, size: int) -> None:
        """Receive ``size`` bytes that are not parsed; no message may be under way. Raises _ConnectionFailed."""
        chunk = bytearray(_CHUNK)
        self.link.settimeout(_ANSWER_S)
        with _translated(f"nothing more arrived for {_ANSWER_S:g} s"):
            while size:
                received = self.link.recv_into(chunk, min(size, _CHUNK))
                if not received:
                    raise _ConnectionFailed("it closed the connection")
                size -= received


@contextlib.contextmanager
def _translated(timed_out: str = "") -> Iterator[None]:
    """Raise _ConnectionFailed for errors of a socket, and for invalid messages."""
    try:
        yield
    except TimeoutError:
        raise _ConnectionFailed(timed_out, silent=True) from None
    except OSError as problem:
        raise _ConnectionFailed(problem.strerror or str(problem)) from problem
    except (msgspec.MsgspecError, messages.FrameError) as problem:
        raise _ConnectionFailed(f"it sent an invalid message ({problem})") from problem


def _plain(address: str) -> str:
    """Return an address without its scope, and an IPv4 address of an IPv6 socket without its prefix."""
    return str(address).partition("%")[0].removeprefix("::ffff:")


# Ports --------------------------------------------------------------------------------------------------------


def connect_all(places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], OSError | float]:
    """Connect to every (address, port) concurrently; return the seconds that each took, or its error."""

    def connect(place: tuple[str, int]) -> OSError | float:
        started = time.monotonic()
        try:
            # Longer than one retransmission of a lost first packet (after 1 s), which is no firewall.
            socket.create_connection(place, 2.2).close()
        except TimeoutError:
            return TimeoutError(errno.ETIMEDOUT, "no answer")
        except OSError as problem:
            return problem
        return time.monotonic() - started

    return dict(zip(places, run_concurrently(connect, places), strict=True))


def _connect_to_ports(address: str, ports: list[int]) -> dict[int, str]:
    """Connect to ``ports`` of ``address`` concurrently; return the error of each, "" if there was none."""
    outcomes = connect_all([(address, port) for port in ports])
    return {
        port: "" if isinstance(outcome, float) else (outcome.strerror or str(outcome)).lower()
        for (_, port), outcome in outcomes.items()
    }


@contextlib.contextmanager
def _listen_on_ports(address: str) -> Iterator[list[int]]:
    """Listen on some ports of ``address``, spread over the kernel's range, while the block runs."""
    # The range from which the kernel chooses ports, those of Gloo and NCCL too.
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    step = max(1, (high - low + 1) // _PORTS)
    with contextlib.ExitStack() as sockets:
        ports = []
        for part in range(_PORTS):
            start = low + part * step + step // 2
            # If a port is in use, its neighbours are tried.
            for port in range(start, min(start + 50, high + 1)):
                try:
                    # The kernel completes connections without accept.
                    sockets.enter_context(socket.create_server((address, port), family=family, backlog=4))
                except OSError as problem:
                    if problem.errno != errno.EADDRINUSE:
                        break
                else:
                    ports.append(port)
                    break
        yield ports


# The client ---------------------------------------------------------------------------------------------------


def check_peer(connection: PeerConnection) -> list[Finding]:
    """Check the way to the doctor at the other end of ``connection``, and back."""
    found: list[Finding] = []
    name = "the other doctor"
    try:
        peer = connection.receive(_PeerInfo)
        name = peer.host
        found += _versions(peer)
        found += _clock(connection, name)
        found += _ports(connection, peer)
        found += _throughput(connection, peer)
        connection.send(Report(lines(found), red=any(each.level == "red" for each in found)))
    except _ConnectionFailed as problem:
        found.append(
            _NETWORK.red(
                "conversation",
                "coordinator-silent",
                f"{name} {'stopped answering' if problem.silent else 'disconnected'} in the middle of the check",
                why=f"{problem} (observed)",
                fix="check that `allhands doctor --listen` still runs there, and try again",
            )
        )
    return found


def _versions(peer: _PeerInfo) -> Iterator[Finding]:
    torch = installed().torch
    if peer.allhands == __version__ and torch == peer.torch:
        return
    install = f"pip install torch=={peer.torch.partition('+')[0]} allhands=={peer.allhands}"
    yield _STACK.yellow(
        "versions",
        "version-mismatch",
        f"versions differ: here allhands {__version__} and torch {torch or 'none'}, on {peer.host} allhands "
        f"{peer.allhands} and torch {peer.torch or 'none'}",
        why="reported by both ends (observed)",
        fix="install the same versions everywhere (ALLHANDS_MIXED_VERSIONS=1 allows different ones of torch)",
        commands=(install,) if peer.torch else (),
    )


def _clock(connection: PeerConnection, name: str) -> Iterator[Finding]:
    best, offset = float("inf"), 0.0
    for _ in range(_ROUND_TRIPS):
        started, wall = time.monotonic(), time.time()
        theirs = connection.ask(_ClockRequest(), float)
        took = time.monotonic() - started
        if took < best:
            # If both directions take as long, the peer read its clock after half the time.
            best, offset = took, theirs - (wall + took / 2)
    what = f"round trip to {name} {best * 1000:.2f} ms"
    yield _NETWORK.green("round-trip", what, f"the fastest of {_ROUND_TRIPS}", round_trip_s=best)
    # Clocks that NTP keeps differ by less. Beyond a second, log lines of two machines cannot be ordered.
    if abs(offset) - best < 1.0:
        what = f"clocks agree within {max(abs(offset), best) * 1000:.0f} ms"
        yield _RESOURCES.green("clock", what, offset_s=offset)
        return
    yield _RESOURCES.yellow(
        "clock",
        "clock-skewed",
        f"the clock of {name} is {duration(abs(offset))} {'ahead of' if offset > 0 else 'behind'} this machine's",
        why=f"from its own report, within {duration(round(best, 3))} of a round trip (observed). Collectives work; "
        "certificates, tokens that expire, and the order of log lines are affected",
        fix="let both machines keep their time by the same NTP server",
        commands=("timedatectl set-ntp true", "chronyc makestep"),
        details={"offset_s": offset, "host": name},
    )


def _ports(connection: PeerConnection, peer: _PeerInfo) -> Iterator[Finding]:
    own, here = connection.own, socket.gethostname()
    there = _connect_to_ports(peer.address, connection.ask(_ListenRequest(), list[int]))
    with _listen_on_ports(own) as ports:
        # The peer connects to all ports concurrently, and waits for those that do not answer.
        back = connection.ask(_ConnectRequest(own, ports), dict[int, str], _ANSWER_S + 3.0)
    if any(there.values()):
        yield _filtered("ports-there", there, here, peer.host)
    if any(back.values()):
        yield _filtered("ports-back", back, peer.host, here, firewall_rules())
    if peer.seen_as != own:
        yield _NETWORK.yellow(
            "translation",
            "ports-filtered",
            f"{peer.host} sees this machine as {peer.seen_as}, but its address is {own}",
            why="addresses are translated between them (NAT; observed); ranks advertise their own address",
            fix=f"use a network on which {own} itself can be reached from {peer.host}",
        )
    if not any([*there.values(), *back.values(), peer.seen_as != own]):
        what = f"ports open both ways ({len(there)} there, {len(back)} back)"
        yield _NETWORK.green("ports", what, f"from {min(there, default=0)} to {max(there, default=0)}")


def _filtered(
    check: str, outcomes: dict[int, str], source: str, destination: str, rules: list[str] | None = None
) -> Finding:
    shut = {port: problem for port, problem in outcomes.items() if problem}
    some = "the" if len(shut) == len(outcomes) else f"{len(shut)} of {len(outcomes)} tried"
    return _NETWORK.red(
        check,
        "ports-filtered",
        f"{source} cannot reach {some} ports of {destination} that Gloo and NCCL will use",
        why=join([f"{port}: {problem}" for port, problem in list(shut.items())[:4]])
        + (f" and {len(shut) - 4} more" if len(shut) > 4 else "")
        + f" (observed: {join(sorted(set(shut.values())))}, although {destination} listens on them)"
        + (f"; rules here: {join(rules[:3])}" if rules else ""),
        fix=f"on {destination} accept connections from {source} on all ports above 1023, not only the coordinator's",
        commands=(f"nft list ruleset   # on {destination}, as root",),
        details={"from": source, "to": destination, "shut": sorted(shut), "open": sorted(set(outcomes) - set(shut))},
    )


def _throughput(connection: PeerConnection, peer: _PeerInfo) -> Iterator[Finding]:
    # Every network of IPv6, and so nearly every tunnel, passes an MTU of 1280.
    interface, mtu = connection.interface()
    mtus = f"{interface} here has MTU {mtu}, {peer.interface} on {peer.host} {peer.mtu}"
    details = {"here": mtu, "there": peer.mtu}
    direction = f"to {peer.host}"
    try:
        there = _measure(connection, back=False)
        direction = f"from {peer.host}"
        back = _measure(connection, back=True)
    except _ConnectionFailed as problem:
        if not problem.silent:
            raise
        yield _NETWORK.red(
            "packet-size",
            "mtu-mismatch",
            f"small packets arrive, large ones {direction} are lost",
            why=f"{problem} after small messages were answered at once (observed); {mtus}: probably a device "
            "between the machines passes only smaller packets and does not report it",
            fix="give the interfaces of both machines the smallest MTU on the way; 1280 passes nearly everywhere",
            commands=(f"ip link set dev {interface or 'eth0'} mtu 1280   # as root, on both machines",),
            certain=False,
            details=details,
        )
        return
    what = f"{_rate(there)} there, {_rate(back)} back"
    why = "one connection, a fifth of a second each"
    yield _NETWORK.green("throughput", what, why, there=there, back=back)
    if mtu and peer.mtu and mtu != peer.mtu:
        yield _NETWORK.yellow(
            "packet-size",
            "mtu-mismatch",
            f"packet sizes differ: {mtus}",
            why="large packets do arrive (observed), but a switch or a tunnel between others may drop them",
            fix="give every machine of the job the same MTU",
            commands=(f"ip link set dev {interface} mtu {min(mtu, peer.mtu)}   # as root",),
            details=details,
        )


def _measure(connection: PeerConnection, *, back: bool) -> float:
    """Return the bytes per second to the peer, or ``back``; a first transfer determines the size of the second."""
    rate = 0.0
    for _ in range(2):
        size = int(min(max(_FIRST_TRANSFER, rate * _TRANSFER_S), _MOST_TRANSFER))
        if not back:
            # Bytes that arrived together with the request would be parsed.
            connection.ask(_ReceiveRequest(size), bool)
        started = time.monotonic()
        if back:
            connection.send(_SendRequest(size))
            connection.receive_bytes(size)
        else:
            connection.send_bytes(size)
            connection.receive(bool)
        rate = size / max(1e-9, time.monotonic() - started)
    return rate


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


# The server ---------------------------------------------------------------------------------------------------


class PeerServer:
    """Accepts clients at one address, and serves each in its own thread.

    ``on_report`` is called with a client's address and its report, None if it disconnected before.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        on_report: Callable[[str, Report | None], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.address = address
        self._token = token
        self._on_report = on_report
        self._clock = clock
        self._torch = installed().torch
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._over = threading.Event()
        self._listener = self._listen()

    def _listen(self) -> socket.socket:
        host, port = self.address.host, self.address.port
        who = f"{socket.gethostname()} (allhands doctor --listen)"
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            both = family == socket.AF_INET6
            return socket.create_server(place, family=family, backlog=_MOST_CLIENTS, dualstack_ipv6=both)
        except socket.gaierror as problem:
            raise fail(
                "address-unresolvable",
                f"{host} has no address to listen on",
                who=who,
                why=problem.strerror or str(problem),
                fix="give an address of this machine, or 0.0.0.0 for all of them",
            ) from problem
        except OSError as problem:
            held = port_owner(port)
            raise fail(
                "port-in-use" if held else "address-not-local",
                f"cannot listen on {self.address}: {os.strerror(problem.errno or 0)}",
                who=who,
                why=f"it is held by {held}" if held else "the system refused the address (observed)",
                fix="end that process, or choose another port" if held else "give an address of this machine",
            ) from problem

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listener.getsockname()[1])

    def serve(self, *, once: bool = False) -> None:
        """Serve clients until `stop` is called, or with ``once`` until one has sent its report."""
        self._listener.settimeout(0.2)
        while not self._over.is_set():
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            if not self._places.acquire(blocking=False):
                link.close()
            elif not once:
                threading.Thread(target=self._serve_one, args=(link,), name="allhands-peer", daemon=True).start()
            elif self._serve_one(link):
                break

    def stop(self) -> None:
        """End `serve`; safe in a signal handler."""
        self._over.set()

    def close(self) -> None:
        """Release the port."""
        self._listener.close()

    def _serve_one(self, link: socket.socket) -> bool:
        """Serve one client; return whether it sent its report."""
        report = None
        with contextlib.ExitStack() as stack:
            stack.callback(self._places.release)
            stack.enter_context(link)
            stack.enter_context(contextlib.suppress(OSError, msgspec.MsgspecError, _ConnectionFailed))
            client = str(link.getpeername()[0])
            link.settimeout(_HANDSHAKE_S)
            connection = self._handshake(link)
            if connection is not None:
                with contextlib.suppress(msgspec.MsgspecError, _ConnectionFailed):
                    report = self._answer(connection)
                self._on_report(client, report)
        return report is not None

    def _handshake(self, link: socket.socket) -> PeerConnection | None:
        """Do the coordinator's half of the handshake; return None if the client is no doctor or has not our token."""
        begin = b""
        while len(begin) < len(messages.GREETING):
            more = link.recv(len(messages.GREETING) - len(begin))
            begin += more
            if not more or not messages.GREETING.startswith(begin):
                return None
        connection = PeerConnection(link, messages.Splitter(messages.MOST_BEFORE_PROOF), [])
        opening = messages.decode_hello(connection.frame(_HANDSHAKE_S))
        if opening.job != JOB:
            diagnosis = Diagnosis(
                "wrong-service",
                f"the service on {self.address} is not an allhands coordinator",
                who=f"the service at {self.address}",
                why="`allhands doctor --listen` runs there (from its own report)",
                fix="end it before the job starts",
                ranks=(0,),
            )
            connection.send(messages.Refused(diagnosis))
            return None
        made = msgspec.structs.replace(handshake.challenge(opening, self._token), protocol=LISTENER)
        connection.send(made)
        proof = messages.decode_proof(connection.frame(_HANDSHAKE_S)).proof
        if not handshake.verify_member(opening, made, proof, self._token):
            return None
        connection.splitter.most = messages.MOST_BYTES
        return connection

    def _answer(self, connection: PeerConnection) -> Report | None:
        """Answer requests until the client sends its report."""
        # A client needs some seconds for all checks.
        deadline = time.monotonic() + 60.0
        host, own, (interface, mtu) = socket.gethostname(), connection.own, connection.interface()
        connection.send(_PeerInfo(host, __version__, self._torch, own, interface, mtu, connection.peer))
        with contextlib.ExitStack() as session:
            while time.monotonic() < deadline:
                match _decode_request(connection.frame(10.0)):
                    case _ClockRequest():
                        connection.send(self._clock())
                    case _ListenRequest():
                        connection.send(session.enter_context(_listen_on_ports(own)))
                    case _ConnectRequest(address, ports):
                        # Connects to some ports of the client only: nobody can use this server to scan others.
                        theirs = ports[:64] if address == connection.peer else []
                        connection.send(_connect_to_ports(address, theirs))
                    case _ReceiveRequest(size):
                        connection.send(message=True)
                        connection.receive_bytes(min(size, _MOST_TRANSFER))
                        connection.send(message=True)
                    case _SendRequest(size):
                        connection.send_bytes(min(size, _MOST_TRANSFER))
                    case Report() as report:
                        return report
        return None
