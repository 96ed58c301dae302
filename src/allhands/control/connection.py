"""The coordinator's end of one connection: greeting, proof, claim, then messages, with a deadline for the handshake."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Literal, Protocol

import msgspec

from ..diagnosis import Diagnosis
from . import handshake
from .connect import keep_alive
from .messages import (
    GREETING,
    MOST_BEFORE_PROOF,
    MOST_BYTES,
    Challenge,
    Claim,
    FrameError,
    FromCoordinator,
    FromMember,
    Hello,
    Refused,
    Splitter,
    Status,
    decode_from_member,
    decode_hello,
    decode_proof,
    encode,
    pack,
)
from .process_identity import peer_credentials
from .rollcall import Arrival, RollCall
from .wording import Wording

__all__ = ["HANDSHAKE_S", "Connection", "Server"]

# A member sends its part of the handshake at once. Generous because thousands may be served at the same time.
HANDSHAKE_S = 20.0

# A member with more unread bytes than this is disconnected: it does not read, and its messages would fill the memory.
_MOST_UNREAD = 2 * MOST_BYTES

# After the death of a local process its last messages (an exception, a Leave) may still be unread in the socket.
_READ_REST_S = 0.05


class Server(Protocol):
    """What a connection reports to: the coordinator."""

    token: bytes
    roll: RollCall

    def connected(self, connection: Connection) -> None:
        """Report a new connection, before its handshake."""

    def claim_received(self, connection: Connection, claim: Claim) -> None:
        """Report the claim of an authenticated member."""

    def received(self, connection: Connection, message: FromMember) -> None:
        """Report a message that follows the claim."""

    def proof_failed(self, connection: Connection) -> None:
        """Report that the two ends do not share a token."""

    def disconnected(self, connection: Connection, how: str) -> None:
        """Report the end of the connection, once; ``how`` is what was observed."""


class Connection(asyncio.Protocol):
    """One connection; it belongs to a member once greeting, proof and claim have arrived."""

    def __init__(self, coordinator: Server, *, local: bool = False) -> None:
        self.coordinator = coordinator
        self.most_unread: float = _MOST_UNREAD
        self.opening = Hello(0, "", 0, -1, 0, b"", has_token=False)
        self.arrival: Arrival | None = None
        self.status: Status | None = None
        self.left: Literal["destroy", "exit"] | None = None
        self.failed = False
        self.closed = False
        self.asked = self.answered = 0.0
        self.received_at = self.made_at = time.monotonic()
        self.came_from = "unknown"
        self._local = local
        self._challenge: Challenge | None = None
        self._proven = self._disproved = False
        self._greeting = bytearray()
        self._splitter = Splitter(MOST_BEFORE_PROOF)
        self._transport: asyncio.Transport | None = None
        self._pidfd: int | None = None
        self._how = "its connection closed"
        self._write_closed = False

    @property
    def rank(self) -> int:
        """The rank in the member's Hello, -1 before it arrived."""
        return self.opening.rank

    @property
    def pending(self) -> bool:
        """Whether the last StatusQuery is unanswered."""
        return self.answered < self.asked

    # Called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Record the peer's address; refuse other users on the Unix socket."""
        self._transport = transport  # type: ignore[assignment]  # asyncio passes a Transport to stream protocols
        sock: socket.socket = transport.get_extra_info("socket")
        if self._local:
            pid, uid = peer_credentials(sock)
            self.came_from = f"this host (pid {pid})"
            if uid not in {os.getuid(), 0}:
                self.drop("another user's process")
                return
            self._watch(pid)
        else:
            try:
                self.came_from = str(sock.getpeername()[0])
                keep_alive(sock)
            except OSError as problem:
                self.drop(f"it closed before it was accepted ({problem.strerror})")
                return
        self.coordinator.connected(self)

    def data_received(self, data: bytes) -> None:
        """Handle the complete frames; malformed data ends this connection and no other."""
        self.received_at = time.monotonic()
        try:
            if len(self._greeting) < len(GREETING):
                data = self._check_greeting(data)
            for frame in self._splitter.feed(data):
                if self.closed:
                    return
                self._handle(frame)
        except (FrameError, msgspec.MsgspecError) as error:
            self.drop(f"malformed: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end of the connection."""
        if exc is not None and not self.closed:
            self._how = f"its connection broke ({exc})"
        self._ended()

    # Called by the coordinator -----------------------------------------------------------------------------------

    def send(self, message: FromCoordinator | Challenge) -> None:
        """Send one message; ignored after the end of the connection."""
        self.send_body(encode(message))

    def send_body(self, body: bytes) -> None:
        """Send an encoded message; ignored after `close_write` or the end of the connection."""
        self.write(pack(body))

    def write(self, data: bytes) -> None:
        """Send bytes as they are; ignored after `close_write` or the end of the connection."""
        if self.closed or self._write_closed or self._transport is None:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > self.most_unread:
            self.drop("it stopped reading")

    def close_write(self) -> None:
        """Close the sending direction, and keep reading until the other end closes too."""
        self._write_closed = True
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self.close()

    def close(self) -> None:
        """Close after everything was sent."""
        if self._transport is not None:
            self._transport.close()

    def drop(self, how: str) -> None:
        """Close at once, because of ``how``."""
        self._how = how
        if self._transport is not None:
            self._transport.abort()
        self._ended()

    def check(self, now: float) -> None:
        """Drop the connection if its handshake takes too long."""
        if self.arrival is None and self.left is None and now - self.made_at > HANDSHAKE_S:
            self.drop("no handshake")

    # Internal ----------------------------------------------------------------------------------------------------

    def _check_greeting(self, data: bytes) -> bytes:
        want = len(GREETING) - len(self._greeting)
        self._greeting += data[:want]
        if not GREETING.startswith(self._greeting):
            raise FrameError("not an allhands greeting")
        return data[want:]

    def _handle(self, frame: bytes) -> None:
        if self._challenge is None:
            self.opening = decode_hello(frame)
            if self.opening.protocol != handshake.PROTOCOL:
                self._refuse(_other_protocol(self.opening, self.coordinator.roll.wording))
                return
            self._challenge = handshake.challenge(self.opening, self.coordinator.token)
            self.send(self._challenge)
        elif not self._proven:
            proof = decode_proof(frame).proof
            if not handshake.verify_member(self.opening, self._challenge, proof, self.coordinator.token):
                self._disproved = True
                self._refuse(_unproven(self, has_token=bool(self.coordinator.token)))
                return
            self._proven = True
            self._splitter.most = MOST_BYTES
        else:
            self._handle_proven(frame)

    def _handle_proven(self, frame: bytes) -> None:
        """Handle a frame of an authenticated member."""
        message = decode_from_member(frame)
        if self.arrival is not None:
            self.coordinator.received(self, message)
        elif isinstance(message, Claim):
            self.coordinator.claim_received(self, message)
        else:
            self.drop("no claim")

    def _refuse(self, diagnosis: Diagnosis) -> None:
        self.send(Refused(diagnosis))
        self.close()

    def _watch(self, pid: int) -> None:
        """Watch a local member's process: a child of it may keep the connection open after its death."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return  # Another pid namespace, or an old kernel: only the connection's end is observed.
        asyncio.get_running_loop().add_reader(self._pidfd, self._process_ended)

    def _process_ended(self) -> None:
        self._unwatch()
        asyncio.get_running_loop().call_later(_READ_REST_S, self._drop_dead)

    def _drop_dead(self) -> None:
        if not self.closed:
            self.drop("its process ended")

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _ended(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._unwatch()
        tokens = self._disproved or self.opening.has_token or bool(self.coordinator.token)
        # It failed the proof, or it closed because our proof failed: the tokens differ. Without tokens every proof
        # succeeds, so the process ended or its deadline passed.
        if self._challenge is not None and not self._proven and tokens:
            self.coordinator.proof_failed(self)
        self.coordinator.disconnected(self, self._how)


def _unproven(connection: Connection, *, has_token: bool) -> Diagnosis:
    opening, wording = connection.opening, connection.coordinator.roll.wording
    if has_token and not opening.has_token:
        why = "the job has a token and this process has none"
    elif opening.has_token and not has_token:
        why = "this process has a token and the coordinator has none"
    else:
        why = "its token is not the job's token"
    return Diagnosis(
        "not-authorised",
        f"the coordinator does not admit {wording.one(opening.rank)}",
        who=f"{wording.one(opening.rank)} from {connection.came_from}",
        why=why,
        fix=f"give every {wording.noun} of the job the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)",
        ranks=(opening.rank,),
    )


def _other_protocol(opening: Hello, wording: Wording) -> Diagnosis:
    return Diagnosis(
        "version-mismatch",
        f"{wording.one(opening.rank)} uses protocol {opening.protocol}, the coordinator {handshake.PROTOCOL}",
        who=wording.one(opening.rank),
        why="different versions of allhands are installed",
        fix="install the same version of allhands everywhere",
        ranks=(opening.rank,),
    )
