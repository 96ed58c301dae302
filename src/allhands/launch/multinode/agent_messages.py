"""The protocol between agents: typed messages on one connection per node, their timing, and counted stop requests."""

from __future__ import annotations

import msgspec

from ...control.messages import Claim, Closing, LogLine, Ping, Pong, Refused, Waiting, checked
from ...diagnosis import duration
from ..attempt import NodeReport
from ..verdict import AttemptResult

__all__ = [
    "SILENCE_NOTICE_S",
    "SILENCE_TIMEOUT_S",
    "ChannelClosed",
    "ChannelData",
    "ChannelOpened",
    "CollectStacks",
    "EndAttempt",
    "FromFollower",
    "FromLeader",
    "JobLayout",
    "RendezvousStopped",
    "ReportNode",
    "StallChanged",
    "StartAttempt",
    "Stop",
    "StopCounter",
    "WorkerFailed",
    "decode_from_follower",
    "decode_from_leader",
    "silence_text",
]

# Once a job is ending, an agent needs --grace and a moment to report, and the leader a moment for the verdict. An agent
# that takes this much longer is reported as silent, so that a stopped agent does not delay the end of all others.
SILENCE_TIMEOUT_S = 15.0

# Agents send a message every second; after this much silence a line is printed, while the job is not ending.
SILENCE_NOTICE_S = 5.0


class ChannelOpened(msgspec.Struct, tag=True, frozen=True):
    """Follower: a worker connected; its bytes are sent under this channel."""

    channel: int


class ChannelData(msgspec.Struct, tag=True, frozen=True):
    """Both: bytes of a worker's connection, to or from the coordinator."""

    channel: int
    body: bytes


class ChannelClosed(msgspec.Struct, tag=True, frozen=True):
    """Both: a worker's connection is closed; with ``half``, this side sends no more and still reads."""

    channel: int
    how: str = ""
    half: bool = False


class WorkerFailed(msgspec.Struct, tag=True, frozen=True):
    """Follower: a worker failed, so the attempt is to end."""

    attempt: int


class StallChanged(msgspec.Struct, tag=True, frozen=True):
    """Follower: whether the workers make no progress, and whether one is in a collective meanwhile."""

    attempt: int
    stalled: bool
    in_collective: bool


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Both: a node received the signal ``number``, for the ``times``-th time; the leader adds its name, ``by``."""

    number: int
    times: int
    by: str = ""


class ReportNode(msgspec.Struct, tag=True, frozen=True):
    """Follower: the workers are gone. ``clock_s`` is the sender's monotonic clock."""

    attempt: int
    report: NodeReport
    clock_s: float


FromFollower = (
    Claim | Pong | ChannelOpened | ChannelData | ChannelClosed | WorkerFailed | StallChanged | Stop | ReportNode
)


class JobLayout(msgspec.Struct, tag=True, frozen=True):
    """Leader: all nodes have arrived. The receiver is ``node``; ``ranks`` and ``hosts`` have an item per node.

    ``token`` is the token of the ranks' roll call; "" where every node was given one.
    """

    node: int
    ranks: list[int]
    hosts: list[str]
    token: str = ""

    def __repr__(self) -> str:
        return f"JobLayout(node={self.node}, ranks={self.ranks}, hosts={self.hosts})"


class StartAttempt(msgspec.Struct, tag=True, frozen=True):
    """Leader: start the workers, with this MASTER_ADDR and MASTER_PORT."""

    attempt: int
    host: str
    port: int


class EndAttempt(msgspec.Struct, tag=True, frozen=True):
    """Leader: the attempt failed; wait ``wait_s`` for the workers, then signal them."""

    attempt: int
    wait_s: float


class CollectStacks(msgspec.Struct, tag=True, frozen=True):
    """Leader: the job stalled on all nodes; collect the stacks of the workers, then signal them."""

    attempt: int


FromLeader = (
    Waiting
    | Refused
    | Ping
    | LogLine
    | Closing
    | JobLayout
    | StartAttempt
    | EndAttempt
    | CollectStacks
    | Stop
    | AttemptResult
    | ChannelData
    | ChannelClosed
)

decode_from_follower = checked(msgspec.msgpack.Decoder(FromFollower).decode)
decode_from_leader = checked(msgspec.msgpack.Decoder(FromLeader).decode)


class RendezvousStopped(Exception):  # not an error: a user or scheduler asked for it
    """The job was stopped by the signal ``number`` on the node ``by`` before all nodes had arrived."""

    def __init__(self, number: int, by: str) -> None:
        super().__init__(number, by)
        self.number, self.by = number, by


class StopCounter:
    """Counts requests to stop. A signal at several nodes is one request (a scheduler signals every agent at once)."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def add(self, node: str, times: int) -> int:
        """Record that ``node`` was asked ``times`` times; return how often the workers are to be stopped for it."""
        before = max(self._times.values(), default=0)
        self._times[node] = max(times, self._times.get(node, 0))
        return max(self._times.values()) - before


def silence_text(name: str, quiet_s: float) -> str:
    """Return the sentence about the silent agent of the node ``name``."""
    return f"{name}: its agent has not answered for {duration(quiet_s)} (it may be stopped)"
