"""The listener's half of the check between two machines: `allhands doctor --listen`."""

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
from .peer_protocol import (
    LARGEST,
    Conversation,
    Knock,
    Knocked,
    Lost,
    Open,
    Opened,
    Pour,
    Rate,
    Ready,
    Tick,
    Tock,
    Told,
    doors,
    knock_at,
    pour,
    swallow,
    welcome,
)
from .port_probe import JOB, LISTENER
from .versions import installed

__all__ = ["Heard", "Listener"]

# A visitor says its greeting at once, and needs some seconds for all checks; more is somebody else.
_GREETING_S, _VISIT_S = 5.0, 60.0

# Visitors at one time: every machine of a rack may come at once, but nobody may fill this one with threads.
_MOST_VISITORS = 64

# A visitor opens eight.
_MOST_PORTS = 64

Heard = Callable[[str, Told | None], None]


class Listener:
    """Waits for visitors at one address, answers each in a thread of its own, and tells ``heard`` what they found."""

    def __init__(self, address: Address, token: bytes, heard: Heard, clock: Callable[[], float] = time.time) -> None:
        self.address = address
        self._token = token
        self._heard = heard
        self._clock = clock
        self._torch = installed().torch
        self._places = threading.BoundedSemaphore(_MOST_VISITORS)
        self._over = threading.Event()
        self._door = self._open()

    def _open(self) -> socket.socket:
        host, port = self.address.host, self.address.port
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            door = socket.socket(family, socket.SOCK_STREAM)
        except OSError as problem:
            raise fail(
                "address-unresolvable",
                f"{host} has no address to listen on",
                who=f"{socket.gethostname()} (allhands doctor --listen)",
                why=problem.strerror or str(problem),
                fix="give an address of this machine, or 0.0.0.0 for all of them",
            ) from problem
        try:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(place)
            door.listen(_MOST_VISITORS)
        except OSError as problem:
            door.close()
            held = port_owner(port)
            raise fail(
                "port-in-use" if held is not None else "address-not-local",
                f"cannot listen on {self.address}: {problem.strerror or problem}",
                who=f"{socket.gethostname()} (allhands doctor --listen)",
                why=f"it is held by {held}" if held is not None else "the system refused the address (observed)",
                fix="end that process, or choose another port"
                if held is not None
                else "give an address of this machine",
            ) from problem
        return door

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._door.getsockname()[1])

    def serve(self, *, once: bool = False) -> None:
        """Answer visitors until `end` is called, or with ``once`` until one has told what it found."""
        self._door.settimeout(0.2)
        while not self._over.is_set():
            try:
                link, _ = self._door.accept()
            except TimeoutError:
                continue
            except OSError:
                break
            if not self._places.acquire(blocking=False):
                link.close()
                continue
            if once:
                if self._visit(link):
                    break
            else:
                threading.Thread(target=self._visit, args=(link,), name="allhands-visitor", daemon=True).start()

    def end(self) -> None:
        """Stop; safe from a signal handler."""
        self._over.set()

    def close(self) -> None:
        """Free the port."""
        self._door.close()

    # One visitor -------------------------------------------------------------------------------------------

    def _visit(self, link: socket.socket) -> bool:
        """Answer one visitor; tell whether it said what it found."""
        whom = "?"
        try:
            with link, contextlib.suppress(OSError, FrameError, msgspec.MsgspecError):
                whom = str(link.getpeername()[0])
                link.settimeout(_GREETING_S)
                splitter, rest = self._greet(link)
                if splitter is None:
                    return False
                talk = Conversation(link, splitter, rest)
                try:
                    told = self._answer(talk)
                except Lost:
                    told = None
                self._heard(whom, told)
                return told is not None
        finally:
            self._places.release()
        return False

    def _greet(self, link: socket.socket) -> tuple[Splitter | None, list[bytes]]:
        """Do the coordinator's half of the greeting; None for whoever is not a doctor, or has not our token."""
        deadline = time.monotonic() + _GREETING_S
        begin = b""
        while len(begin) < len(GREETING):
            more = link.recv(len(GREETING) - len(begin))
            begin += more
            if not more or not GREETING.startswith(begin):
                return None, []
        splitter = Splitter(MOST_BEFORE_PROOF)
        frames = receive(link, splitter, deadline) or []
        if not frames:
            return None, []
        opening = decode_hello(frames.pop(0))
        if opening.job != JOB:
            send(link, pack(encode(Refused(_not_a_coordinator(self.address)))), deadline)
            return None, []
        made = handshake.challenge(opening, self._token)
        challenge = Challenge(LISTENER, made.nonce, made.proof, made.has_token)
        send(link, pack(encode(challenge)), deadline)
        while not frames:
            more_frames = receive(link, splitter, deadline)
            if not more_frames:
                return None, []
            frames += more_frames
        if not handshake.verify_member(opening, made, decode_proof(frames.pop(0)).proof, self._token):
            return None, []
        splitter.most = MOST_BYTES
        return splitter, frames

    def _answer(self, talk: Conversation) -> Told | None:
        """Answer until the visitor tells what it found."""
        deadline = time.monotonic() + _VISIT_S
        talk.say(welcome(talk, __version__, self._torch))
        with contextlib.ExitStack() as until_over:
            while time.monotonic() < deadline:
                match talk.hear(10.0):
                    case Tick():
                        talk.say(Tock(self._clock()))
                    case Open():
                        ports = until_over.enter_context(doors(talk.own))
                        talk.say(Opened(talk.own, ports))
                    case Knock(address, ports):
                        # Only ever the one that asks: nobody is made to knock at a third one's door.
                        own = address == talk.peer
                        outcomes = knock_at(address, ports[:_MOST_PORTS]) if own else {}
                        talk.say(Knocked(outcomes))
                    case Pour(back=False, size=size):
                        talk.say(Ready())
                        swallow(talk, size)
                    case Pour(back=True, size=size):
                        talk.say(Rate(pour(talk, min(size, LARGEST))))
                    case Told() as told:
                        return told
                    case other:
                        raise Lost(silent=False, why=f"it said {type(other).__name__}")
        return None


def _not_a_coordinator(address: Address) -> Diagnosis:
    return Diagnosis(
        "wrong-service",
        f"what listens on {address} is not an allhands coordinator",
        who=f"the service at {address}",
        why="`allhands doctor --listen` runs there (it says so itself)",
        fix="end it before the job starts",
        ranks=(0,),
    )
