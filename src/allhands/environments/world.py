"""Who am I: this process's place in the job, and where each part of that knowledge came from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Address", "World"]


class Address(NamedTuple):
    """Where a coordinator listens: a host name or IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class World(NamedTuple):
    """One process's place among all.

    ``source`` names the environment that was believed, ``reasons`` says for each value where it was
    read. Values that the environment does not tell are None, never guessed. ``coordinator`` is None
    where the environment gives no address: on one host none is needed.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    coordinator: Address | None = None
    source: str = "arguments"
    reasons: Mapping[str, str] = MappingProxyType({})
    # A name that all processes of this job and of no other have (a scheduler's job and step), or "".
    job: str = ""
    # Host names in this environment may appear only after a while (Kubernetes, SageMaker).
    late_names: bool = False
    # The coordinator's port is already held by the launcher's own key-value store (torchrun's agent).
    agent_store: bool = False
    # The launcher runs a coordinator at that address: rank 0 must not start one.
    hosted: bool = False
    # The launcher's coordinator on this host, as a Unix abstract socket name, or "".
    socket: str = ""

    @property
    def one_host(self) -> bool:
        """Whether every rank is known to be on this host (False where it is not known)."""
        return self.world_size == 1 or self.local_world_size == self.world_size
