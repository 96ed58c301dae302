"""How the agents of several nodes meet: which one is the leader, and why not all of them arrive."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ... import settings
from ...control import bind
from ...control.process_identity import port_owner
from ...control.rendezvous import outbound_address
from ...control.rollcall import Arrival
from ...control.waiting_line import WaitingLine
from ...control.wording import NODES
from ...environments.world import Address
from ...errors import AllhandsError, fail
from ..options import Job
from ..verdict_text import AttemptResult
from .agent_messages import RendezvousStopped
from .follower import Follower, Join, agent_claim
from .leader import AgentCoordinator, Leader

__all__ = ["AgentRendezvous"]

# Time for a request to stop to reach the other agents before this one exits.
_STOP_S = 1.0

_Result = TypeVar("_Result")


class AgentRendezvous:
    """Makes this agent the leader or a follower, before the first worker starts."""

    def __init__(self, job: Job) -> None:
        if job.coordinator is None:
            raise ValueError("several nodes need an address to meet at")
        self._job, self._address = job, job.coordinator
        self._settings = settings.read()
        self._secret = self._settings.secret()
        self._deadline = time.monotonic() + job.timeout_s
        self._progress = WaitingLine("allhands")
        self._claim = agent_claim(job)
        self._stop_number = 0
        self._leader: Leader | None = None
        self._join: Join | None = None
        self._stopped = asyncio.Event()
        if self._settings.tls_cert or self._settings.tls_ca:
            raise fail(
                "invalid-argument",
                "the agents of several nodes do not use TLS, and ALLHANDS_TLS_CERT or ALLHANDS_TLS_CA is set",
                who=f"the launcher (pid {os.getpid()})",
                why="their messages would cross the network unencrypted",
                fix="unset them for this job and use ALLHANDS_TOKEN, or a network that is private",
            )

    def stop(self, number: int) -> None:
        """Stop because this node received the signal ``number``."""
        self._stop_number = self._stop_number or number
        if self._leader is not None:
            self._leader.stop(number)
        if self._join is not None:
            self._join.stop(number)
        self._stopped.set()

    async def run(self) -> Leader | Follower | AttemptResult:
        """Return this node's role; a result where the job was stopped. Raises the reason where not all arrive."""
        meeting = asyncio.create_task(self._meet())
        stopping = asyncio.create_task(self._wait_after_stop())
        try:
            await asyncio.wait({meeting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not meeting.done():
                meeting.cancel()
                return _stopped_result(self._stop_number, "this node")
            return meeting.result()
        except RendezvousStopped as stopped:
            return _stopped_result(stopped.number, stopped.by)
        finally:
            stopping.cancel()
            self._progress.done()

    async def _wait_after_stop(self) -> None:
        await self._stopped.wait()
        await asyncio.sleep(_STOP_S)

    async def _meet(self) -> Leader | Follower:
        if self._job.node_rank <= 0:
            coordinator = await self._listen()
            if coordinator is not None:
                return await self._lead(coordinator)
        token = self._secret.decode(errors="surrogateescape")
        self._join = Join(self._job, self._address, self._secret, self._deadline, self._progress)
        follower = Follower(self._job, await _in_thread(self._join.run), token=token)
        await follower.connect()
        return follower

    async def _listen(self) -> AgentCoordinator | None:
        """Open the agents' roll call; None where the address is another node's, and --node-rank is not given."""
        who = f"node {max(self._job.node_rank, 0)} ({self._claim.identity})"
        host = await _in_thread(
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
        own = Arrival(
            rank=0,
            world_size=self._job.nodes,
            job=self._job.name,
            attempt=0,
            claim=self._claim,
            came_from="this host",
            at=time.monotonic(),
            deadline=self._deadline,
            wording=NODES,
        )
        coordinator = AgentCoordinator(own, token=self._secret)
        try:
            bound = await coordinator.listen_tcp(host, self._address.port)
        except OSError as problem:
            if self._job.node_rank < 0 and problem.errno in {errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
                return None
            raise self._cannot_listen(problem, who) from problem
        coordinator.roll.listening = str(Address(*bound))
        coordinator.roll.only_loopback = bind.is_loopback(bound[0])
        if not self._secret and not coordinator.roll.only_loopback:
            sys.stderr.write("allhands: " + bind.WARNING_OPEN % (bound[0], "node") + "\n")
        return coordinator

    async def _lead(self, coordinator: AgentCoordinator) -> Leader:
        token = self._secret.decode(errors="surrogateescape") or secrets.token_hex(16)
        bound = coordinator.roll.listening.rpartition(":")[0].strip("[]")
        address = outbound_address() if bound in {"0.0.0.0", "::"} else bound  # noqa: S104  # requested by ALLHANDS_BIND
        leader = Leader(self._job, coordinator, address=address, token=token, has_shared_token=bool(self._secret))
        self._leader = leader
        coordinator.on_waiting = self._progress
        coordinator.start()
        try:
            if self._stop_number:
                leader.stop(self._stop_number)
            await leader.gather()
        except BaseException:
            await leader.close()
            raise
        return leader

    def _cannot_listen(self, problem: OSError, who: str) -> AllhandsError:
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


def _stopped_result(number: int, by: str) -> AttemptResult:
    name = signal.Signals(number).name
    text = f"allhands: the job was stopped by {name} on {by}, before all nodes were there\n"
    return AttemptResult(128 + number, text)


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Run ``work``, which blocks, in a daemon thread: unlike asyncio.to_thread, an exit does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def finish(result: _Result | None, problem: BaseException | None) -> None:
        if done.done():
            return
        if problem is not None:
            done.set_exception(problem)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is a result where there is no problem

    def run() -> None:
        outcome: tuple[_Result | None, BaseException | None]
        try:
            outcome = (work(), None)
        except BaseException as problem:  # noqa: BLE001  # raised by the future
            outcome = (None, problem)
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, name="allhands-rendezvous", daemon=True).start()
    return await done
