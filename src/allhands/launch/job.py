"""A job: what is to be started on this node, as the command line said it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..environments.world import Address

__all__ = ["CAUSES", "Job", "Streams"]

# What --restart-if may name: the causes of a verdict, and "any" for all of them.
CAUSES = ("any", "exception", "exit", "signal", "oom", "lost", "hang")


class Streams(NamedTuple):
    """Which of a rank's streams go where. Bits as torchrun's: 1 is stdout, 2 is stderr."""

    redirected: int = 0
    teed: int = 0


class Job(NamedTuple):
    """What is to be started, as the command line said it."""

    target: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"
    name: str = ""
    local_world_size: int = 1
    nodes: int = 1
    # -1 where the agents find out: who can open the coordinator's address is 0, the others are numbered as they come.
    node_rank: int = 0
    # How many ranks each node has, once the agents have met; () while every node is taken to have as many as this one.
    layout: tuple[int, ...] = ()
    coordinator: Address | None = None
    master: Address | None = None
    role: str = "default"
    init: bool = False
    max_restarts: int = 0
    restart_if: frozenset[str] = frozenset({"any"})
    timeout_s: float = 600.0
    grace_s: float = 10.0
    hang_timeout_s: float = 0.0
    prefix: bool = True
    fold: bool = False
    log_dir: str = ""
    streams: tuple[Streams, ...] = ()
    shown: frozenset[int] | None = None
    report: str = ""

    @property
    def world_size(self) -> int:
        """How many ranks the job has on all nodes."""
        return sum(self.layout) or self.nodes * self.local_world_size

    def rank(self, local_rank: int) -> int:
        """Return the rank of this node's worker ``local_rank``."""
        before = sum(self.layout[: self.node_rank]) if self.layout else self.node_rank * self.local_world_size
        return before + local_rank

    def streams_of(self, local_rank: int) -> Streams:
        """Return where the streams of this node's worker ``local_rank`` go."""
        return self.streams[local_rank] if self.streams else Streams()
