"""Name resolution: this machine's own name, the coordinator's, and the name servers.

Name servers are queried directly, with a deadline, because the system's resolver does not report which was silent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..control.bind import is_loopback
from ..diagnosis import duration, join
from ..environments.world import Address
from .concurrent import run_concurrently
from .finding import Finding, Section
from .request import Request, look_up

__all__ = ["Answer", "check", "hosts_file_entries", "query", "read_resolver"]

_NAMES = Section("names")
_HOSTS, _RESOLVER = Path("/etc/hosts"), Path("/etc/resolv.conf")

# RFC 1035 and 3596: types of records, the class of the Internet, "recursion desired".
_A, _AAAA, _IN, _RECURSE = 1, 28, 1, 0x0100

# Response codes, the last four bits of the flags.
_NO_SUCH_NAME = 3
_CODES = {1: "did not understand the question", 2: "failed", 4: "cannot answer that", 5: "refuses to answer"}

# A name server that does not answer within this counts as silent. Queries are repeated, so one lost packet is harmless.
_SERVER_S = 1.5


@dataclass(slots=True)
class Answer:
    """The answer of one server. ``answered`` is whether any packet arrived, ``exists`` whether it knows the name."""

    server: str
    answered: bool = False
    addresses: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    exists: bool = False


def _words(path: Path) -> Iterator[list[str]]:
    """Yield the words of each line of ``path``, without comments; none if it cannot be read."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            yield re.split("[#;]", line)[0].split()


def read_resolver(path: Path, name: str) -> tuple[list[str], list[str]]:
    """Return the name servers in ``path``, this machine without any, and the names to query for ``name``."""
    servers: list[str] = []
    search: list[str] = []
    for words in _words(path):
        match words:
            case ["nameserver", server, *_]:
                servers.append(server)
            case ["search" | "domain", *domains]:
                search = [domain.strip(".") for domain in domains if domain.strip(".")]
    bare = name.rstrip(".")
    # Search domains are for names without a dot.
    search = [] if "." in name else search[:6]
    # glibc queries no more than three servers.
    return servers[:3] or ["127.0.0.1"], [*(f"{bare}.{domain}" for domain in search), bare]


def hosts_file_entries(path: Path, name: str) -> list[str]:
    """Return the addresses that the hosts file at ``path`` has for ``name``, in its order."""
    return [words[0] for words in _words(path) if name.lower() in (each.lower() for each in words[1:])]


def query(server: str, names: list[str], timeout_s: float) -> Answer:
    """Query ``server`` for the IPv4 and IPv6 addresses of ``names``; the first name that has any is used."""
    answer, started = Answer(server), time.monotonic()
    left = {secrets.randbelow(1 << 16): (name, kind) for name in names for kind in (_A, _AAAA) if _encodable(name)}
    if not left:
        return Answer(server, answered=True, error="the name cannot be encoded")
    found: dict[str, list[str]] = {}
    try:
        with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((server, 53))
            while left and time.monotonic() < started + timeout_s:
                # Packets may be lost, and servers on a network answer in milliseconds.
                for number, (name, kind) in left.items():
                    sock.send(_question(number, name, kind))
                again = min(time.monotonic() + 0.4, started + timeout_s)
                while left and (wait_s := again - time.monotonic()) > 0:
                    sock.settimeout(wait_s)
                    with contextlib.suppress(TimeoutError):
                        _parse(sock.recv(4096), left, found, answer)
                        answer.seconds = time.monotonic() - started
    except OSError as problem:
        # An ICMP message: the host exists but no server listens, or there is no route.
        answer.error = answer.error or (problem.strerror or str(problem)).lower()
    answer.exists = answer.exists or any(found.values())
    answer.addresses = next((found[name] for name in names if found.get(name)), [])
    return answer


def _parse(packet: bytes, left: dict[int, tuple[str, int]], found: dict[str, list[str]], answer: Answer) -> None:
    """Parse one packet; ignore it if it is malformed or answers none of our questions."""
    with contextlib.suppress(struct.error, IndexError, ValueError):
        number, flags, _, records, *_ = struct.unpack_from("!6H", packet)
        if number not in left or not flags & 0x8000:
            return
        name, _ = left.pop(number)
        answer.answered = True
        code = flags & 0xF
        if code not in {0, _NO_SUCH_NAME}:
            answer.error = _CODES.get(code, f"answers with code {code}")
            return
        answer.exists = answer.exists or code == 0
        at = _skip_name(packet, 12) + 4
        for _ in range(records):
            at = _skip_name(packet, at)
            kind, _, _, size = struct.unpack_from("!HHIH", packet, at)
            at += 10
            if (kind, size) in {(_A, 4), (_AAAA, 16)}:
                found.setdefault(name, []).append(str(ipaddress.ip_address(packet[at : at + size])))
            at += size


def _skip_name(packet: bytes, at: int) -> int:
    """Return the offset after the name at ``at``."""
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


def _query_servers(name: str, timeout_s: float = _SERVER_S) -> list[Answer]:
    """Query every name server concurrently."""
    servers, names = read_resolver(_RESOLVER, name)
    return run_concurrently(lambda server: query(server, names, timeout_s), servers)


def _describe_silent(answers: list[Answer]) -> str:
    """Return which of the servers did not answer, "" if all did."""
    quiet = f"did not answer within {duration(_SERVER_S)}"
    silent = [each for each in answers if not each.answered]
    return join([f"{each.server} {f'does not answer: {each.error}' if each.error else quiet}" for each in silent])


def check(request: Request) -> Iterator[Finding]:
    """Check this machine's own name, and the coordinator's if it is a name."""
    yield _own_name(request)
    target = request.target
    if target is not None and target.host != "localhost":
        try:
            ipaddress.ip_address(target.host.partition("%")[0])
        except ValueError:
            yield from _target_name(request, target)


def _own_name(request: Request) -> Finding:
    name = socket.gethostname()
    lookup = look_up(Address(name, 0))
    # IPv4 first: all software accepts it.
    outer = sorted({host for each in request.interfaces if each.up for host in each.outer}, key=lambda a: (":" in a, a))
    if lookup.error is not None:
        silent = _describe_silent(_query_servers(name))
        fault = "is in no file, and the name server does not answer" if silent else "has no address"
        line = f"{outer[0] if outer else '127.0.1.1'} {name}"
        return _NAMES.yellow(
            "own-name",
            "name-server-silent" if silent else "address-unresolvable",
            f"this machine's own name {name} {fault}",
            why=silent or f"{lookup.error.strerror}; torch's own Gloo resolves its host name at its start",
            fix=f"put `{line}` into /etc/hosts" + (", or correct /etc/resolv.conf" if silent else ""),
            commands=(f"echo '{line}' >> /etc/hosts",),
        )
    addresses = [host for _, host in lookup.places]
    source = "/etc/hosts" if hosts_file_entries(_HOSTS, name) else "the name service"
    if all(not is_loopback(host) and host not in request.local_addresses for host in addresses):
        return _NAMES.at(
            "red" if request.several_hosts else "yellow",
            "own-name",
            "address-not-local",
            f"this machine's own name {name} resolves to {join(addresses)}, which is not this machine",
            why=f"from {source}; its interfaces have {join(outer) or 'no outer address'}",
            fix=f"correct the line of {name} in /etc/hosts, or its record in DNS; until then set GLOO_SOCKET_IFNAME to "
            "the interface that leads to the other machines",
            commands=(f"getent ahosts {name}", "ip -br addr"),
        )
    if request.several_hosts and all(is_loopback(host) for host in addresses):
        return _NAMES.yellow(
            "own-name",
            "loopback-advertised",
            f"this machine's own name {name} resolves to {join(addresses)}, where no other machine reaches it",
            why=f"from {source}. allhands advertises the interface that leads to the coordinator and is not affected; "
            "torch's own Gloo advertises the address of the host name, and so does a MASTER_ADDR of that name",
            fix=f"give {name} an outer address in /etc/hosts, or set GLOO_SOCKET_IFNAME",
            commands=(f"sed -i 's/^{addresses[0]}\\(.*{name}\\)/{outer[0]}\\1/' /etc/hosts",) if outer else (),
        )
    return _NAMES.green("own-name", f"{name} is {join(addresses)}", f"from {source}", addresses=addresses)


def _target_name(request: Request, target: Address) -> Iterator[Finding]:
    if request.lookup is None:
        return
    lookup = request.lookup
    listed = hosts_file_entries(_HOSTS, target.host)
    if lookup.error is not None:
        yield _unresolved(request, target, _query_servers(target.host))
        return
    addresses = [host for _, host in lookup.places]
    # The system does not query a server for names in /etc/hosts, but other machines may.
    own = target.host == socket.gethostname()
    answers = [] if own else _query_servers(target.host, 0.6 if listed else _SERVER_S)
    others = [each for each in answers if each.addresses][:1]
    shadowed = [each for each in others if listed and not set(each.addresses) & set(addresses)]
    for other in shadowed:
        yield _NAMES.yellow(
            "target-name",
            "name-shadowed",
            f"{target.host} is {join(listed)} in /etc/hosts, but {join(other.addresses)} on the name server",
            why=f"this machine uses the first; machines without that line use the second ({other.server})",
            fix=f"remove the line of {target.host} from /etc/hosts, or make all machines agree",
            commands=(f"grep -n {target.host} /etc/hosts",),
        )
    # A job resolves a name many times: a second is noticeable.
    slow = lookup.seconds > 1.0
    if slow:
        silent = _describe_silent(answers)
        server = "remove the silent server from" if silent else "use a faster server in"
        speed = join([f"{each.server} answered after {duration(each.seconds)}" for each in answers if each.answered])
        yield _NAMES.yellow(
            "name-time",
            "name-server-silent",
            f"{target.host} took {duration(lookup.seconds)} to resolve",
            why=silent or speed,
            fix=f"put the name into /etc/hosts, or {server} /etc/resolv.conf",
            commands=(f"echo '{addresses[0]} {target.host}' >> /etc/hosts",),
        )
    if not shadowed and not slow:
        both = " (IPv4 and IPv6)" if len({family for family, _ in lookup.places}) > 1 else ""
        why = f"from {'/etc/hosts' if listed else 'the name service'} in {duration(lookup.seconds)}"
        yield _NAMES.green("target-name", f"{target.host} is {join(addresses)}{both}", why, addresses=addresses)


def _unresolved(request: Request, target: Address, answers: list[Answer]) -> Finding:
    silent = _describe_silent(answers)
    command = f"getent ahosts {target.host}"
    # One good answer is enough: the system tries the servers in turn.
    if not any(each.exists or (each.answered and not each.error) for each in answers):
        return _NAMES.red(
            "target-name",
            "name-server-silent",
            f"{target.host} cannot be resolved: the name server {'does not answer' if silent else 'fails'}",
            why=silent or join([f"{each.server} {each.error}" for each in answers]),
            fix="use a server that answers in /etc/resolv.conf, open port 53 to it, or put the name into /etc/hosts",
            commands=("cat /etc/resolv.conf", command),
        )
    if any(each.addresses for each in answers):
        return _NAMES.red(
            "target-name",
            "address-unresolvable",
            f"{target.host} has no address here, although {answers[0].server} knows it",
            why="the system's resolver does not query that server for this name: see hosts: in /etc/nsswitch.conf",
            fix="put dns on the hosts: line of /etc/nsswitch.conf, or the name into /etc/hosts",
            commands=("grep ^hosts: /etc/nsswitch.conf",),
        )
    late = request.world is not None and request.world.late_names
    replies = join([f"{each.server} replied so after {duration(each.seconds)}" for each in answers])
    return _NAMES.at(
        "yellow" if late else "red",
        "target-name",
        "address-unresolvable",
        f"there is no such name as {target.host}",
        why=replies + ("; names may be registered late here" if late else ""),
        fix="check MASTER_ADDR or HOST:PORT for a typing error; "
        f"`getent hosts {target.host}` must print an address on every machine",
        commands=(command,),
    )
