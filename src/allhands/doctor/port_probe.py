"""What listens on a port, found out by what it says: a coordinator, a doctor, or another service and which."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from dataclasses import dataclass

import msgspec

from ..control import handshake
from ..control.handshake import receive, send, wrap_tls
from ..control.messages import (
    GREETING,
    MOST_BYTES,
    Challenge,
    Closing,
    FrameError,
    Hello,
    Proof,
    Refused,
    Splitter,
    decode_challenge,
    encode,
    pack,
)
from ..errors import AllhandsError
from ..settings import Settings

__all__ = ["JOB", "LISTENER", "STORE", "Service", "identify"]

# How a doctor's greeting differs from a rank's: in the job's name; and how a doctor that listens differs from a
# coordinator: in the protocol of its challenge. Neither is ever a job's or a coordinator's.
JOB, LISTENER = "allhands doctor", -1

# A coordinator answers in milliseconds; one that serves thousands of ranks on a busy machine in less than this.
_ANSWER_S = 1.5

# Services that speak first (SSH, mail, databases) do so at once.
_BANNER_S = 0.25

# torch's TCPStore (torch/csrc/distributed/c10d/TCPStoreBackend.hpp, seen in 2.13): a client first sends the query
# "validate" with this number, then may "ping" with a number that comes back. Anyone else is sent nothing.
_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13

STORE = "torch's TCPStore"

# As much of a stranger's words as is shown.
_MOST_SHOWN = 60


@dataclass(slots=True)
class Service:
    """Who listens: ``kind`` is coordinator, doctor, silent, or the name of another service; ``said`` the evidence.

    ``link`` is the open connection to a doctor, after its greeting; whoever gets it closes it.
    """

    kind: str
    said: str = ""
    trouble: AllhandsError | None = None
    link: socket.socket | None = None
    splitter: Splitter | None = None
    rest: list[bytes] | None = None


def identify(family: int, place: tuple[str, int], name: str, settings: Settings) -> Service:
    """Find out what listens at ``place`` (called ``name``), in a few seconds at most. It lets us in, that is known."""
    try:
        token = settings.secret()
    except AllhandsError as problem:
        return Service("unknown", trouble=problem)
    found = None
    if settings.tls_ca:
        found = _ours(family, place, name, settings.tls_ca, token)
    if found is None or found.kind == "unknown":
        found = _ours(family, place, name, "", token)
    if found.kind != "unknown":
        return found
    return _stranger(family, place, found.said)


def _ours(family: int, place: tuple[str, int], name: str, authority: str, token: bytes) -> Service:
    """Greet it as a doctor greets; "unknown" where what answers is neither coordinator nor doctor."""
    deadline = time.monotonic() + _ANSWER_S
    link = socket.socket(family, socket.SOCK_STREAM)
    kept = False
    try:
        link.settimeout(_ANSWER_S)
        link.connect(place)
        if authority:
            link = wrap_tls(link, authority, name, deadline)
        opening = handshake.hello(job=JOB, attempt=0, rank=-1, world_size=0, token=token)
        send(link, GREETING + pack(encode(opening)), deadline)
        splitter = Splitter(MOST_BYTES)
        frames = receive(link, splitter, deadline)
        if not frames:
            said = splitter.held
            return Service("unknown", _shown(said) if said else "")
        answer = decode_challenge(frames[0])
        found = _answered(link, opening, answer, token, deadline)
        if found.kind == "doctor" and found.trouble is None:
            kept, found.link, found.splitter, found.rest = True, link, splitter, frames[1:]
    except FrameError:
        return Service("unknown", _shown(splitter.held))
    except msgspec.MsgspecError:
        return Service("unknown", _shown(frames[0] if frames else b""))
    except AllhandsError as problem:
        return Service("unknown", problem.diagnosis.why)
    except OSError as problem:
        return Service("unknown", f"it broke the connection ({problem.strerror or problem})")
    else:
        return found
    finally:
        if not kept:
            link.close()


def _answered(
    link: socket.socket, opening: Hello, answer: Challenge | Refused | Closing, token: bytes, deadline: float
) -> Service:
    if isinstance(answer, Closing):
        return Service("coordinator", "a coordinator that is just ending")
    if isinstance(answer, Refused):
        return Service("coordinator", trouble=_error(answer))
    kind = "doctor" if answer.protocol == LISTENER else "coordinator"
    if not handshake.verify_coordinator(opening, answer, token):
        from ..errors import fail

        have = "has a token" if answer.has_token else "has no token"
        ours = "has one too, but not the same" if token and answer.has_token else "has one" if token else "has none"
        return Service(
            kind,
            trouble=fail(
                "not-authorised",
                f"the {kind} there {have}, this process {ours}",
                who="this process and the one that listens",
                why="their proofs do not fit (observed)",
                fix="give every machine the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)",
            ),
        )
    # Whoever goes without its proof is remembered by a coordinator as one that had no token.
    with contextlib.suppress(OSError):
        send(link, pack(encode(Proof(handshake.member_proof(opening, answer, token)))), deadline)
    return Service(kind)


def _error(answer: Refused) -> AllhandsError:
    from ..errors import error

    return error(answer.diagnosis)


# Others -------------------------------------------------------------------------------------------------------


def _stranger(family: int, place: tuple[str, int], said: str) -> Service:
    """Name a service that is not ours, as far as a few harmless words tell."""
    banner = _talk(family, place, b"", _BANNER_S)
    for text, kind in ((b"SSH-", "an SSH server"), (b"220 ", "a mail or FTP server"), (b"* OK", "a mail server")):
        if banner.startswith(text):
            return Service(kind, _shown(banner))
    number = struct.pack("<I", int(time.monotonic() * 1000) & 0xFFFFFFFF)
    pinged = struct.pack("<BIB", _VALIDATE, _MAGIC, _PING) + number
    if _talk(family, place, pinged, _ANSWER_S / 2, most=4) == number:
        return Service(STORE, "it answers torch's ping")
    page = _talk(family, place, b"HEAD / HTTP/1.0\r\n\r\n", _ANSWER_S / 2)
    if page.startswith(b"HTTP/"):
        server = next(
            (line[7:].strip() for line in page.decode("latin-1").splitlines() if line.lower().startswith("server:")), ""
        )
        return Service("a web server" + (f" ({server[:40]})" if server else ""), _shown(page))
    heard = banner or page
    if heard or said:
        return Service("another service", _shown(heard) if heard else said)
    return Service("silent", "it lets everyone in and says nothing")


def _talk(family: int, place: tuple[str, int], words: bytes, seconds: float, most: int = 512) -> bytes:
    """Return what comes back for ``words``; b"" for nothing."""
    with socket.socket(family, socket.SOCK_STREAM) as link, contextlib.suppress(OSError):
        link.settimeout(seconds)
        link.connect(place)
        if words:
            link.sendall(words)
        return link.recv(most)
    return b""


def _shown(data: bytes) -> str:
    # Quoted, never interpreted.
    return f"it said {data[:_MOST_SHOWN]!r}" if data else ""
