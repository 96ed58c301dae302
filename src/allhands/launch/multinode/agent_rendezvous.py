"""How the agents of several nodes come together: who is node 0, and why not everyone is there."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import sys
import time

from ... import settings
from ...control import bind
from ...control.process_identity import port_owner
from ...control.rendezvous import outbound_address
from ...control.rollcall import Arrival
from ...control.waiting_line import WaitingLine
from ...control.wording import NODES
from ...environments.world import Address
from ...errors import AllhandsError, fail
from ..job import Job
from .follower import Delegate
from .joining import Joining, Stopped, claim, in_thread
from .leader import Convenor
from .node_role import Company, End
from .seats import Seats

__all__ = ["Gathering"]


class Gathering:
    """The time before the first worker starts."""

    def __init__(self, job: Job) -> None:
        if job.coordinator is None:
            raise ValueError("several nodes need an address to meet at")
        self._job, self._address = job, job.coordinator
        self._settings = settings.read()
        self._secret = self._settings.secret()
        self._deadline = time.monotonic() + job.timeout_s
        self._progress = WaitingLine("allhands")
        self._claim = claim(job)
        self._stop = 0
        self._convenor: Convenor | None = None
        self._joining: Joining | None = None
        self._asked = asyncio.Event()
        if self._settings.tls_cert or self._settings.tls_ca:
            raise fail(
                "invalid-argument",
                "the agents of several nodes do not speak TLS, and ALLHANDS_TLS_CERT or ALLHANDS_TLS_CA is set",
                who=f"the launcher (pid {os.getpid()})",
                why="what is said between them would go over the network in the clear",
                fix="unset them for this job and use ALLHANDS_TOKEN, or a network that is private",
            )

    def stop(self, number: int) -> None:
        """Someone asked for the end."""
        self._stop = self._stop or number
        if self._convenor is not None:
            self._convenor.stop(number)
        if self._joining is not None:
            self._joining.stop(number)
        self._asked.set()

    async def run(self) -> Company | End:
        """Return this node's place among the others; an End where someone stopped it. Raises why there is none."""
        found = asyncio.create_task(self._find())
        asked = asyncio.create_task(self._give_up())
        try:
            await asyncio.wait({found, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                found.cancel()
                return self._ended(Stopped(self._stop, "this node"))
            return found.result()
        except Stopped as stopped:
            return self._ended(stopped)
        finally:
            asked.cancel()
            self._progress.done()

    async def _give_up(self) -> None:
        """End some time after someone asked; others should be told first."""
        await self._asked.wait()
        await asyncio.sleep(1.0)

    def _ended(self, stopped: Stopped) -> End:
        name = signal.Signals(stopped.number).name
        words = f"allhands: the job was stopped by {name} on {stopped.by}, before all nodes were there\n"
        return End(128 + stopped.number, words, "")

    async def _find(self) -> Company:
        if self._job.node_rank <= 0:
            seats = await self._listen()
            if seats is not None:
                return await self._convene(seats)
        token = self._secret.decode(errors="surrogateescape")
        self._joining = Joining(self._job, self._address, self._secret, self._deadline, self._progress)
        delegate = Delegate(self._job, await in_thread(self._joining.run), token=token)
        await delegate.connect()
        return delegate

    # Node 0 ------------------------------------------------------------------------------------------------

    async def _listen(self) -> Seats | None:
        """Open the agents' roll call; None where this is not node 0, and was not told to be."""
        who = f"node {max(self._job.node_rank, 0)} ({self._claim.identity})"
        host = await in_thread(
            lambda: bind.bind_address(
                self._address,
                self._deadline,
                who=who,
                bind=self._settings.bind,
                late_names=True,
                share=(1, self._job.nodes),
                wording=NODES,
                notify=self._progress,
            )
        )
        now = time.monotonic()
        own = Arrival(
            rank=0,
            world_size=self._job.nodes,
            job=self._job.name,
            attempt=0,
            claim=self._claim,
            came_from="this host",
            at=now,
            deadline=self._deadline,
            wording=NODES,
        )
        seats = Seats(own, token=self._secret)
        try:
            bound = await seats.listen_tcp(host, self._address.port)
        except OSError as problem:
            elsewhere = problem.errno in {errno.EADDRNOTAVAIL, errno.EADDRINUSE}
            if self._job.node_rank < 0 and elsewhere:
                return None
            raise self._trouble(problem, who) from problem
        seats.roll.listening = str(Address(*bound))
        seats.roll.only_loopback = bind.is_loopback(bound[0])
        if not self._secret and not seats.roll.only_loopback:
            sys.stderr.write("allhands: " + bind.WARNING_OPEN % (bound[0], "node") + "\n")
        return seats

    async def _convene(self, seats: Seats) -> Convenor:
        shared = bool(self._secret)
        token = self._secret.decode(errors="surrogateescape") or secrets.token_hex(16)
        bound = seats.roll.listening.rpartition(":")[0].strip("[]")
        address = outbound_address() if bound in {"0.0.0.0", "::"} else bound  # noqa: S104  # asked for, with ALLHANDS_BIND
        self._convenor = Convenor(self._job, seats, address=address, token=token, shared=shared)
        seats.on_waiting = self._progress
        seats.start()
        try:
            if self._stop:
                self._convenor.stop(self._stop)
            await self._convenor.gather()
        except BaseException:
            await self._convenor.close()
            raise
        return self._convenor

    def _trouble(self, problem: OSError, who: str) -> AllhandsError:
        taken = problem.errno == errno.EADDRINUSE
        held = port_owner(self._address.port) if taken else None
        return fail(
            "port-in-use" if taken else "address-not-local",
            f"node 0 cannot listen on {self._address}: {problem.strerror or problem}",
            who=who,
            why=f"it is held by {held}" if held else "the system refused the address (observed)",
            fix="end that process, or give another port as --coordinator on every node"
            if taken
            else "give an address of this machine: node 0 runs where --coordinator leads; or set ALLHANDS_BIND",
            ranks=(0,),
        )
