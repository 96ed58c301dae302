"""Mutual authentication: each side proves that it holds the job's token, over both nonces and the Hello.

A fresh nonce from each side prevents replay, a label in each proof prevents reflection. Without a token the key is
empty: the exchange then only checks that both sides run this protocol.

The member's side is here (`authenticate`); the coordinator's is in `connection`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time
from contextlib import suppress

import msgspec

from ..diagnosis import Diagnosis, duration
from ..errors import AllhandsError, error, fail
from . import messages
from .messages import GREETING, MOST_BYTES, FrameError, Splitter, decode_challenge, encode, pack
from .wording import RANKS, Wording

__all__ = [
    "PROTOCOL",
    "authenticate",
    "challenge",
    "different_tokens",
    "hello",
    "member_proof",
    "receive",
    "send",
    "verify_coordinator",
    "verify_member",
    "wrap_tls",
]

# Incremented whenever the meaning of a message changes. Sides with different versions refuse each other.
PROTOCOL = 1

_NONCE_BYTES = 32

# A coordinator answers at once, or within seconds if it serves thousands of members. A service that sends nothing for
# this long is not a coordinator.
_SILENCE_S = 10.0

# asyncio's TLS server closes the connection on plain text without sending an alert that would identify it.
_TLS = ", as a coordinator with TLS does where ALLHANDS_TLS_CA is not set on the member"

# First advice where only one of the two sides may use TLS.
_WITH_TLS = "if the coordinator has TLS (ALLHANDS_TLS_CERT on rank 0), set ALLHANDS_TLS_CA on this rank; else "
_WITHOUT_TLS = (
    "if the coordinator has no TLS, unset ALLHANDS_TLS_CA on this rank or set ALLHANDS_TLS_CERT on rank 0; else "
)

# Bytes of another service's answer that a message quotes.
_MOST_SHOWN = 60


# Proofs ----------------------------------------------------------------------------------------------------------


def hello(*, job: str, attempt: int, rank: int, world_size: int, token: bytes) -> messages.Hello:
    """Return a member's first message, with a fresh nonce."""
    return messages.Hello(PROTOCOL, job, attempt, rank, world_size, secrets.token_bytes(_NONCE_BYTES), bool(token))


def challenge(opening: messages.Hello, token: bytes) -> messages.Challenge:
    """Return the coordinator's answer to ``opening``: its proof and a fresh nonce."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return messages.Challenge(PROTOCOL, nonce, _proof(b"coordinator", opening, nonce, token), bool(token))


def member_proof(opening: messages.Hello, answer: messages.Challenge, token: bytes) -> bytes:
    """Return the member's proof for ``answer``."""
    return _proof(b"member", opening, answer.nonce, token)


def verify_coordinator(opening: messages.Hello, answer: messages.Challenge, token: bytes) -> bool:
    """Return whether the coordinator that sent ``answer`` holds the token."""
    return hmac.compare_digest(answer.proof, _proof(b"coordinator", opening, answer.nonce, token))


def verify_member(opening: messages.Hello, answer: messages.Challenge, proof: bytes, token: bytes) -> bool:
    """Return whether the member that sent ``opening`` and ``proof`` holds the token."""
    return hmac.compare_digest(proof, _proof(b"member", opening, answer.nonce, token))


def _proof(label: bytes, opening: messages.Hello, nonce: bytes, token: bytes) -> bytes:
    # msgpack is prefix-free: different openings never encode to the same bytes.
    transcript = msgspec.msgpack.encode((label, opening, nonce))
    return hmac.new(token, transcript, hashlib.sha256).digest()


# The member's side -----------------------------------------------------------------------------------------------


def wrap_tls(sock: socket.socket, authority: str, host: str, deadline: float) -> socket.socket:
    """Return ``sock`` wrapped in TLS; the coordinator's certificate must lead to ``authority`` (a PEM file)."""
    context = ssl.create_default_context(cafile=authority or None)
    sock.settimeout(max(0.1, min(_SILENCE_S, deadline - time.monotonic())))
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as problem:
        raise fail(
            "not-authorised",
            f"the coordinator's certificate is not accepted: {problem.verify_message}",
            who=f"the coordinator at {host}",
            why="its certificate is not signed by ALLHANDS_TLS_CA, or names another host",
            fix="set ALLHANDS_TLS_CA on this rank to the certificate authority that signed the coordinator's "
            f"ALLHANDS_TLS_CERT; that certificate has to name {host}",
        ) from problem
    except (OSError, ssl.SSLError) as problem:
        raise _wrong_service(
            host, f"the TLS handshake failed ({problem})", certain=isinstance(problem, ssl.SSLError), first=_WITHOUT_TLS
        ) from problem


