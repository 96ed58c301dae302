"""The agents' roll call, and the connections of those who answered it: a coordinator whose ranks are nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ...control.connection import Connection
from ...control.coordinator import Coordinator
from ...control.messages import Claim, Refused, Waiting
from ...control.rollcall import Arrival, Waits
from ...control.wording import NODES
from ...diagnosis import Diagnosis, count
from .agent_messages import FromConvenor, FromDelegate, decode_from_delegate

__all__ = ["Envoy", "Seats"]

# The number of an agent that was given none.
_UNNUMBERED = -1


class Envoy(Connection):
    """The connection of another node's agent."""

    coordinator: Seats

    # Whether its number was given here and may be given to another while the roll call goes on.
    numbered_here = False

    def _handle_proven(self, frame: bytes) -> None:
        if self.arrival is None:
            super()._handle_proven(frame)
        else:
            self.coordinator.told(self, decode_from_delegate(frame))

    def order(self, message: FromConvenor) -> None:
        """Send it one of the agents' own messages."""
        self.send_body(msgspec.msgpack.encode(message))


class Seats(Coordinator):
    """Who has come from which node. What they say after the roll call is the convenor's to hear."""

    members: dict[int, Envoy]  # type: ignore[assignment]  # all of them are made by _make_connection

    def __init__(self, own: Arrival, *, token: bytes) -> None:
        super().__init__(token=token)
        self.roll.wording = NODES
        self.roll.arrive(own)
        # Called for each message, for a node that is gone (with how), for the line that people see, and when the roll
        # call is over.
        self.on_message: Callable[[Envoy, FromDelegate], None] = lambda *_: None
        self.on_lost: Callable[[Envoy, str], None] = lambda *_: None
        self.on_waiting: Callable[[str], None] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def decided(self) -> bool:
        """Whether the roll call is over: all are there, or it is said why not (`refused`)."""
        return self.completed_at is not None or self.refused is not None

    def told(self, envoy: Envoy, message: FromDelegate) -> None:
        """Pass on what an agent says."""
        self.on_message(envoy, message)

    def reopen(self, timeout_s: float) -> None:
        """Hold the roll call again, for the seats that are empty."""
        now = time.monotonic()
        self.completed_at = None
        self.roll.opened = now
        self.roll.deadline = now + timeout_s
        for rank, arrival in self.roll.present.items():
            renewed = msgspec.structs.replace(arrival, deadline=now + timeout_s)
            self.roll.present[rank] = renewed
            if rank in self.members:
                self.members[rank].arrival = renewed

    # Of the coordinator ------------------------------------------------------------------------------------

    def _make_connection(self) -> Envoy:
        return Envoy(self)

    def claim_received(self, connection: Connection, claim: Claim) -> None:
        """An agent answers; one without a number gets the first that is free."""
        if not isinstance(connection, Envoy):
            raise TypeError("an agent's connection is an Envoy")
        rank, size = connection.opening.rank, connection.opening.world_size
        # One connection carries what all ranks of the node are told.
        connection.most_unread *= 1 + max(0, claim.local_world_size)
        if rank == _UNNUMBERED:
            free = self._free(size)
            if free is None:
                connection.send(Refused(self._surplus(connection, claim)))
                return
            connection.numbered_here = True
            connection.opening = msgspec.structs.replace(connection.opening, rank=free)
        elif self.completed_at is None and self.refused is None:
            self._make_way(rank, size)
        super().claim_received(connection, claim)

    def _free(self, size: int) -> int | None:
        return next((rank for rank in range(size) if rank not in self.roll.present), None)

    def _make_way(self, rank: int, size: int) -> None:
        """Give another number to an agent that was given ``rank`` only because it had none."""
        envoy = self.members.get(rank)
        free = self._free(size)
        if envoy is None or not envoy.numbered_here or envoy.arrival is None or free is None:
            return
        self.roll.leave(envoy.arrival, time.monotonic())
        del self.roll.gone[rank], self.members[rank]
        envoy.opening = msgspec.structs.replace(envoy.opening, rank=free)
        envoy.arrival = msgspec.structs.replace(envoy.arrival, rank=free)
        self.members[free] = envoy
        self.roll.arrive(envoy.arrival)

    def _surplus(self, envoy: Envoy, claim: Claim) -> Diagnosis:
        return Diagnosis(
            "duplicate-rank",
            f"all {count(self.roll.world_size, 'node')} of the job are there already",
            who=f"the agent on {claim.identity} came from {envoy.came_from}",
            why="it has no --node-rank, and no number is free",
            fix="start as many agents as --nnodes says, or end the job that is left over at this address",
            hosts=(claim.identity.host,),
        )

    def _complete(self, *, one_host: bool) -> None:  # noqa: ARG002  # the ranks' coordinator tells it
        self.on_change()

    def _refuse(self, diagnosis: Diagnosis, now: float) -> None:
        super()._refuse(diagnosis, now)
        self.on_change()

    def _show_waiting(self, waits: Waits) -> None:
        line = waits.explanation
        self.on_waiting(line)
        for envoy in self.members.values():
            envoy.send(Waiting(line))

    def disconnected(self, connection: Connection, how: str) -> None:
        """An agent's connection ended."""
        arrival = connection.arrival
        seated = (
            self.completed_at is not None
            and arrival is not None
            and isinstance(connection, Envoy)
            and self.members.get(arrival.rank) is connection
        )
        if seated and arrival is not None:
            del self.members[arrival.rank]
            self.roll.leave(arrival, time.monotonic())
        super().disconnected(connection, how)
        if seated and isinstance(connection, Envoy):
            self.on_lost(connection, how)
