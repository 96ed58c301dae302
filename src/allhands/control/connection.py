"""The coordinator's end of one connection: greeting, proof, claim, then messages, each with a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from ..diagnosis import Diagnosis
from . import credentials, handshake
from .arrival import Arrival
from .frames import GREETING, MOST_BEFORE_PROOF, MOST_BYTES, FrameError, Splitter, pack
from .messages import (
    Challenge,
    Claim,
    FromCoordinator,
    Hello,
    Refused,
    Status,
    decode_from_member,
    decode_hello,
    decode_proof,
    encode,
)
from .wording import Party

if TYPE_CHECKING:
    from .coordinator import Coordinator

__all__ = ["HANDSHAKE_S", "Connection"]

# A member sends its part of the handshake at once; whoever takes longer is not a member. Generous,
# because thousands of members may be served at the same time.
HANDSHAKE_S = 20.0

# Unread bytes towards one member after which it is cut off: it does not read, and would eat memory.
_MOST_UNREAD = 2 * MOST_BYTES


class Connection(asyncio.Protocol):
    """A connection from whoever; it becomes a member's once greeting, proof and claim have come."""

    def __init__(self, coordinator: Coordinator, *, local: bool = False) -> None:
        self.coordinator = coordinator
        self.most_unread: float = _MOST_UNREAD
        self.opening = Hello(0, "", 0, -1, 0, b"", has_token=False)
        self.arrival: Arrival | None = None
        self.status: Status | None = None
        self.left: Literal["destroy", "exit"] | None = None
        self.failed = False
        self.closed = False
        self.asked = self.answered = 0.0
        self.heard_at = self.made_at = time.monotonic()
        self.came_from = "unknown"
        self._local = local
        self._challenge: Challenge | None = None
        self._proven = self._disproved = False
        self._greeting = bytearray()
        self._splitter = Splitter(MOST_BEFORE_PROOF)
        self._transport: asyncio.Transport | None = None
        self._pidfd: int | None = None
        self._how = "its connection closed"
        self._mute = False

    @property
    def rank(self) -> int:
        """The rank this connection speaks for, -1 before it said so."""
        return self.opening.rank

    @property
    def pending(self) -> bool:
        """Whether the member still owes an answer to the last question."""
        return self.answered < self.asked

    # Called by asyncio -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of where the connection comes from; refuse other users on the local socket."""
        self._transport = transport  # type: ignore[assignment]  # asyncio hands a Transport to stream protocols
        sock: socket.socket = transport.get_extra_info("socket")
        if self._local:
            pid, uid = credentials.peer(sock)
            self.came_from = f"this host (pid {pid})"
            if uid not in {os.getuid(), 0}:
                self.drop("another user's process")
                return
            self._watch(pid)
        else:
            try:
                self.came_from = str(sock.getpeername()[0])
                credentials.keep_alive(sock)
            except OSError as problem:
                self.drop(f"it was gone before it was met ({problem.strerror})")
                return
        self.coordinator.met(self)

    def data_received(self, data: bytes) -> None:
        """Cut into frames and act on each; anything that is not ours ends the connection, and only it."""
        self.heard_at = time.monotonic()
        try:
            if len(self._greeting) < len(GREETING):
                data = self._greet(data)
            for frame in self._splitter.feed(data):
                if self.closed:
                    return
                self._frame(frame)
        except (FrameError, msgspec.MsgspecError) as error:
            self.drop(f"malformed: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end closed, or the network gave up."""
        if exc is not None and not self.closed:
            self._how = f"its connection broke ({exc})"
        self._gone()

    # The other way -----------------------------------------------------------------------------------------

    def send(self, message: FromCoordinator | Challenge) -> None:
        """Send one message; a connection that is already closed takes nothing."""
        self.send_body(encode(message))

    def send_body(self, body: bytes) -> None:
        """Send an encoded message; nothing after `hang_up`, whatever the other end still says."""
        if self.closed or self._mute or self._transport is None:
            return
        self._transport.write(pack(body))
        if self._transport.get_write_buffer_size() > self.most_unread:
            self.drop("it stopped reading")

    def hang_up(self) -> None:
        """Say nothing more, but listen until the other end closes too."""
        self._mute = True
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self.close()

    def close(self) -> None:
        """Close in good order: what was sent is still delivered."""
        if self._transport is not None:
            self._transport.close()

    def drop(self, how: str) -> None:
        """Close at once, for the reason ``how``."""
        self._how = how
        if self._transport is not None:
            self._transport.abort()
        self._gone()

    def check(self, now: float) -> None:
        """Drop a connection that did not come through its handshake in time."""
        if self.arrival is None and self.left is None and now - self.made_at > HANDSHAKE_S:
            self.drop("no handshake")

    # Inside ------------------------------------------------------------------------------------------------

    def _greet(self, data: bytes) -> bytes:
        want = len(GREETING) - len(self._greeting)
        self._greeting += data[:want]
        if not GREETING.startswith(self._greeting):
            raise FrameError("not an allhands greeting")
        return data[want:]

    def _frame(self, frame: bytes) -> None:
        if self._challenge is None:
            self.opening = decode_hello(frame)
            if self.opening.protocol != handshake.PROTOCOL:
                self._refuse(_other_protocol(self.opening, self.coordinator.roll.party))
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
            self._said(frame)

    def _said(self, frame: bytes) -> None:
        """Act on what a proven member says."""
        message = decode_from_member(frame)
        if self.arrival is not None:
            self.coordinator.heard(self, message)
        elif isinstance(message, Claim):
            self.coordinator.claimed(self, message)
        else:
            self.drop("no claim")

    def _refuse(self, diagnosis: Diagnosis) -> None:
        self.send(Refused(diagnosis))
        self.close()

    def _watch(self, pid: int) -> None:
        """See the death of a local member even while a child of its still holds the connection open."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return  # Another pid namespace, or no such call: the connection's end is what is left.
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        # What the process said last may still be in the socket (its exception, its goodbye): read that first.
        self._unwatch()
        asyncio.get_running_loop().call_later(0.05, self._died_quietly)

    def _died_quietly(self) -> None:
        if not self.closed:
            self.drop("its process ended")

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _gone(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._unwatch()
        tokens = self._disproved or self.opening.has_token or bool(self.coordinator.token)
        if self._challenge is not None and not self._proven and tokens:
            # It failed the proof, or went because ours did not convince it: the tokens differ. Where nobody has one it
            # was convinced, and merely ended or ran out of time.
            self.coordinator.turned_away(self)
        self.coordinator.went(self, self._how)


def _unproven(connection: Connection, *, has_token: bool) -> Diagnosis:
    opening, party = connection.opening, connection.coordinator.roll.party
    if has_token and not opening.has_token:
        why = "the job has a token and this process has none"
    elif opening.has_token and not has_token:
        why = "this process has a token and the coordinator has none"
    else:
        why = "its token is not the job's token"
    return Diagnosis(
        "not-authorised",
        f"the coordinator does not let {party.one(opening.rank)} in",
        who=f"{party.one(opening.rank)} from {connection.came_from}",
        why=why,
        fix=f"give every {party.noun} of the job the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)",
        ranks=(opening.rank,),
    )


def _other_protocol(opening: Hello, party: Party) -> Diagnosis:
    return Diagnosis(
        "version-mismatch",
        f"{party.one(opening.rank)} speaks protocol {opening.protocol}, the coordinator {handshake.PROTOCOL}",
        who=party.one(opening.rank),
        why="different versions of allhands are installed",
        fix="install the same version of allhands everywhere",
        ranks=(opening.rank,),
    )
