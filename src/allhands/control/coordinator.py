"""The coordinator: one asyncio server per job that calls the roll, keeps the store, and tells everyone who fell.

Needs no torch. Runs in the launcher, or beside rank 0 (see `beside`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
import traceback
from typing import Any

from ..diagnosis import Diagnosis
from . import diagnoses, endings
from .arrival import Arrival
from .comparison import Comparison
from .connection import Connection
from .keyvalue import KeyValue
from .messages import (
    Ask,
    Census,
    Claim,
    Closing,
    Complete,
    Condemn,
    Dismissed,
    Ended,
    Failed,
    FromMember,
    Leaving,
    Noted,
    Ping,
    Pong,
    Query,
    Recalled,
    Refused,
    Remark,
    Reply,
    Report,
    Status,
    Told,
    Waiting,
    encode,
)
from .rollcall import Completed, RefusedRoll, RollCall, Waits, decide
from .status_query import everyone, telling

__all__ = ["Coordinator"]

# How often deadlines, silence and the waiting line are looked at.
_TICK_S = 0.2

# Pings only keep "silent since" exact; silence itself is found by asking.
_PING_S = 1.0

# Before a leaver is told who was still busy, they are asked once more: what they did seconds ago is no news.
_ASK_AGAIN_S = 0.7

# Questions to all are not repeated more often than this: with n ranks leaving, n questions would be n * n.
_QUERY_S = 0.5

# An exception that may only pass on someone else's death is held back this long for the death itself to show.
_FOLLOW_S = 0.3

# Far more than the largest job needs; bounds what a flood of strangers can take.
_MOST_CONNECTIONS = 65_536

# After a refusal, ranks that are still starting should be given the same words, not a closed door.
_LINGER_S = 2.0

# Whoever is told goodbye closes its end at once; one that is stopped or gone is not waited for longer.
_GOODBYE_S = 0.3


class Coordinator:
    """The state of one job and the rules that move it. I/O per member lives in `connection`."""

    def __init__(self, *, token: bytes = b"", linger_s: float = _LINGER_S) -> None:
        self.token = token
        self.roll = RollCall(opened=time.monotonic())
        self.store = KeyValue()
        self.calls = Comparison()
        self.members: dict[int, Connection] = {}
        self.verdict: Diagnosis | None = None
        self.refused: Diagnosis | None = None
        self.completed_at: float | None = None
        self.finished = asyncio.Event()
        self._closing = False
        self._deserted = asyncio.Event()
        self._completed_wall = 0.0
        self._refused_at = 0.0
        self._linger_s = linger_s
        self._left: dict[int, Status] = {}
        self._leavers: dict[int, tuple[Connection, Leaving, float]] = {}
        self._suspects: list[tuple[float, Diagnosis]] = []
        self._owing: set[Connection] = set()
        self._censuses: list[tuple[Connection, Census, float]] = []
        self._servers: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        # The members whose connection stands.
        self._here: set[Connection] = set()
        self._told: set[int] = set()
        self._told_processes: set[tuple[str, int]] = set()
        self._refused_wall = 0.0
        self._refused_generation = 0
        self._orphaned: float | None = None
        self._queried = 0.0
        self._waiting_said = 0.0
        self._pinged = 0.0
        self._ticker: asyncio.Task[None] | None = None

    # Serving -----------------------------------------------------------------------------------------------

    async def listen_tcp(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Listen on exactly ``host``:``port``; return the address bound. OSError is the caller's to explain."""
        server = await asyncio.get_running_loop().create_server(
            self._meet, host, port, ssl=tls, reuse_address=True, backlog=4096
        )
        self._servers.append(server)
        bound = server.sockets[0].getsockname()
        return str(bound[0]), int(bound[1])

    def _meet(self) -> Connection:
        """Return what serves a connection that was just made."""
        return Connection(self)

    async def listen_unix(self, name: str) -> None:
        """Listen on the abstract Unix socket ``name`` (without the leading NUL)."""
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(self, local=True), "\0" + name, backlog=4096
        )
        self._servers.append(server)

    def start(self) -> None:
        """Begin to watch the clock. Call once the sockets are open."""
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Tell everyone goodbye and free every socket."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self._stop_listening()
        self._closing = True
        for connection in list(self._connections):
            connection.send(Closing())
            connection.hang_up()
        # A rank of the next group may be speaking to us: closing on what it says would destroy our goodbye.
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._deserted.wait(), _GOODBYE_S)
        for connection in list(self._connections):
            connection.close()
        # One pass of the loop lets the transports flush and free their descriptors.
        await asyncio.sleep(0)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    # Members come ------------------------------------------------------------------------------------------

    def met(self, connection: Connection) -> None:
        """A connection was made; nothing is known of it yet."""
        if len(self._connections) >= _MOST_CONNECTIONS:
            connection.drop("too many connections")
            return
        self._connections.add(connection)
        if self._closing:
            connection.send(Closing())
            connection.hang_up()

    def claimed(self, connection: Connection, claim: Claim) -> None:
        """A proven member answers the roll call."""
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
            party=self.roll.party,
        )
        if self.refused is not None:
            self._late_for_refusal(connection, arrival)
            return
        if self.completed_at is not None:
            if len(self._left) >= self.roll.world_size or self.roll.again(arrival):
                # The next group of the same processes is forming at the same address: it must ask again.
                connection.send(Closing())
                connection.close()
            else:
                connection.send(Refused(diagnoses.late(arrival, self.roll, self._completed_wall, now)))
            return
        connection.arrival = arrival
        self.roll.arrive(arrival)
        if self.members.setdefault(arrival.rank, connection) is connection:
            self._here.add(connection)
        self._decide(now)

    def _late_for_refusal(self, connection: Connection, arrival: Arrival) -> None:
        """Give a rank of the refused attempt the same words; one of the next attempt ends this coordinator."""
        identity = arrival.claim.identity
        process = (identity.key, identity.pid)
        retry = process in self._told_processes or arrival.claim.generation > self._refused_generation
        if self.refused is None or retry or identity.started > self._refused_wall:
            connection.send(Closing())
            connection.close()
            self.finished.set()
            return
        connection.send(Refused(self.refused))
        self._told.add(arrival.rank)
        self._told_processes.add(process)

    def turned_away(self, connection: Connection) -> None:
        """A rank could not prove itself. It cannot end the roll call, but it may be why someone is missing."""
        if self.completed_at is None:
            self.roll.turn_away(connection.rank, connection.came_from)

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
                if now - self._waiting_said >= 1.0:
                    self._waiting_said = now
                    self._show(decision)

    def _complete(self, *, one_host: bool) -> None:
        self._tell_all(Complete(one_host, secrets.token_hex(8)))

    def _show(self, waits: Waits) -> None:
        if self.members:
            self.members[min(self.members)].send(Waiting(waits.explanation))

    def _refuse(self, diagnosis: Diagnosis, now: float) -> None:
        self.refused = diagnosis
        self._refused_at = now
        self._refused_wall = time.time()
        self._told.update(self.roll.present)
        known = [*self.roll.present.values(), *(double for _, double in self.roll.doubles)]
        self._told_processes.update((who.claim.identity.key, who.claim.identity.pid) for who in known)
        self._refused_generation = max((who.claim.generation for who in known), default=0)
        self._tell_all(Refused(diagnosis))

    def _tell_all(self, message: Complete | Refused | Ended) -> None:
        # Encoded once: with n ranks the roster of a group is told n times.
        frame = encode(message)
        for connection in list(self._connections):
            if connection.arrival is not None:
                connection.send_body(frame)

    def remark(self, context: dict[str, Any]) -> None:
        """Pass on a fault of this process to the lowest rank's log; the connection it concerns was dropped."""
        problem = context.get("exception")
        trace = "".join(traceback.format_exception(problem)) if isinstance(problem, BaseException) else ""
        if self.members:
            self.members[min(self.members)].send(Remark(f"{context.get('message', '')}\n{trace}".strip()))

    # Members speak -----------------------------------------------------------------------------------------

    def heard(self, connection: Connection, message: FromMember) -> None:
        """Act on one message of a member."""
        now = time.monotonic()
        match message:
            case Ask():
                self._store(connection, message, now)
            case Status():
                connection.status, connection.answered = message, now
                self._owing.discard(connection)
                if not self._owing:
                    self._census_done(now)
            case Failed():
                self._failed(connection, message, now)
            case Condemn():
                self._end(message.diagnosis)
                connection.send(Noted(message.id))
            case Leaving():
                self._leaving(connection, message, now)
            case Census():
                self._censuses.append((connection, message, now + message.wait_s))
                self._query(now)
            case Told() | Recalled():
                self.calls.hear(connection.rank, message, now)
                self._compare(now)
            case Claim():
                connection.drop("a second claim")
            case Pong():
                pass

    def _compare(self, now: float) -> None:
        """Ask about calls that differ, and end the group once it is clear who called what."""
        if self.verdict is not None:
            return
        for rank, question in self.calls.questions(now):
            self.members[rank].send(question)
        found = self.calls.judge(now)
        if found is not None:
            self._end(endings.differ(found, self.roll.present))

    def _store(self, connection: Connection, ask: Ask, now: float) -> None:
        if self.verdict is not None:
            # Whoever waits for a key of a dead group would wait in vain; the member knows the verdict.
            connection.send(Reply(ask.id, problem="timeout"))
            return
        reply, released = self.store.handle(connection, ask, now)
        if reply is not None:
            connection.send(reply)
        for parked, answer in released:
            if isinstance(parked.owner, Connection):
                parked.owner.send(answer)

    def _failed(self, connection: Connection, message: Failed, now: float) -> None:
        connection.failed = True
        arrival = connection.arrival
        if arrival is not None:
            self._suspects.append((now + _FOLLOW_S * message.follows, endings.failed(arrival, message)))
            self._end_suspected(now)
        connection.send(Noted(message.id))

    def _leaving(self, connection: Connection, message: Leaving, now: float) -> None:
        connection.left = message.how
        self._owing.discard(connection)
        arrival = connection.arrival
        if arrival is None:
            connection.send(Dismissed(message.id, []))
            return
        how = "destroyed the group" if message.how == "destroy" else "ended its program without destroying the group"
        identity = arrival.claim.identity
        self._left[arrival.rank] = Status(arrival.rank, "left", how, now, identity.host, identity.pid)
        self._leavers[arrival.rank] = (connection, message, now + message.wait_s)
        if self._over or message.wait_s <= 0:
            self._dismiss(now)
            if len(self._left) >= self.roll.world_size:
                # Nobody else is expected, and the next group of the same processes needs the address.
                self._stop_listening()
        else:
            # The clock finds those whose time is up: to look at all of them whenever one leaves would be n * n.
            # Whoever is named at the end of the wait should be named with what it was doing.
            self._query(now)

    def _dismiss(self, now: float) -> None:
        """Let those go who need not wait any longer: all are leaving, the group is dead, or time is up."""
        if self.calls.doubtful and self.verdict is None:
            return  # They may be asked what they called.
        over = self._over
        free = [rank for rank, (_, _, deadline) in self._leavers.items() if over or now >= deadline]
        if not free:
            return
        # Whoever does not wait does not ask who is still there either.
        wanted = not over and any(self._leavers[rank][1].wait_s > 0 for rank in free)
        there = everyone(self.members, self._left, now) if wanted else []
        still = [status for status in there if status.state in {"busy", "silent"}][:64]
        for rank in free:
            connection, message, _ = self._leavers.pop(rank)
            connection.send(Dismissed(message.id, still))

    @property
    def _over(self) -> bool:
        """Whether nobody need wait for anybody any more."""
        return self.completed_at is None or self.verdict is not None or len(self._left) >= self.roll.world_size

    # What is everyone doing --------------------------------------------------------------------------------

    def _query(self, now: float) -> None:
        if now - self._queried < _QUERY_S:
            return
        self._queried = now
        for connection in self.members.values():
            if connection.left is None and not connection.closed:
                connection.asked = now
                self._owing.add(connection)
                connection.send(Query())

    def _census_done(self, now: float) -> None:
        """Answer those who asked what everyone is doing: all have said so, or the time for it is over."""
        if self.calls.doubtful and self.verdict is None:
            return  # What they ask about is about to be found.
        due = [entry for entry in self._censuses if not self._owing or now >= entry[2]]
        if not due:
            return
        self._censuses = [entry for entry in self._censuses if entry not in due]
        told = telling(everyone(self.members, self._left, now))
        for connection, census, _ in due:
            connection.send(Report(census.id, told))

    # Members go --------------------------------------------------------------------------------------------

    def went(self, connection: Connection, how: str) -> None:
        """A connection ended; ``how`` is what was observed."""
        self._connections.discard(connection)
        self._here.discard(connection)
        self._owing.discard(connection)
        if not self._connections:
            self._deserted.set()
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
        self.calls.gone(arrival.rank)
        if connection.left is None and not connection.failed:
            self._suspects.append((now, endings.lost(arrival, how)))
            self._end_suspected(now)
        self._leavers.pop(arrival.rank, None)
        self._census_done(now)
        self._finish(now)

    def _end(self, diagnosis: Diagnosis) -> None:
        """The group is over. Only the first cause is told; what follows is no news."""
        if self.verdict is not None:
            return
        self.verdict = diagnosis
        self._suspects.clear()
        self._tell_all(Ended(diagnosis))
        self._dismiss(time.monotonic())

    def _end_suspected(self, now: float) -> None:
        for due, diagnosis in list(self._suspects):
            # Engines raise or end processes over calls that do not fit, which is found a moment later.
            if now >= due and not self.calls.doubtful:
                self._end(diagnosis)

    def abandon(self, how: str) -> None:
        """The process that this coordinator belongs to is gone: end once the survivors know."""
        root = self.members.get(0)
        now = self._orphaned = time.monotonic()
        arrival = root.arrival if root is not None else None
        if arrival is None and 0 in self.roll.gone:
            # Its connection ended a moment before its process.
            arrival = self.roll.gone[0][0]
        if arrival is not None and self.completed_at is None and self.refused is None:
            self._refuse(endings.lost(arrival, how), now)
        if root is not None and not root.closed:
            root.drop(how)
        self._finish(now)

    def _finish(self, now: float) -> None:
        """Set ``finished`` once nobody can need this coordinator any more."""
        gone = not self._here
        if self.refused is not None:
            told = gone and len(self._told) >= self.roll.world_size
            done = told or now - self._refused_at >= self._linger_s
        elif self._orphaned is not None:
            done = gone or now - self._orphaned >= self._linger_s
        else:
            done = self.completed_at is not None and gone
        if done:
            self.finished.set()

    # The clock ---------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self._decide(now)
            for parked, reply in self.store.expire(now):
                if isinstance(parked.owner, Connection):
                    parked.owner.send(reply)
            self._end_suspected(now)
            if any(deadline - now <= _ASK_AGAIN_S for _, _, deadline in self._leavers.values()):
                self._query(now)
            self._compare(now)
            self._dismiss(now)
            self._census_done(now)
            # More members, longer between pings: the cost of a ping round stays below one part in a hundred.
            if now - self._pinged >= max(_PING_S, len(self.members) / 500):
                self._pinged = now
                for connection in self.members.values():
                    connection.send(Ping())
            for connection in list(self._connections):
                connection.check(now)
            self._finish(now)
