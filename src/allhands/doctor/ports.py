"""The coordinator's port: whether it can be reached, which service listens there, and which process holds it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from .. import settings
from ..control import handshake, messages
from ..control.connect import Attempts, diagnose
from ..control.process_identity import port_owner
from ..diagnosis import duration, join
from ..environments.world import Address
from ..errors import AllhandsError, error, fail
from ..settings import Settings
from .finding import Finding, Section
from .peer import JOB, LISTENER, PeerConnection, check_peer, connect_all
from .request import Request

__all__ = ["check"]

_NETWORK = Section("network")

# A coordinator answers in milliseconds; one that serves thousands of ranks on a busy machine within this.
_ANSWER_S = 1.5

# torch's TCPStore (torch/csrc/distributed/c10d/TCPStoreBackend.hpp in 2.13): a client first sends the query "validate"
# with this number; then it may send "ping" with a number that is sent back. Other clients get no answer.
_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13

_STORE = "torch's TCPStore"

_BANNERS = ((b"SSH-", "an SSH server"), (b"220 ", "a mail or FTP server"), (b"* OK", "a mail server"))

_OTHER_PORT = "choose another port (MASTER_PORT, tcp://HOST:PORT, --coordinator)"


def check(request: Request) -> Iterator[Finding]:
    """Check the coordinator's port, and if a doctor listens there, the way to it and back."""
    target, places = request.target, request.places
    if target is None or not places:
        return
    results = connect_all([(host, target.port) for _, host in places])
    errors = {host: result for (host, _), result in results.items() if isinstance(result, OSError)}
    seconds = {host: result for (host, _), result in results.items() if isinstance(result, float)}
    if not seconds:
        yield _unreachable(request, target, errors)
        return
    host = next(host for _, host in places if host in seconds)
    service = _identify((host, target.port), target.host, settings.read(request.env))
    yield _reachable(request, target, host, seconds[host], service)
    # A service that listens on one kind of address only refuses connections to the other.
    dead = {each: problem for each, problem in errors.items() if problem.errno != errno.ECONNREFUSED}
    if dead and not request.target_is_here:
        reasons = join([f"{each}: {problem.strerror}" for each, problem in dead.items()])
        yield _NETWORK.yellow(
            "families",
            "no-route",
            f"{target.host} has an address that cannot be reached: {join(list(dead))}",
            why=f"{reasons}; {host} answers. A client that tries the other address first waits in vain",
            fix=f"give ranks the address that works: MASTER_ADDR={host}",
            commands=(f"export MASTER_ADDR={host}",),
        )
    if service.connection is not None:
        with service.connection.link:
            yield from check_peer(service.connection)


def _unreachable(request: Request, target: Address, errors: dict[str, OSError]) -> Finding:
    """Return the diagnosis that a rank would report."""
    refused = any(problem.errno == errno.ECONNREFUSED for problem in errors.values())
    only_loopback = all(host == "::1" or host.startswith("127.") for host in errors)
    if refused and request.target_is_here and not (request.nodes and only_loopback):
        return _NETWORK.green("port", f"port {target.port} is free here: rank 0 can listen on it")
    attempts = Attempts(target)
    attempts.outcomes, attempts.tries = errors, 1
    who = f"{socket.gethostname()} (allhands doctor)"
    diagnosis = diagnose(attempts, who=who, several_hosts=bool(request.nodes)).diagnosis
    commands = {
        "connection-refused": (f"allhands doctor --listen {target}   # on {target.host}, then again here",),
        "no-route": (f"ip route get {next(iter(errors))}",),
        "connection-filtered": (f"nft list ruleset   # on {target.host}, as root",),
    }.get(diagnosis.slug, ())
    # Before a job starts nothing listens; that is no fault if the address is only from the environment.
    expected = diagnosis.slug == "connection-refused" and not request.target_given
    return _NETWORK.of("port", "yellow" if expected else "red", diagnosis, commands=commands)


def _reachable(request: Request, target: Address, host: str, seconds: float, service: _Service) -> Finding:
    took = duration(round(seconds, 3)) if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
    connected = f"{host} accepted the connection after {took}"
    held = port_owner(target.port) if request.target_is_here else None
    by = f"; held by {held}" if held is not None else ""
    if service.problem is not None:
        return _NETWORK.of("port", "red", service.problem.diagnosis)
    expected = {"coordinator": "a coordinator of allhands", "doctor": "a doctor"}
    if request.world is not None and request.world.agent_store:
        expected[_STORE] = "torchrun's store"
    if service.kind in expected:
        return _NETWORK.green("port", f"{expected[service.kind]} listens on {target}", f"{connected}{by}")
    why = f"{connected}; {service.evidence}{by}"
    listing = f"ss -ltnp 'sport = :{target.port}'   # on {target.host}"
    if service.kind == _STORE:
        return _NETWORK.yellow(
            "port",
            "wrong-service",
            f"{_STORE} listens on {target}: a job of torch's own has this address",
            why=f"{why}. This address is right for ranks of that job, and wrong for ranks of allhands",
            fix=f"for a job of allhands {_OTHER_PORT}",
            commands=(listing,),
        )
    end = (f"kill {held.pid}",) if held is not None and held.pid and held.pid != os.getpid() else ()
    if service.kind == "silent":
        return _NETWORK.yellow(
            "port",
            "wrong-service",
            f"the service on {target} sends nothing",
            why=f"{why}. Probably another service, or a process that is stopped",
            fix=f"identify it; if it is not yours {_OTHER_PORT}",
            commands=(listing, *end),
            certain=False,
        )
    return _NETWORK.red(
        "port",
        "port-in-use" if held is not None else "wrong-service",
        f"{service.kind} listens on {target}, not a coordinator of allhands",
        why=why,
        fix=_OTHER_PORT + (", or end that process" if end else ""),
        commands=(listing, *end),
    )


