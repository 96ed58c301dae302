"""How the agents of several nodes meet: which one is the leader, and why not all of them arrive."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib import metadata
from typing import TypeVar

import msgspec

from ... import settings
from ..._version import __version__
from ...control import bind, connect, handshake
from ...control.messages import Claim, Closing, LogLine, Ping, Pong, Refused, Splitter, Waiting, encode, pack
from ...control.process_identity import port_owner, this_process
from ...control.rendezvous import outbound_address
from ...control.rollcall import Arrival
from ...control.waiting_line import WaitingLine
from ...control.wording import NODES
from ...diagnosis import duration
from ...environments.world import Address
from ...errors import AllhandsError, error, fail
from ..options import Job
from ..verdict import AttemptResult
from . import agent_messages as messages
from .agent_messages import FromFollower, RendezvousStopped, decode_from_leader
from .follower import Follower, JoinedConnection
from .leader import AgentCoordinator, Leader

__all__ = ["AgentRendezvous"]

# Time for a request to stop to reach the other agents before this one exits.
_STOP_S = 1.0

# How often a request to stop is checked while a follower waits for the leader.
_POLL_S = 0.2

# Past the deadline, the leader's refusal may still be in transit.
_REFUSAL_S = 1.0

# How long to retry an address where another service answers: the previous job may be closing there.
_RETRY_S = 2.0

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
        self._claim = self._make_claim()
        self._stop_number = 0
        self._leader: Leader | None = None
        self._stopped = asyncio.Event()
        if self._settings.tls_cert or self._settings.tls_ca:
            raise fail(
                "invalid-argument",
                "the agents of several nodes do not use TLS, and ALLHANDS_TLS_CERT or ALLHANDS_TLS_CA is set",
                who=f"the launcher (pid {os.getpid()})",
                why="their messages would cross the network unencrypted",
                fix="unset them for this job and use ALLHANDS_TOKEN, or a network that is private",
            )

    def _make_claim(self) -> Claim:
        """Return this agent's claim. ``local_world_size`` is how many ranks it will start."""
        try:
            # Not imported: the workers import it seconds later. Versions that differ are refused now.
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = ""
        return Claim(
            identity=this_process(),
            backend="",
            device="",
            gpu="",
            torch=torch,
            allhands=__version__,
            launcher="allhands run",
            timeout_s=self._job.timeout_s,
            local_world_size=self._job.local_world_size,
            mixed_versions=self._settings.mixed_versions,
        )

    def stop(self, number: int) -> None:
        """Stop because this node received the signal ``number``."""
        self._stop_number = self._stop_number or number
        if self._leader is not None:
            self._leader.stop(number)
        self._stopped.set()

    async def run(self) -> Leader | Follower | AttemptResult:
        """Return this node's role; a result where the job was stopped. Raises the reason where not all arrive."""
        meeting = asyncio.create_task(self._meet())
        stopping = asyncio.create_task(self._stopped.wait())
        number, by = 0, "this node"
        try:
            await asyncio.wait({meeting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return await asyncio.wait_for(meeting, _STOP_S if self._stop_number else None)
        except TimeoutError:
            if not self._stop_number:
                raise
            number = self._stop_number
        except RendezvousStopped as stopped:
            number, by = stopped.number, stopped.by
        finally:
            stopping.cancel()
            self._progress.done()
        name = signal.Signals(number).name
        text = f"allhands: the job was stopped by {name} on {by}, before all nodes were there\n"
        return AttemptResult(128 + number, text)

    async def _meet(self) -> Leader | Follower:
        if self._job.node_rank <= 0:
            coordinator = await self._listen()
            if coordinator is not None:
                return await self._lead(coordinator)
        token = self._secret.decode(errors="surrogateescape")
        follower = Follower(self._job, await _in_thread(self._join), token=token)
        await follower.connect()
        return follower

    # The leader --------------------------------------------------------------------------------------------

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

    # A follower. In a thread, because connecting blocks ------------------------------------------------------

    @property
    def _who(self) -> str:
        node = "this node" if self._job.node_rank < 0 else f"node {self._job.node_rank}"
        return f"{node} ({self._claim.identity})"

    def _join(self) -> JoinedConnection:
        """Return the connection to the leader once all nodes have arrived; raise the reason where they do not."""
        retry_until = 0.0
        while True:
            sock = connect.connect_tcp(
                self._address,
                self._deadline,
                who=self._who,
                late_names=True,
                several_hosts=True,
                notify=self._progress,
                wording=NODES,
            )
            try:
                joined = self._answer(sock)
            except BaseException as problem:
                sock.close()
                now = time.monotonic()
                if not isinstance(problem, AllhandsError) or problem.slug != "wrong-service":
                    raise
                retry_until = retry_until or now + _RETRY_S
                if now >= min(retry_until, self._deadline):
                    raise
            else:
                if joined is not None:
                    return joined
                sock.close()
                if time.monotonic() >= self._deadline:
                    raise self._lost("it closed: the job there is over")
            time.sleep(_POLL_S)

    def _answer(self, sock: socket.socket) -> JoinedConnection | None:
        """Authenticate, send the claim, and wait; None where the peer is the closing leader of an earlier job."""
        opening = handshake.hello(
            job=self._job.name, attempt=0, rank=self._job.node_rank, world_size=self._job.nodes, token=self._secret
        )
        address = str(self._address)
        splitter, frames = handshake.authenticate(sock, opening, self._secret, address, self._deadline, wording=NODES)
        left_s = max(0.0, self._deadline - time.monotonic())
        self._send(sock, msgspec.structs.replace(self._claim, timeout_s=left_s))
        while True:
            for index, frame in enumerate(frames):
                match decode_from_leader(frame):
                    case messages.JobLayout() as layout:
                        return JoinedConnection(sock, splitter, frames[index + 1 :], layout)
                    case Closing():
                        return None
                    case Refused(diagnosis):
                        raise error(diagnosis)
                    case Waiting(line):
                        self._progress(line)
                    case Ping():
                        self._send(sock, Pong())
                    case messages.Stop(number, _, by):
                        raise RendezvousStopped(number, by)
                    case LogLine():
                        pass
                    case message:
                        raise self._lost(f"it sent a {type(message).__name__} during the roll call")
            frames = self._receive(sock, splitter)

    def _receive(self, sock: socket.socket, splitter: Splitter) -> list[bytes]:
        while True:
            if self._stop_number:
                self._send(sock, messages.Stop(self._stop_number, 1))
                raise RendezvousStopped(self._stop_number, "this node")
            try:
                until = min(self._deadline + _REFUSAL_S, time.monotonic() + _POLL_S)
                frames = handshake.receive(sock, splitter, until)
            except OSError as problem:
                raise self._lost(problem.strerror or str(problem)) from problem
            if frames:
                return frames
            if frames == []:
                raise self._lost("it closed the connection without a reason")
            if time.monotonic() >= self._deadline + _REFUSAL_S:
                raise fail(
                    "coordinator-silent",
                    f"node 0's agent at {self._address} did not decide by the deadline",
                    who=self._who,
                    why=f"it received the claim and did not decide within {duration(self._job.timeout_s)} (observed)",
                    fix="check the agent of node 0: it may be stopped or starved",
                    ranks=(0,),
                    certain=False,
                )

    def _send(self, sock: socket.socket, message: FromFollower) -> None:
        # Where the leader closed the connection, its last message can still be read.
        with contextlib.suppress(OSError):
            handshake.send(sock, pack(encode(message)), self._deadline + _REFUSAL_S)

    def _lost(self, how: str) -> AllhandsError:
        return fail(
            "coordinator-lost",
            f"node 0's agent at {self._address} went away during the roll call",
            who=self._who,
            why=f"{how} (observed)",
            fix="see the output of node 0; start all nodes again",
            ranks=(0,),
        )


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Run ``work``, which blocks, in a daemon thread: unlike asyncio.to_thread, an exit does not wait for it."""
    done: Future[_Result] = Future()
    # It cannot be cancelled any more.
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as problem:  # noqa: BLE001  # raised by the future
            done.set_exception(problem)

    threading.Thread(target=run, name="allhands-rendezvous", daemon=True).start()
    return await asyncio.wrap_future(done)
