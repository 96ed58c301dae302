"""The input of all checks: target, environment, expected ranks, and the network interfaces of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import psutil

from ..control.bind import is_loopback
from ..control.connect import resolve
from ..environments.identify import identify
from ..environments.world import Address, World
from ..errors import AllhandsError

__all__ = ["Interface", "Lookup", "Request", "interfaces", "look_up", "make_request"]

# Variables in which schedulers give the number of nodes.
_NODES = ("GROUP_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "PET_NNODES")

# <linux/sockios.h>, which the standard library does not name; IFF_UP and IFF_RUNNING of <linux/if.h>.
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_UP = 0x1 | 0x40


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: its addresses without scope, and whether it is up."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    up: bool

    @property
    def loopback(self) -> bool:
        """Whether it only leads to this machine."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)

    @property
    def outer(self) -> tuple[str, ...]:
        """The addresses that other machines can use: neither loopback nor link-local."""
        return tuple(
            each for each in self.addresses if not is_loopback(each) and not each.startswith(("fe80:", "169.254."))
        )


def interfaces() -> list[Interface]:
    """Return every network interface of this machine."""
    addresses = psutil.net_if_addrs()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            inet = tuple(
                str(entry.address).partition("%")[0]
                for entry in addresses.get(name, [])
                if entry.family in {socket.AF_INET, socket.AF_INET6}
            )
            request = struct.pack("40s", name.encode())
            # An interface that was just removed is skipped. A struct ifreq has 16 bytes of name, then the value.
            with contextlib.suppress(OSError):
                (flags,) = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)
                (mtu,) = struct.unpack_from("i", fcntl.ioctl(sock, _SIOCGIFMTU, request), 16)
                found.append(Interface(name, inet, mtu, flags & _UP == _UP))
    return found


class Lookup(NamedTuple):
    """The result of resolving a name: its (family, address) pairs or the error, and the seconds that it took."""

    places: list[tuple[int, str]]
    error: socket.gaierror | None
    seconds: float


def look_up(address: Address) -> Lookup:
    """Resolve the name of ``address`` within a time limit."""
    started = time.monotonic()
    try:
        # glibc repeats a query only after 5 s, so waiting a little longer finds out no more.
        places = resolve(address.host, address.port, started + 2.2)
    except socket.gaierror as problem:
        return Lookup([], problem, time.monotonic() - started)
    return Lookup(places, None, time.monotonic() - started)


@dataclass(frozen=True)
class Request:
    """What to check. ``target_given`` is whether the user gave the target; otherwise it is from the environment."""

    env: Mapping[str, str]
    target: Address | None = None
    target_given: bool = False
    ranks: int | None = None
    world: World | None = None
    world_error: AllhandsError | None = None

    @cached_property
    def interfaces(self) -> list[Interface]:
        """The network interfaces of this machine."""
        return interfaces()

    @cached_property
    def lookup(self) -> Lookup | None:
        """The target's name as resolved; None without a target."""
        return look_up(self.target) if self.target is not None else None

    @property
    def local_addresses(self) -> set[str]:
        """The addresses of this machine."""
        return {address for each in self.interfaces for address in each.addresses}

    @property
    def places(self) -> list[tuple[int, str]]:
        """Family and address of the target, [] if not known."""
        return self.lookup.places if self.lookup is not None else []

    @property
    def target_is_here(self) -> bool:
        """Whether an address of the target is one of this machine."""
        own = self.local_addresses
        return any(is_loopback(host) or host in own for _, host in self.places)

    @property
    def local_ranks(self) -> int | None:
        """The number of ranks on this machine, None if not known."""
        return self.ranks or (self.world.local_world_size if self.world is not None else None)

    @property
    def nodes(self) -> str:
        """The evidence that the job has several machines, "" if there is none."""
        for name in _NODES:
            value = self.env.get(name, "").strip()
            if value.isdecimal() and int(value) > 1:
                return f"{name}={value}"
        world = self.world
        if world is None:
            return ""
        if world.node_rank:
            return f"this is node {world.node_rank}"
        if world.local_world_size is not None and world.local_world_size < world.world_size:
            return f"{world.local_world_size} of {world.world_size} ranks are here"
        return ""

    @property
    def several_hosts(self) -> bool:
        """Whether the job has other machines: the environment shows it, or the target is elsewhere."""
        return bool(self.nodes) or (bool(self.places) and not self.target_is_here)


def make_request(
    target: Address | None = None, *, env: Mapping[str, str] | None = None, ranks: int | None = None
) -> Request:
    """Identify this process, and use its coordinator if no ``target`` is given."""
    source = dict(os.environ if env is None else env)
    try:
        world, world_error = identify(source), None
    except AllhandsError as problem:
        world, world_error = None, problem
    place = target if target is not None or world is None else world.coordinator
    return Request(source, place, target is not None, ranks, world, world_error)
