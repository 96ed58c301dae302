"""Gloo: which interface it should use, and how to end what it is waiting for.

Gloo has no abort: a thread inside a collective waits until its peer answers, closes, or time is up. What it
waits on are TCP connections of this process, so they are what is ended. Which sockets they are is read from
the addresses that Gloo itself puts into and takes out of the store when a group forms.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from ...errors import fail

__all__ = ["IFNAME", "Wire", "addresses", "check_interface", "interface_of", "loopback_interface"]

IFNAME = "GLOO_SOCKET_IFNAME"

# What Linux calls it nearly everywhere; and <linux/sockios.h>, which the standard library does not name.
_LOOPBACK, _SIOCGIFADDR = "lo", 0x8915

_LENGTH = struct.Struct("<Q")

# Gloo writes a whole sockaddr_storage (128 bytes) and a sequence number (8 bytes) for each address.
_ADDRESS_BYTES = 136

# A packet's way there and back, where the deadline is all but over.
_LEAST_KNOCK_S = 0.2

_Place = tuple[str, int]


def addresses(blob: bytes) -> list[_Place]:
    """Return the (host, port) pairs in what Gloo publishes about one rank; [] for anything else.

    The layout is: length and host name, then length and socket address, the latter once per connection.
    """
    found: list[_Place] = []
    offset = 0
    with suppress(struct.error, OSError):
        (length,) = _LENGTH.unpack_from(blob, offset)
        offset += _LENGTH.size + length
        while offset + _LENGTH.size < len(blob):
            (size,) = _LENGTH.unpack_from(blob, offset)
            if size != _ADDRESS_BYTES:
                break
            offset += _LENGTH.size
            family, port = struct.unpack_from("<H", blob, offset)[0], struct.unpack_from(">H", blob, offset + 2)[0]
            if family == socket.AF_INET:
                found.append((socket.inet_ntop(family, blob[offset + 4 : offset + 8]), port))
            elif family == socket.AF_INET6:
                found.append((socket.inet_ntop(family, blob[offset + 8 : offset + 24]), port))
            offset += size
    return found


class Wire:
    """The addresses that Gloo listens on and connects to, as seen passing through the store."""

    def __init__(self) -> None:
        # Set while a group forms across hosts: by when (time.monotonic) the way to each of them must be open.
        self.until: float | None = None
        self._own: set[_Place] = set()
        self._peers: set[_Place] = set()
        self._open: set[str] = set()

    @property
    def address(self) -> str:
        """The address at which Gloo of this process is reached, "" before it published one."""
        return min((host for host, _ in self._own), default="")

    def published(self, value: bytes) -> None:
        """This process put ``value`` into the store."""
        self._own.update(addresses(value))

    def learned(self, value: bytes) -> None:
        """This process got ``value`` from the store. Raises engine-failed where a host in it cannot be reached."""
        for place in addresses(value):
            self._peers.add(place)
            if self.until is not None and place[0] not in self._open:
                self._knock(place, self.until)

    def _knock(self, place: _Place, until: float) -> None:
        """See that ``place`` lets us in, once for each host.

        Gloo itself waits for a connection five times as long as it is told to (gloo/transport/tcp/pair.h), and
        then cannot say where to. It drops a connection that says nothing, so nobody is disturbed.
        """
        try:
            socket.create_connection(place, timeout=max(_LEAST_KNOCK_S, until - time.monotonic())).close()
        except OSError as problem:
            host, port = place
            raise fail(
                "engine-failed",
                f"every rank answered the roll call, but Gloo's port {port} on {host} cannot be reached",
                who=f"{socket.gethostname()} (pid {os.getpid()})",
                why=f"connecting to {host}:{port}: {problem.strerror or problem}; probably a firewall that only lets "
                "the coordinator's port through",
                fix="open the ports above 1023 between the hosts; or name the interface that leads to them with "
                f"{IFNAME}",
                hosts=(host,),
                certain=False,
            ) from problem
        self._open.add(place[0])

    def cut(self) -> int:
        """End every connection of Gloo in this process, so that whatever waits on one raises; return how many."""
        ended = 0
        for entry in list(Path("/proc/self/fd").iterdir()):
            try:
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                # A duplicate: shutdown acts on the connection itself, and Gloo's own descriptor stays Gloo's.
                sock = socket.socket(fileno=os.dup(int(entry.name)))
            except OSError:
                continue  # Closed since it was listed.
            with sock:
                if self._is_gloo(sock):
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                        ended += 1
        return ended

    def _is_gloo(self, sock: socket.socket) -> bool:
        if sock.family not in {socket.AF_INET, socket.AF_INET6} or sock.type != socket.SOCK_STREAM:
            return False
        try:
            here, there = sock.getsockname()[:2], sock.getpeername()[:2]
        except OSError:
            return False  # Listening, or already ended.
        return here in self._own or there in self._peers


def interface_of(address: str) -> str:
    """Return the name of the interface that has ``address``, "" where none has."""
    # Here and below: its import takes a tenth of what a rank needs to form a group on one host, which needs it not.
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return ""


def loopback_interface() -> str:
    """Return the name of a loopback interface that is up, "" where there is none."""
    name = _LOOPBACK if _address_of(_LOOPBACK) == "127.0.0.1" else interface_of("127.0.0.1")
    flags = Path(f"/sys/class/net/{name}/flags")
    with suppress(OSError, ValueError):
        if name and int(flags.read_text(encoding="ascii"), 16) & 1:
            return name
    return ""


def _address_of(name: str) -> str:
    """Ask the kernel for the IPv4 address of an interface, "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("40s", name.encode()))
        # A struct ifreq: 16 bytes of name, then a sockaddr_in, whose address comes after family and port.
        return socket.inet_ntoa(answer[20:24])
    return ""


def check_interface(name: str, *, one_host: bool, rank: int) -> None:
    """Raise interface-mismatch where the interface that the user chose for Gloo cannot lead to the peers."""
    import psutil

    present = psutil.net_if_addrs()
    if name not in present:
        raise fail(
            "interface-mismatch",
            f"{IFNAME}={name} names no interface of this machine",
            who=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
            why=f"it has {', '.join(sorted(present))}",
            fix=f"unset {IFNAME} (allhands then takes the interface that leads to the coordinator), or correct it",
            ranks=(rank,),
            hosts=(socket.gethostname(),),
        )
    inet = [entry.address for entry in present[name] if entry.family in {socket.AF_INET, socket.AF_INET6}]
    if not one_host and all(address.startswith("127.") or address == "::1" for address in inet):
        raise fail(
            "interface-mismatch",
            f"{IFNAME}={name} is loopback, but ranks are on several hosts",
            who=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
            why=f"{name} has {', '.join(inet) or 'no address'}, which no other host can reach",
            fix=f"unset {IFNAME}, or name the interface that leads to the other hosts (`ip route`)",
            ranks=(rank,),
            hosts=(socket.gethostname(),),
        )