def send(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Send all of ``data`` by ``deadline``; raises OSError otherwise."""
    sock.settimeout(max(0.01, deadline - time.monotonic()))
    sock.sendall(data)


def receive(sock: socket.socket, splitter: Splitter, deadline: float) -> list[bytes] | None:
    """Return the next frames, None at ``deadline``, [] if the other end closed."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        sock.settimeout(left)
        try:
            data = sock.recv(65536)
        except TimeoutError:
            return None
        if not data:
            return []
        frames = splitter.feed(data)
        if frames:
            return frames


def authenticate(
    sock: socket.socket, opening: messages.Hello, token: bytes, place: str, deadline: float, *, wording: Wording = RANKS
) -> tuple[Splitter, list[bytes]]:
    """Authenticate this member and the coordinator at ``place`` to each other.

    Returns the stream's splitter and the frames that followed the challenge. Raises wrong-service, not-authorised,
    coordinator-silent, or the diagnosis with which the coordinator refused.
    """
    splitter = Splitter(MOST_BYTES)
    started = time.monotonic()
    try:
        send(sock, GREETING + pack(encode(opening)), deadline)
        frames = receive(sock, splitter, min(deadline, started + _SILENCE_S))
    except FrameError as problem:
        raise _wrong_service(place, _quote(splitter.held)) from problem
    except OSError as problem:
        observed = f"it reset the connection ({problem.strerror or problem}) after our greeting{_TLS}"
        raise _wrong_service(place, observed, first=_WITH_TLS) from problem
    if frames is None:
        waited_s = time.monotonic() - started
        if waited_s < _SILENCE_S:
            raise fail(
                "coordinator-silent",
                f"the service on {place} did not answer before the deadline",
                who=f"{wording.one(opening.rank)} connected to {place}",
                why=f"only {duration(waited_s)} were left to wait, too short to distinguish a slow coordinator from "
                "another service",
                fix=f"choose another port ({wording.port_from}) if another service listens there (`ss -ltnp` on that "
                f"host shows it); or raise {wording.timeout}",
                ranks=(0,),
                certain=False,
            )
        raise _wrong_service(
            place, f"it accepted the connection and sent nothing for {duration(waited_s)}", certain=False
        )
    if not frames:
        if not splitter.held:
            raise _wrong_service(place, f"it closed the connection after our greeting{_TLS}", first=_WITH_TLS)
        raise _wrong_service(place, _quote(splitter.held))
    try:
        answer = decode_challenge(frames[0])
    except msgspec.MsgspecError as problem:
        raise _wrong_service(place, _quote(frames[0])) from problem
    if isinstance(answer, messages.Refused):
        raise error(answer.diagnosis)
    if isinstance(answer, messages.Closing):
        raise _wrong_service(place, "it is a coordinator that is shutting down", certain=False)
    if not verify_coordinator(opening, answer, token):
        one = wording.one(opening.rank)
        what = f"the coordinator at {place} and {one} do not share a token"
        raise error(different_tokens(opening, what, who=one, job_has_token=answer.has_token, wording=wording))
    with suppress(OSError):  # It closed; the reason may still be unread in the socket.
        send(sock, pack(encode(messages.Proof(member_proof(opening, answer, token)))), deadline)
    return splitter, frames[1:]


def different_tokens(
    opening: messages.Hello, what: str, *, who: str, job_has_token: bool, wording: Wording
) -> Diagnosis:
    """Return the diagnosis of a member whose token, or lack of one, is not the job's."""
    if job_has_token and not opening.has_token:
        why = "the job has a token and this process has none"
    elif opening.has_token and not job_has_token:
        why = "this process has a token and the coordinator has none"
    else:
        why = "its proof was made with another token"
    fix = f"give every {wording.noun} of the job the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)"
    return Diagnosis("not-authorised", what, who=who, why=why, fix=fix, ranks=(opening.rank,))


def _quote(data: bytes) -> str:
    if data[:1] == b"\x15":  # a TLS alert
        return "it uses TLS (set ALLHANDS_TLS_CA on this rank)"
    return f"it answered {data[:_MOST_SHOWN]!r}"


def _wrong_service(place: str, observed: str, *, certain: bool = True, first: str = "") -> AllhandsError:
    return error(
        Diagnosis(
            "wrong-service",
            f"the service on {place} is not an allhands coordinator",
            who=f"the service at {place}",
            why=observed if certain else f"probably: {observed}",
            fix=f"{first}choose another port (MASTER_PORT, tcp://HOST:PORT, --coordinator); on that host `ss "
            "-ltnp` shows the process that listens there",
            ranks=(0,),
            certain=certain,
        )
    )
