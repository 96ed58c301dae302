"""Gloo's connections: which interface they use, and closing them to end Gloo's waits.

Gloo has no abort: a thread inside a collective waits until its peer answers, the connection closes, or the timeout
passes. So the TCP connections are closed. Which sockets of this process they are is read from the addresses that Gloo
writes to and reads from the store when a group forms.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import AllhandsError, fail

__all__ = ["IFNAME", "Connections", "addresses", "check_interface", "interface_of", "loopback_interface", "unreachable"]

IFNAME = "GLOO_SOCKET_IFNAME"

# IFF_UP and IFF_LOOPBACK of <linux/if.h>.
_UP_LOOPBACK = 1 | 8

_LENGTH = struct.Struct("<Q")

# Gloo writes a whole sockaddr_storage (128 bytes) and a sequence number (8 bytes) for each address.
_ADDRESS_BYTES = 136

# One round trip, where the deadline has all but passed.
_MIN_PROBE_S = 0.2

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


class Connections:
    """The addresses that Gloo listens on and connects to, from the values that it exchanges through the store."""

    def __init__(self) -> None:
        # Set while a group forms across hosts: the deadline (time.monotonic) of the probes of each host.
        self.probe_until: float | None = None
        self._own: set[_Place] = set()
        self._peers: set[_Place] = set()
        self._reachable: set[str] = set()

    @property
    def address(self) -> str:
        """The address at which Gloo of this process is reached, "" before it published one."""
        return min((host for host, _ in self._own), default="")

    def published(self, value: bytes) -> None:
        """Note a ``value`` that this process wrote to the store."""
        self._own.update(addresses(value))

    def learned(self, value: bytes) -> None:
        """Note a ``value`` that this process read from the store; raise engine-failed where its host is unreachable."""
        for place in addresses(value):
            self._peers.add(place)
            if self.probe_until is not None and place[0] not in self._reachable:
                self._probe(place, self.probe_until)

    def _probe(self, place: _Place, until: float) -> None:
        """Check that ``place`` accepts connections, once for each host.

        Gloo itself waits five times its timeout for a connection (gloo/transport/tcp/pair.h), and then reports no
        address. It drops a connection that sends nothing, so the probe is harmless.
        """
        try:
            socket.create_connection(place, timeout=max(_MIN_PROBE_S, until - time.monotonic())).close()
        except OSError as problem:
            raise unreachable(f"Gloo's port {place[1]} on {place[0]}", place, problem, "") from problem
        self._reachable.add(place[0])

    def close_all(self) -> int:
        """Shut down every connection of Gloo in this process, so that waits on them raise; return how many."""
        ended = 0
        for entry in list(Path("/proc/self/fd").iterdir()):
            try:
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                # A duplicate: shutdown acts on the connection itself, and Gloo's own descriptor stays Gloo's.
                sock = socket.socket(fileno=os.dup(int(entry.name)))
            except OSError:
                continue  # It was closed since it was listed.
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
            return False  # Listening, or closed already.
        return here in self._own or there in self._peers


def unreachable(what: str, place: _Place, problem: OSError, fix: str) -> AllhandsError:
    """Return engine-failed: ``what``, a port that the engine uses at ``place``, cannot be reached."""
    host, port = place
    return fail(
        "engine-failed",
        f"every rank answered the roll call, but {what} cannot be reached",
        who=f"{socket.gethostname()} (pid {os.getpid()})",
        why=f"connecting to {host}:{port}: {problem.strerror or problem}; probably a firewall that only lets the "
        "coordinator's port through",
        fix=f"open the ports above 1023 between the hosts; or name the interface that leads to them with {IFNAME}{fix}",
        hosts=(host,),
        certain=False,
    )


def interface_of(address: str) -> str:
    """Return the name of the interface that has ``address``, "" where none has."""
    # Imported here and below: forming a group on one host, which does not need it, would take a tenth longer.
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return ""


def loopback_interface() -> str:
    """Return the name of a loopback interface that is up, "" where there is none."""
    for _, name in socket.if_nameindex():
        with suppress(OSError, ValueError):
            flags = int(Path(f"/sys/class/net/{name}/flags").read_text(encoding="ascii"), 16)
            if flags & _UP_LOOPBACK == _UP_LOOPBACK:
                return name
    return ""


def check_interface(name: str, *, one_host: bool, rank: int) -> None:
    """Raise interface-mismatch where the interface that the user chose for Gloo cannot lead to the peers."""
    import psutil

    present = psutil.net_if_addrs()
    here: dict[str, Any] = {
        "who": f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
        "ranks": (rank,),
        "hosts": (socket.gethostname(),),
    }
    if name not in present:
        raise fail(
            "interface-mismatch",
            f"{IFNAME}={name} names no interface of this machine",
            why=f"it has {', '.join(sorted(present))}",
            fix=f"unset {IFNAME} (allhands then takes the interface that leads to the coordinator), or correct it",
            **here,
        )
    inet = [entry.address for entry in present[name] if entry.family in {socket.AF_INET, socket.AF_INET6}]
    if not one_host and all(address.startswith("127.") or address == "::1" for address in inet):
        raise fail(
            "interface-mismatch",
            f"{IFNAME}={name} is loopback, but ranks are on several hosts",
            why=f"{name} has {', '.join(inet) or 'no address'}, which no other host can reach",
            fix=f"unset {IFNAME}, or name the interface that leads to the other hosts (`ip route`)",
            **here,
        )
