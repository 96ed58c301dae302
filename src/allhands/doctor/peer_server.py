"""The server of the check between two machines: `allhands doctor --listen`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from .._version import __version__
from ..control import handshake
from ..control.handshake import receive, send
from ..control.messages import (
    GREETING,
    MOST_BEFORE_PROOF,
    MOST_BYTES,
    Challenge,
    FrameError,
    Refused,
    Splitter,
    decode_hello,
    decode_proof,
    encode,
    pack,
)
from ..control.process_identity import port_owner
from ..diagnosis import Diagnosis
from ..environments.world import Address
from ..errors import fail
from . import peer_protocol
from .engines import installed
from .peer_protocol import (
    ClockReply,
    ClockRequest,
    ConnectionFailed,
    ConnectReply,
    ConnectRequest,
    ListenReply,
    ListenRequest,
    PeerConnection,
    Report,
    TransferRate,
    TransferReady,
    TransferRequest,
    connect_to_ports,
    listen_on_ports,
    local_info,
    receive_bytes,
    send_bytes,
)
from .ports import JOB, LISTENER

__all__ = ["OnReport", "PeerServer"]

# A client starts the handshake at once, and needs some seconds for all checks.
_HANDSHAKE_S, _SESSION_S, _REQUEST_S = 5.0, 60.0, 10.0

# Concurrent clients: every machine of a rack may connect at once, but the number of threads must be bounded.
_MOST_CLIENTS = 64

# A client listens on eight.
_MOST_PORTS = 64

# Called with a client's address and its report, None if it disconnected before.
OnReport = Callable[[str, Report | None], None]


class PeerServer:
    """Accepts clients at one address, serves each in its own thread, and calls ``on_report`` with their reports."""

    def __init__(
        self, address: Address, token: bytes, on_report: OnReport, clock: Callable[[], float] = time.time
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
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as problem:
            raise fail(
                "address-unresolvable",
                f"{host} has no address to listen on",
                who=who,
                why=problem.strerror or str(problem),
                fix="give an address of this machine, or 0.0.0.0 for all of them",
            ) from problem
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(_MOST_CLIENTS)
        except OSError as problem:
            listener.close()
            held = port_owner(port)
            raise fail(
                "port-in-use" if held else "address-not-local",
                f"cannot listen on {self.address}: {problem.strerror or problem}",
                who=who,
                why=f"it is held by {held}" if held else "the system refused the address (observed)",
                fix="end that process, or choose another port" if held else "give an address of this machine",
            ) from problem
        return listener

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
            except OSError:
                break
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
        try:
            with link, contextlib.suppress(OSError, FrameError, msgspec.MsgspecError):
                client = str(link.getpeername()[0])
                link.settimeout(_HANDSHAKE_S)
                connection = self._handshake(link)
                if connection is None:
                    return False
                try:
                    report = self._answer(connection)
                except ConnectionFailed:
                    report = None
                self._on_report(client, report)
                return report is not None
        finally:
            self._places.release()
        return False

    def _handshake(self, link: socket.socket) -> PeerConnection | None:
        """Do the coordinator's half of the handshake; return None if the client is no doctor or has not our token."""
        deadline = time.monotonic() + _HANDSHAKE_S
        begin = b""
        while len(begin) < len(GREETING):
            more = link.recv(len(GREETING) - len(begin))
            begin += more
            if not more or not GREETING.startswith(begin):
                return None
        splitter = Splitter(MOST_BEFORE_PROOF)
        frames = receive(link, splitter, deadline) or []
        if not frames:
            return None
        opening = decode_hello(frames.pop(0))
        if opening.job != JOB:
            send(link, pack(encode(Refused(_not_a_coordinator(self.address)))), deadline)
            return None
        made = handshake.challenge(opening, self._token)
        send(link, pack(encode(Challenge(LISTENER, made.nonce, made.proof, made.has_token))), deadline)
        while not frames:
            received = receive(link, splitter, deadline)
            if not received:
                return None
            frames += received
        if not handshake.verify_member(opening, made, decode_proof(frames.pop(0)).proof, self._token):
            return None
        splitter.most = MOST_BYTES
        return PeerConnection(link, splitter, frames)

    def _answer(self, connection: PeerConnection) -> Report | None:
        """Answer requests until the client sends its report."""
        deadline = time.monotonic() + _SESSION_S
        connection.send(local_info(connection, __version__, self._torch))
        with contextlib.ExitStack() as session:
            while time.monotonic() < deadline:
                match connection.receive(_REQUEST_S):
                    case ClockRequest():
                        connection.send(ClockReply(self._clock()))
                    case ListenRequest():
                        ports = session.enter_context(listen_on_ports(connection.own))
                        connection.send(ListenReply(connection.own, ports))
                    case ConnectRequest(address, ports):
                        # Connects to the client only: nobody can use this server to scan a third machine.
                        own = address == connection.peer
                        outcomes = connect_to_ports(address, ports[:_MOST_PORTS]) if own else {}
                        connection.send(ConnectReply(outcomes))
                    case TransferRequest(back=False, size=size):
                        connection.send(TransferReady())
                        receive_bytes(connection, size)
                    case TransferRequest(back=True, size=size):
                        rate = send_bytes(connection, min(size, peer_protocol.MOST_BYTES))
                        connection.send(TransferRate(rate))
                    case Report() as report:
                        return report
                    case other:
                        raise ConnectionFailed(f"it sent {type(other).__name__}")
        return None


def _not_a_coordinator(address: Address) -> Diagnosis:
    return Diagnosis(
        "wrong-service",
        f"the service on {address} is not an allhands coordinator",
        who=f"the service at {address}",
        why="`allhands doctor --listen` runs there (from its own report)",
        fix="end it before the job starts",
        ranks=(0,),
    )
