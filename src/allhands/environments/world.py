"""`World`: rank, world size and address of this process, each with the place where it was read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Address", "World"]


class Address(NamedTuple):
    """The address of a coordinator: a host name or IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class World(NamedTuple):
    """The identity of one process in its job.

    ``source`` is the environment that was used, ``reasons`` the place where each value was read. Values that the
    environment does not give are None, never guessed. ``coordinator`` may be None on one host, where no address is
    needed.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    coordinator: Address | None = None
    source: str = "arguments"
    reasons: Mapping[str, str] = MappingProxyType({})
    # The job's unique name (a scheduler's job and step), or "".
    job: str = ""
    # Host names may not resolve at first (Kubernetes, SageMaker).
    late_names: bool = False
    # The launcher's own key-value store has the coordinator's port (torchrun's agent).
    agent_store: bool = False
    # The launcher runs a coordinator at that address: rank 0 must not start one.
    hosted: bool = False
    # The launcher's coordinator on this host, as a Unix abstract socket name, or "".
    socket: str = ""

    @property
    def one_host(self) -> bool:
        """Whether every rank is known to be on this host."""
        return self.world_size == 1 or self.local_world_size == self.world_size
