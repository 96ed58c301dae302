"""The coordinator: the asyncio server of one job. Runs the roll call, serves the store, reports failures to all ranks.

Needs no torch. Runs in the launcher, or in a process of its own that rank 0 starts (`coordinator_process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
import traceback
from collections import Counter
from typing import Any

from ..diagnosis import Diagnosis
from . import messages
from .connection import Connection
from .keyvalue import KeyValue, Parked
from .messages import encode
from .rollcall import Arrival, Completed, RefusedRoll, RollCall, Waits, decide, late

__all__ = ["Coordinator"]

# How often deadlines are checked.
_TICK_S = 0.2

# How often the waiting line is sent.
_WAITING_S = 1.0

# Pings keep the time of a member's last message exact; silence itself is detected by StatusQuery.
_PING_S = 1.0

# The statuses that a LeaveGranted reports are refreshed when less than this is left of its wait.
_REFRESH_S = 0.7

# The minimum between two StatusQuery rounds: n ranks that leave at once would cause n * n messages.
_QUERY_S = 0.5

# A member whose StatusQuery is unanswered for this long is reported as silent (never as dead).
_SILENT_S = 0.9

# The most statuses in one report. Error messages name 16 ranks.
_MOST_REPORTED = 64

# An exception that may be a consequence of a peer's death is held back this long, so that the death is reported first.
_FOLLOW_S = 0.3

# Far more than the largest job has; limits the memory that a flood of connections can use.
_MOST_CONNECTIONS = 65_536

# How long a coordinator continues after a refusal, so that ranks which still start receive the same diagnosis.
_LINGER_S = 2.0

# How long `close` waits for members to close their ends.
_CLOSE_S = 0.3


class Coordinator:
    """The state of one job, and the actions on messages and deadlines. `Connection` does the I/O of one member."""

    def __init__(self, *, token: bytes = b"", linger_s: float = _LINGER_S) -> None:
        self.token = token
        self.roll = RollCall(opened=time.monotonic())
        self.store = KeyValue()
        self.members: dict[int, Connection] = {}
        self.verdict: Diagnosis | None = None
        self.refused: Diagnosis | None = None
        self.completed_at: float | None = None
        self.finished = asyncio.Event()
        self._closing = False
        self._no_connections = asyncio.Event()
        self._completed_wall = 0.0
        self._linger_s = linger_s
        # rank -> when it left.
        self._left: dict[int, float] = {}
        # rank -> its Leave that is not granted yet, with the deadline.
        self._leaving: dict[int, tuple[Connection, messages.Leave, float]] = {}
        self._unanswered: set[Connection] = set()
        self._status_requests: list[tuple[Connection, messages.StatusRequest, float]] = []
        self._servers: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._connected_members: set[Connection] = set()
        self._refused_at = self._refused_wall = 0.0
        self._refused_generation = 0
        # The ranks and processes (host key, pid) that received the refusal.
        self._refused_ranks: set[int] = set()
        self._refused_processes: set[tuple[str, int]] = set()
        self._orphaned: float | None = None
        self._queried = self._waiting_shown = self._pinged = 0.0
        self._ticker: asyncio.Task[None] | None = None

    # Listening ---------------------------------------------------------------------------------------------------

    async def listen_tcp(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Listen on exactly ``host``:``port``; return the bound address. Raises OSError."""
        server = await asyncio.get_running_loop().create_server(
            self._make_connection, host, port, ssl=tls, reuse_address=True, backlog=4096
        )
        self._servers.append(server)
        bound = server.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def _make_connection(self) -> Connection:
        """Return the protocol of a new TCP connection."""
        return Connection(self)

    async def listen_unix(self, name: str) -> None:
        """Listen on the abstract Unix socket ``name`` (without the leading NUL)."""
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(self, local=True), "\0" + name, backlog=4096
        )
        self._servers.append(server)

    def start(self) -> None:
        """Start checking deadlines. Call after the sockets are open."""
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Send Closing to every member and close every socket."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self._stop_listening()
        self._closing = True
        for connection in list(self._connections):
            connection.send(messages.Closing())
            connection.close_write()
        # Closing a socket with unread data resets it, and the peer would lose our Closing: read until it closes.
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._no_connections.wait(), _CLOSE_S)
        for connection in list(self._connections):
            connection.close()
        # The transports close their descriptors in the next iteration of the event loop.
        await asyncio.sleep(0)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    # The roll call -----------------------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """Register a new connection, before its handshake."""
        if len(self._connections) >= _MOST_CONNECTIONS:
            connection.drop("too many connections")
            return
        self._connections.add(connection)
        if self._closing:
            connection.send(messages.Closing())
            connection.close_write()

    def claim_received(self, connection: Connection, claim: messages.Claim) -> None:
        """Handle the claim of an authenticated member."""
        now = time.monotonic()
        opening = connection.opening
        arrival = Arrival(
            rank=opening.rank,
            world_size=opening.world_size,
            job=opening.job,
            attempt=opening.attempt,
            claim=claim,
            came_from=connection.came_from,
            at=now,
            deadline=now + claim.timeout_s,
            wording=self.roll.wording,
        )
        if self.refused is not None:
            self._claim_after_refusal(connection, arrival)
            return
        if self.completed_at is not None:
            if len(self._left) >= self.roll.world_size or self.roll.again(arrival):
                # The same processes form their next group at this address: the member connects again.
                connection.send(messages.Closing())
                connection.close()
            else:
                connection.send(messages.Refused(late(arrival, self.roll, self._completed_wall, now)))
            return
        connection.arrival = arrival
        self.roll.arrive(arrival)
        if self.members.setdefault(arrival.rank, connection) is connection:
            self._connected_members.add(connection)
        self._decide(now)

    def _claim_after_refusal(self, connection: Connection, arrival: Arrival) -> None:
        """Refuse a late rank of the refused attempt; a claim of the next attempt ends this coordinator."""
        identity = arrival.claim.identity
        process = (identity.key, identity.pid)
        retry = process in self._refused_processes or arrival.claim.generation > self._refused_generation
        if self.refused is None or retry or identity.started > self._refused_wall:
            connection.send(messages.Closing())
            connection.close()
            self.finished.set()
            return
        connection.send(messages.Refused(self.refused))
        self._refused_ranks.add(arrival.rank)
        self._refused_processes.add(process)

    def proof_failed(self, connection: Connection) -> None:
        """Record a failed authentication: it cannot end the roll call, but may explain why a rank is missing."""
        if self.completed_at is None:
            self.roll.refuse_proof(connection.rank, connection.came_from)

    def _decide(self, now: float) -> None:
        if self.completed_at is not None or self.refused is not None:
            return
        decision = decide(now, self.roll)
        match decision:
            case Completed(_, one_host):
                self.completed_at = now
                self._completed_wall = time.time()
                self._complete(one_host=one_host)
            case RefusedRoll(diagnosis):
                self._refuse(diagnosis, now)
            case Waits():
                if now - self._waiting_shown >= _WAITING_S:
                    self._waiting_shown = now
                    self._show_waiting(decision)

    def _complete(self, *, one_host: bool) -> None:
        self._broadcast(messages.Complete(one_host, secrets.token_hex(8)))

    def _show_waiting(self, waits: Waits) -> None:
        if self.members:
            self.members[min(self.members)].send(messages.Waiting(waits.explanation))

    def _refuse(self, diagnosis: Diagnosis, now: float) -> None:
        self.refused = diagnosis
        self._refused_at = now
        self._refused_wall = time.time()
        self._refused_ranks.update(self.roll.present)
        known = [*self.roll.present.values(), *(double for _, double in self.roll.doubles)]
        self._refused_processes.update((each.claim.identity.key, each.claim.identity.pid) for each in known)
        self._refused_generation = max((each.claim.generation for each in known), default=0)
        self._broadcast(messages.Refused(diagnosis))

    def _broadcast(self, message: messages.Complete | messages.Refused | messages.Ended) -> None:
        body = encode(message)  # once, not n times
        for connection in list(self._connections):
            if connection.arrival is not None:
                connection.send_body(body)

    def log(self, context: dict[str, Any]) -> None:
        """Send an error of the event loop to the log of the lowest rank (an asyncio exception handler)."""
        problem = context.get("exception")
        trace = "".join(traceback.format_exception(problem)) if isinstance(problem, BaseException) else ""
        if self.members:
            self.members[min(self.members)].send(messages.LogLine(f"{context.get('message', '')}\n{trace}".strip()))

    # Messages of members -----------------------------------------------------------------------------------------

    def received(self, connection: Connection, arrival: Arrival, message: messages.FromMember) -> None:
        """Handle one message of a member, whose claim is in ``arrival``."""
        now = time.monotonic()
        match message:
            case messages.StoreRequest():
                self._store_request(connection, message, now)
            case messages.Status():
                connection.status, connection.answered = message, now
                self._unanswered.discard(connection)
                if not self._unanswered:
                    self._report_statuses(now)
            case messages.Failed():
                connection.failed = True
                diagnosis = _peer_failed(arrival, message)
                if message.follows:
                    asyncio.get_running_loop().call_later(_FOLLOW_S, self._end, diagnosis)
                else:
                    self._end(diagnosis)
                connection.send(messages.Acknowledged(message.id))
            case messages.EndGroup():
                self._end(message.diagnosis)
                connection.send(messages.Acknowledged(message.id))
            case messages.Leave():
                self._member_leaves(connection, arrival, message, now)
            case messages.StatusRequest():
                self._status_requests.append((connection, message, now + message.wait_s))
                self._query_statuses(now)
            case messages.Claim():
                connection.drop("a second claim")
            case messages.Pong():
                pass

    def _store_request(self, connection: Connection, request: messages.StoreRequest, now: float) -> None:
        if self.verdict is not None:
            # The key may never be set; the member raises the verdict in place of this reply.
            connection.send(messages.StoreReply(request.id, problem="timeout"))
            return
        reply, released = self.store.handle(connection, request, now)
        if reply is not None:
            connection.send(reply)
        self._send_store_replies(released)

    def _send_store_replies(self, replies: list[tuple[Parked, messages.StoreReply]]) -> None:
        for parked, reply in replies:
            if isinstance(parked.owner, Connection):
                parked.owner.send(reply)

    def _member_leaves(self, connection: Connection, arrival: Arrival, message: messages.Leave, now: float) -> None:
        connection.left = message.how
        self._unanswered.discard(connection)
        self._left[arrival.rank] = now
        self._leaving[arrival.rank] = (connection, message, now + message.wait_s)
        if self._nobody_waits or message.wait_s <= 0:
            self._grant_leaves(now)
            if len(self._left) >= self.roll.world_size:
                # The next group of the same processes may bind this address.
                self._stop_listening()
        else:
            # `_tick` grants it at the deadline (checking all of them here would cost n * n), with fresh statuses.
            self._query_statuses(now)

    def _grant_leaves(self, now: float) -> None:
        """Answer each Leave whose wait is over: every rank leaves, the group has ended, or its deadline passed."""
        over = self._nobody_waits
        due = [rank for rank, (_, _, deadline) in self._leaving.items() if over or now >= deadline]
        if not due:
            return
        # A Leave with wait_s 0 needs no statuses.
        wanted = not over and any(self._leaving[rank][1].wait_s > 0 for rank in due)
        statuses = self.statuses(now) if wanted else []
        still = [status for status in statuses if status.state in {"busy", "silent"}][:_MOST_REPORTED]
        for rank in due:
            connection, message, _ = self._leaving.pop(rank)
            connection.send(messages.LeaveGranted(message.id, still))

    @property
    def _nobody_waits(self) -> bool:
        """Whether a Leave is granted at once."""
        return self.completed_at is None or self.verdict is not None or len(self._left) >= self.roll.world_size

    # Statuses ----------------------------------------------------------------------------------------------------

    def _query_statuses(self, now: float) -> None:
        if now - self._queried < _QUERY_S:
            return
        self._queried = now
        for connection in self.members.values():
            if connection.left is None and not connection.closed:
                connection.asked = now
                self._unanswered.add(connection)
                connection.send(messages.StatusQuery())

    def _report_statuses(self, now: float) -> None:
        """Answer each StatusRequest, if every member has answered its StatusQuery or the deadline has passed."""
        due = [entry for entry in self._status_requests if not self._unanswered or now >= entry[2]]
        if not due:
            return
        self._status_requests = [entry for entry in self._status_requests if entry not in due]
        statuses = _notable(self.statuses(now))
        for connection, request, _ in due:
            connection.send(messages.StatusReport(request.id, statuses))

    def statuses(self, now: float) -> list[messages.Status]:
        """Return the status of each member, as of its last answer."""
        statuses = []
        for rank, connection in sorted(self.members.items()):
            identity = self.roll.present[rank].claim.identity
            state: messages.State = "busy"
            if connection.left is not None:
                state, since_s = "left", now - self._left[rank]
                doing = "destroyed the group" if connection.left == "destroy" else "exited without destroying the group"
            elif connection.closed:
                state, doing, since_s = "gone", "its connection closed", 0.0
            elif connection.answered < connection.asked <= now - _SILENT_S:
                state, doing, since_s = "silent", "does not answer", now - connection.received_at
            elif connection.status is not None:
                doing, since_s = connection.status.doing, connection.status.since_s
            else:
                doing, since_s = "not queried", 0.0
            statuses.append(messages.Status(rank, state, doing, since_s, identity.host, identity.pid))
        return statuses

    # The end of members and of the group -------------------------------------------------------------------------

    def disconnected(self, connection: Connection, how: str) -> None:
        """Handle the end of a connection; ``how`` is what was observed."""
        self._connections.discard(connection)
        self._connected_members.discard(connection)
        self._unanswered.discard(connection)
        if not self._connections:
            self._no_connections.set()
        self.store.forget(connection)
        arrival, now = connection.arrival, time.monotonic()
        if arrival is None or self.members.get(arrival.rank) is not connection:
            return
        if self.completed_at is None:
            if self.refused is None:
                del self.members[arrival.rank]
                self.roll.leave(arrival, now)
            self._finish(now)
            return
        if connection.left is None and not connection.failed:
            self._end(_peer_lost(arrival, how))
        self._leaving.pop(arrival.rank, None)
        self._report_statuses(now)
        self._finish(now)

    def _end(self, diagnosis: Diagnosis) -> None:
        """End the group. Only the first cause is reported; later ones are consequences."""
        if self.verdict is not None:
            return
        self.verdict = diagnosis
        self._broadcast(messages.Ended(diagnosis))
        self._grant_leaves(time.monotonic())

    def abandon(self, how: str) -> None:
        """Handle the end of the process that started this coordinator: finish after the survivors were informed."""
        root = self.members.get(0)
        now = self._orphaned = time.monotonic()
        arrival = root.arrival if root is not None else None
        if arrival is None and 0 in self.roll.gone:
            # Its connection closed just before its process ended.
            arrival = self.roll.gone[0][0]
        if arrival is not None and self.completed_at is None and self.refused is None:
            self._refuse(_peer_lost(arrival, how), now)
        if root is not None and not root.closed:
            root.drop(how)
        self._finish(now)

    def _finish(self, now: float) -> None:
        """Set ``finished`` if no member needs this coordinator any more."""
        gone = not self._connected_members
        if self.refused is not None:
            informed = gone and len(self._refused_ranks) >= self.roll.world_size
            done = informed or now - self._refused_at >= self._linger_s
        elif self._orphaned is not None:
            done = gone or now - self._orphaned >= self._linger_s
        else:
            done = self.completed_at is not None and gone
        if done:
            self.finished.set()

    # Deadlines ---------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._decide(now)
            self._send_store_replies(self.store.expire(now))
            if any(deadline - now <= _REFRESH_S for _, _, deadline in self._leaving.values()):
                self._query_statuses(now)
            self._grant_leaves(now)
            self._report_statuses(now)
            # Less often with many members, so that pings take less than 1% of the time.
            if now - self._pinged >= max(_PING_S, len(self.members) / 500):
                self._pinged = now
                for connection in self.members.values():
                    connection.send(messages.Ping())
            for connection in list(self._connections):
                connection.check(now)
            self._finish(now)


