"""A member's half of the handshake, and how it tells an allhands coordinator from anything else on that port."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress

import msgspec

from ..diagnosis import Diagnosis, duration
from ..errors import AllhandsError, error, fail
from . import handshake
from .frames import GREETING, MOST_BYTES, FrameError, Splitter, pack
from .messages import Challenge, Closing, Hello, Proof, Refused, decode_challenge, encode
from .wording import RANKS, Party

__all__ = ["greet", "receive", "secure", "send"]

# A coordinator answers at once; one that serves thousands of members may take seconds. A service that
# keeps quiet this long is not one.
_SILENCE_S = 10.0

# asyncio's TLS hangs up on plain text without the alert that would give it away.
_TLS = ", as a coordinator with TLS does where ALLHANDS_TLS_CA is not set on the member"

# What to do where one side may have TLS and the other has not.
_WITH_TLS = "if the coordinator has TLS (ALLHANDS_TLS_CERT on rank 0), set ALLHANDS_TLS_CA on this rank; else "
_WITHOUT_TLS = (
    "if the coordinator has no TLS, unset ALLHANDS_TLS_CA on this rank or set ALLHANDS_TLS_CERT on rank 0; else "
)

# How much of a stranger's answer is shown as evidence.
_MOST_SHOWN = 60


def secure(sock: socket.socket, authority: str, host: str, deadline: float) -> socket.socket:
    """Wrap ``sock`` in TLS and check the coordinator's certificate against ``authority`` (a PEM file)."""
    context = ssl.create_default_context(cafile=authority or None)
    sock.settimeout(max(0.1, min(_SILENCE_S, deadline - time.monotonic())))
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as problem:
        raise fail(
            "not-authorised",
            f"the coordinator's certificate is not accepted: {problem.verify_message}",
            who=f"the coordinator at {host}",
            why="its certificate does not lead to ALLHANDS_TLS_CA, or names another host",
            fix="set ALLHANDS_TLS_CA on this rank to the certificate authority that signed the coordinator's "
            f"ALLHANDS_TLS_CERT; that certificate has to name {host}",
        ) from problem
    except (OSError, ssl.SSLError) as problem:
        raise _wrong(
            host, f"the TLS handshake failed ({problem})", certain=isinstance(problem, ssl.SSLError), first=_WITHOUT_TLS
        ) from problem


def send(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Send all of ``data`` by ``deadline``; OSError otherwise."""
    sock.settimeout(max(0.01, deadline - time.monotonic()))
    sock.sendall(data)


def receive(sock: socket.socket, splitter: Splitter, deadline: float) -> list[bytes] | None:
    """Return the next frames, None at ``deadline``, [] where the other end closed."""
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


def greet(
    sock: socket.socket, opening: Hello, token: bytes, place: str, deadline: float, *, party: Party = RANKS
) -> tuple[Splitter, list[bytes]]:
    """Prove ourselves to the coordinator at ``place`` and have it prove itself.

    Returns the splitter of the stream and frames that came after the challenge. Raises wrong-service,
    not-authorised, or what the coordinator refused with.
    """
    splitter = Splitter(MOST_BYTES)
    started = time.monotonic()
    try:
        send(sock, GREETING + pack(encode(opening)), deadline)
        frames = receive(sock, splitter, min(deadline, started + _SILENCE_S))
    except FrameError as problem:
        raise _wrong(place, _said(splitter.held)) from problem
    except OSError as problem:
        said = f"it broke the connection ({problem.strerror or problem}) on our greeting{_TLS}"
        raise _wrong(place, said, first=_WITH_TLS) from problem
    if frames is None:
        quiet = duration(time.monotonic() - started)
        if time.monotonic() - started < _SILENCE_S:
            raise fail(
                "coordinator-silent",
                f"what listens on {place} did not answer before the deadline",
                who=f"{party.one(opening.rank)} greeted the service at {place}",
                why=f"{quiet} were left to wait, which is too short to tell a slow coordinator from another service",
                fix=f"choose another port ({party.port_from}) if something else listens there: `ss -ltnp` on that "
                f"host shows who; or raise {party.timeout}",
                ranks=(0,),
                certain=False,
            )
        raise _wrong(place, f"it accepted the connection and said nothing for {quiet}", certain=False)
    if not frames:
        if not splitter.held:
            raise _wrong(place, f"it closed the connection on our greeting{_TLS}", first=_WITH_TLS)
        raise _wrong(place, _said(splitter.held))
    try:
        answer = decode_challenge(frames[0])
    except msgspec.MsgspecError as problem:
        raise _wrong(place, _said(frames[0])) from problem
    if isinstance(answer, Refused):
        raise error(answer.diagnosis)
    if isinstance(answer, Closing):
        raise _wrong(place, "it is a coordinator that is just ending", certain=False)
    _verify(opening, answer, token, place, party)
    with suppress(OSError):  # It has closed; what it said before that is still to be read.
        send(sock, pack(encode(Proof(handshake.member_proof(opening, answer, token)))), deadline)
    return splitter, frames[1:]


def _verify(opening: Hello, answer: Challenge, token: bytes, place: str, party: Party) -> None:
    if handshake.verify_coordinator(opening, answer, token):
        return
    if answer.has_token and not token:
        why = "the job has a token and this process has none"
    elif token and not answer.has_token:
        why = "this process has a token and the coordinator has none, so it cannot prove that it is ours"
    else:
        why = "its proof does not fit this process's token"
    raise error(
        Diagnosis(
            "not-authorised",
            f"the coordinator at {place} and {party.one(opening.rank)} do not share a token",
            who=party.one(opening.rank),
            why=why,
            fix=f"give every {party.noun} of the job the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)",
            ranks=(opening.rank,),
        )
    )


def _said(data: bytes) -> str:
    if data[:1] == b"\x15":
        return "it speaks TLS (set ALLHANDS_TLS_CA on this rank)"
    # The evidence is quoted, never interpreted.
    return f"it answered {data[:_MOST_SHOWN]!r}"


def _wrong(place: str, observed: str, *, certain: bool = True, first: str = "") -> AllhandsError:
    return error(
        Diagnosis(
            "wrong-service",
            f"what listens on {place} is not an allhands coordinator",
            who=f"the service at {place}",
            why=observed if certain else f"probably: {observed}",
            fix=f"{first}choose another port (MASTER_PORT, tcp://HOST:PORT, --coordinator); on that host `ss "
            "-ltnp` shows who listens there",
            ranks=(0,),
            certain=certain,
        )
    )