@dataclass(slots=True)
class _Service:
    """A service on a port: ``kind`` is coordinator, doctor, silent, or the name of another service.

    ``connection`` is open if it is a doctor that accepts this one; the caller closes it.
    """

    kind: str
    evidence: str = ""
    problem: AllhandsError | None = None
    connection: PeerConnection | None = None


def _identify(place: tuple[str, int], name: str, settings: Settings) -> _Service:
    """Identify the service at ``place`` (called ``name``), which accepts connections, within a few seconds."""
    token = settings.secret()
    for authority in dict.fromkeys((settings.tls_ca, "")):
        found = _handshake(place, name, authority, token)
        if found.kind != "unknown":
            return found
    # It is not ours: identify it by a few harmless requests. SSH, mail and databases send first, and at once.
    banner = _exchange(place, b"", 0.25)
    for text, kind in _BANNERS:
        if banner.startswith(text):
            return _Service(kind, _shown(banner))
    number = struct.pack("<I", int(time.monotonic() * 1000) & 0xFFFFFFFF)
    ping = struct.pack("<BIB", _VALIDATE, _MAGIC, _PING) + number
    if _exchange(place, ping, _ANSWER_S / 2, most=4) == number:
        return _Service(_STORE, "it answers torch's ping")
    page = _exchange(place, b"HEAD / HTTP/1.0\r\n\r\n", _ANSWER_S / 2)
    if page.startswith(b"HTTP/"):
        server = re.search(
            r"^server:[ \t]*([\x20-\x7e]{1,40})", page.decode("latin-1"), flags=re.IGNORECASE | re.MULTILINE
        )
        return _Service("a web server" + (f" ({server[1].strip()})" if server else ""), _shown(page))
    evidence = _shown(banner or page) or found.evidence
    return _Service("another service" if evidence else "silent", evidence or "it accepts connections and sends nothing")


def _handshake(place: tuple[str, int], name: str, authority: str, token: bytes) -> _Service:
    """Do a doctor's handshake; the kind is "unknown" if the service is neither a coordinator nor a doctor."""
    deadline = time.monotonic() + _ANSWER_S
    opening = handshake.hello(job=JOB, attempt=0, rank=-1, world_size=0, token=token)
    splitter, frames = messages.Splitter(), [b""]
    with contextlib.ExitStack() as sockets:
        try:
            link = sockets.enter_context(socket.create_connection(place, _ANSWER_S))
            if authority:
                link = sockets.enter_context(handshake.wrap_tls(link, authority, name, deadline))
            handshake.send(link, messages.GREETING + messages.pack(messages.encode(opening)), deadline)
            frames = handshake.receive(link, splitter, deadline) or [splitter.held]
            answer = messages.decode_challenge(frames[0])
            if isinstance(answer, messages.Closing):
                return _Service("coordinator", "a coordinator that is just ending")
            if isinstance(answer, messages.Refused):
                return _Service("coordinator", problem=error(answer.diagnosis))
            kind = "doctor" if answer.protocol == LISTENER else "coordinator"
            if not handshake.verify_coordinator(opening, answer, token):
                return _Service(kind, problem=_other_token(kind, token, theirs=answer.has_token))
            # Without this proof a coordinator would count this process as a rank without a token.
            proof = messages.Proof(handshake.member_proof(opening, answer, token))
            with contextlib.suppress(OSError):
                handshake.send(link, messages.pack(messages.encode(proof)), deadline)
            if kind == "coordinator":
                return _Service(kind)
            connection = PeerConnection(link, splitter, frames[1:])
            sockets.pop_all()
            return _Service(kind, connection=connection)
        except messages.FrameError:
            evidence = _shown(splitter.held)
        except msgspec.MsgspecError:
            evidence = _shown(frames[0])
        except AllhandsError as problem:
            evidence = problem.diagnosis.why
        except OSError as problem:
            evidence = f"it broke the connection ({problem.strerror or problem})"
    return _Service("unknown", evidence)


def _other_token(kind: str, token: bytes, *, theirs: bool) -> AllhandsError:
    ours = "has one too, but not the same" if token and theirs else "has one" if token else "has none"
    return fail(
        "not-authorised",
        f"the {kind} there {'has a token' if theirs else 'has no token'}, this process {ours}",
        who="this process and the one that listens",
        why="their proofs do not match (observed)",
        fix="give every machine the same ALLHANDS_TOKEN (or ALLHANDS_TOKEN_FILE)",
    )


def _exchange(place: tuple[str, int], data: bytes, timeout_s: float, most: int = 512) -> bytes:
    """Send ``data`` and return the answer, b"" if there is none."""
    with contextlib.suppress(OSError), socket.create_connection(place, timeout_s) as link:
        link.sendall(data)
        return link.recv(most)
    return b""


def _shown(data: bytes) -> str:
    # As a literal: control characters are escaped.
    return f"it sent {data[:60]!r}" if data else ""