def _notable(statuses: list[messages.Status]) -> list[messages.Status]:
    """Return all statuses of a small group; of a large one those that differ from the most common one.

    All n ranks may request at once, and n reports of n statuses would be n * n.
    """
    if len(statuses) <= _MOST_REPORTED:
        return statuses
    most = Counter(status.doing for status in statuses).most_common(1)[0][0]
    odd = [status for status in statuses if status.state != "busy" or status.doing != most]
    return odd[:_MOST_REPORTED] or statuses[:_MOST_REPORTED]


def _peer_failed(arrival: Arrival, message: messages.Failed) -> Diagnosis:
    """Return the diagnosis of a rank that raised and reported it."""
    return Diagnosis(
        "peer-failed",
        f"rank {arrival.rank} raised {message.kind}" + (f": {message.message}" if message.message else ""),
        who=str(arrival),
        why="it reported the exception before it exited; its traceback is below",
        fix=f"correct the {message.kind} on rank {arrival.rank}; the errors of other ranks are its consequence",
        ranks=(arrival.rank,),
        hosts=(arrival.claim.identity.host,),
        traceback=message.traceback,
    )


def _peer_lost(arrival: Arrival, how: str) -> Diagnosis:
    """Return the diagnosis of a rank whose process or connection ended without a Leave."""
    host = arrival.claim.identity.host
    if "timed out" in how or "unreachable" in how.lower():
        fix = (
            f"check that {host} is up and its network works (ping, `ip link`), and run the job again; the process "
            "itself may be alive"
        )
    else:
        fix = (
            f"look at the end of rank {arrival.rank}'s output and at the kernel log (dmesg) of {host}: "
            "killed from outside, out of memory, a crash in native code, or os._exit; then run the job again"
        )
    return Diagnosis(
        "peer-lost",
        f"rank {arrival.rank} is gone",
        who=str(arrival),
        why=f"{how}, and it had not left the group (observed)",
        fix=fix,
        ranks=(arrival.rank,),
        hosts=(host,),
    )
