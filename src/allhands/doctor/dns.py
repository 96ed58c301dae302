"""Asking name servers directly, with a deadline: the system's own resolver does not say which of them was silent."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Answer", "Resolver", "ask", "listed", "resolver"]

# RFC 1035 and 3596: the types of addresses, the class of the Internet, "recursion desired".
_A, _AAAA, _IN, _RECURSE = 1, 28, 1, 0x0100

# What a server says in the last four bits of its flags.
_CODES = {
    0: "",
    1: "did not understand the question",
    2: "failed",
    3: "",
    4: "cannot answer that",
    5: "refuses to answer",
}
_NO_SUCH_NAME = 3

# A lost packet is sent again after this; servers on a network answer in milliseconds, those behind a slow one in less.
_AGAIN_S = 0.4

# An answer of addresses fits easily; longer ones are cut by the server.
_MOST = 4096

# glibc asks no more servers than these, and few search domains are longer.
_MOST_SERVERS, _MOST_SEARCHED = 3, 6


@dataclass(frozen=True, slots=True)
class Resolver:
    """What /etc/resolv.conf says."""

    servers: tuple[str, ...]
    search: tuple[str, ...]

    def spellings(self, name: str) -> list[str]:
        """Return the names that stand for ``name``: itself, and with the search domains where it has no dot."""
        bare = name.rstrip(".")
        if "." in bare or name.endswith("."):
            return [bare]
        return [*(f"{bare}.{domain}" for domain in self.search[:_MOST_SEARCHED]), bare]


@dataclass(slots=True)
class Answer:
    """What one server said; ``heard`` is False where nothing came at all, ``exists`` True where it knows the name."""

    server: str
    heard: bool = False
    addresses: list[str] = field(default_factory=list)
    trouble: str = ""
    seconds: float = 0.0
    exists: bool = False


def resolver(path: Path) -> Resolver:
    """Read ``path``; without servers in it the system asks this machine itself."""
    servers: list[str] = []
    search: list[str] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            match line.split("#")[0].split(";")[0].split():
                case ["nameserver", server, *_]:
                    servers.append(server)
                case ["search" | "domain", *domains]:
                    search = [domain.strip(".") for domain in domains]
    return Resolver(tuple(servers[:_MOST_SERVERS]) or ("127.0.0.1",), tuple(each for each in search if each))


def listed(path: Path, name: str) -> list[str]:
    """Return the addresses that the hosts file at ``path`` has for ``name``, in its order."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            address, *names = line.split("#")[0].split() or [""]
            if name.lower() in (each.lower() for each in names):
                found.append(address)
    return found


def ask(server: str, names: list[str], seconds: float) -> Answer:
    """Ask ``server`` for the IPv4 and IPv6 addresses of each of ``names``; the first name that has any counts."""
    answer, started = Answer(server), time.monotonic()
    questions = {secrets.randbelow(1 << 16): (name, kind) for name in names for kind in (_A, _AAAA) if _encodable(name)}
    if not questions:
        return Answer(server, heard=True, trouble="the name cannot be asked for")
    found: dict[str, list[str]] = {}
    left = dict(questions)
    try:
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as link:
            link.connect((server, 53))
            link.setblocking(False)
            sent = 0.0
            while left and (now := time.monotonic()) < started + seconds:
                if now - sent >= _AGAIN_S:
                    sent = now
                    for number, (name, kind) in left.items():
                        link.send(_question(number, name, kind))
                readable, _, _ = select.select([link], [], [], min(sent + _AGAIN_S, started + seconds) - now)
                if readable:
                    _take(link.recv(_MOST), left, found, answer)
                    answer.seconds = time.monotonic() - started
    except OSError as problem:
        # An ICMP message: the server's machine is there, or the way to it is not, and it says so.
        answer.trouble = answer.trouble or (problem.strerror or str(problem)).lower()
    answer.exists = answer.exists or any(found.values())
    answer.addresses = next((found[name] for name in names if found.get(name)), [])
    return answer


def _take(packet: bytes, left: dict[int, tuple[str, int]], found: dict[str, list[str]], answer: Answer) -> None:
    """Take one packet for what it says; anything that is no answer to one of our questions is passed over."""
    with contextlib.suppress(struct.error, IndexError, ValueError):
        number, flags, _, records, *_ = struct.unpack_from("!6H", packet)
        if number not in left or not flags & 0x8000:
            return
        name, _ = left.pop(number)
        answer.heard = True
        code = flags & 0xF
        if code not in {0, _NO_SUCH_NAME}:
            answer.trouble = _CODES.get(code, f"answers with code {code}")
            return
        answer.exists = answer.exists or code == 0
        at = _skip(packet, 12) + 4
        for _ in range(records):
            at = _skip(packet, at)
            kind, _, _, size = struct.unpack_from("!HHIH", packet, at)
            at += 10
            if (kind, size) in {(_A, 4), (_AAAA, 16)}:
                found.setdefault(name, []).append(str(ipaddress.ip_address(packet[at : at + size])))
            at += size


def _skip(packet: bytes, at: int) -> int:
    """Return where the name at ``at`` ends."""
    while length := packet[at]:
        if length >= 0xC0:
            return at + 2
        at += 1 + length
    return at + 1


def _encodable(name: str) -> bool:
    parts = name.split(".")
    return name.isascii() and len(name) < 254 and all(0 < len(part) < 64 for part in parts)


def _question(number: int, name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode("ascii") for part in name.split("."))
    return struct.pack("!6H", number, _RECURSE, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, _IN)
