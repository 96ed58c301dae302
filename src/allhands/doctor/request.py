"""What the doctor was asked, and what is known before anything is looked at."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from socket import gaierror

from ..control.bind import is_loopback
from ..control.connect import resolve
from ..environments.identify import identify
from ..environments.world import Address, World
from ..errors import AllhandsError
from .concurrent import Together
from .interfaces import Interface, interfaces

__all__ = ["NAME_S", "Case", "Lookup", "is_address", "open_case"]

# How long a name may take. glibc itself asks a silent server again only after 5 s, so longer waits tell no more.
NAME_S = 2.2

# The variables by which schedulers say how many nodes a job has.
_NODES = ("GROUP_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "PET_NNODES")


class Lookup:
    """A name that is being resolved, beside whoever asks; both network and names want to know."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.places: list[tuple[int, str]] = []
        self.error: gaierror | None = None
        self.seconds = 0.0
        self._answer = Together(lambda _: self._run(), [None])

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self.places = resolve(self.address.host, self.address.port, started + NAME_S)
        except gaierror as problem:
            self.error = problem
        self.seconds = time.monotonic() - started

    def wait(self) -> Lookup:
        """Return once there is an answer, or none came in time."""
        self._answer.results()
        return self


@dataclass(frozen=True)
class Case:
    """What is to be examined. ``asked`` is whether the target was given by the user and not by the environment."""

    env: Mapping[str, str]
    target: Address | None = None
    asked: bool = False
    ranks: int | None = None
    world: World | None = None
    trouble: AllhandsError | None = None
    hosts_file: Path = Path("/etc/hosts")
    resolver_file: Path = Path("/etc/resolv.conf")
    _lookups: dict[str, Lookup] = field(default_factory=dict)

    @cached_property
    def interfaces(self) -> list[Interface]:
        """The network interfaces of this machine."""
        return interfaces()

    @cached_property
    def lookup(self) -> Lookup | None:
        """The target's name, being resolved; None without a target."""
        return Lookup(self.target) if self.target is not None else None

    @property
    def local_addresses(self) -> set[str]:
        """The addresses of this machine."""
        return {address for each in self.interfaces for address in each.addresses}

    @property
    def places(self) -> list[tuple[int, str]]:
        """Where the target is, [] where that is not known. Waits for the name."""
        return self.lookup.wait().places if self.lookup is not None else []

    @property
    def target_is_here(self) -> bool:
        """Whether the target is this machine, as far as its address tells."""
        own = self.local_addresses
        return any(is_loopback(host) or host in own for _, host in self.places)

    @property
    def local_ranks(self) -> int | None:
        """How many ranks this machine has or will have, where anybody said so."""
        if self.ranks is not None:
            return self.ranks
        return self.world.local_world_size if self.world is not None else None

    @cached_property
    def nodes(self) -> str:
        """What says that there are several machines, as evidence; "" where nothing does."""
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
        """Whether more than this machine is concerned: the environment says so, or the target is elsewhere."""
        return bool(self.nodes) or (bool(self.places) and not self.target_is_here)


def is_address(host: str) -> bool:
    """Tell whether ``host`` is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def open_case(target: Address | None = None, *, env: Mapping[str, str] | None = None, ranks: int | None = None) -> Case:
    """Find out who this process is, and where its coordinator would be if ``target`` does not say so."""
    source = dict(os.environ if env is None else env)
    world, trouble = None, None
    try:
        world = identify(source)
    except AllhandsError as problem:
        trouble = problem
    place = target
    if place is None and world is not None:
        place = world.coordinator
    return Case(source, place, target is not None, ranks, world, trouble)
