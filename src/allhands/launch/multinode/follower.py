"""A follower: the agent of a node other than 0. It joins the leader, follows its messages, and notices its loss."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from importlib import metadata
from typing import NamedTuple

import msgspec

from ... import settings
from ..._version import __version__
from ...control import connect, handshake
from ...control.messages import (
    Claim,
    Closing,
    FrameError,
    LogLine,
    Ping,
    Pong,
    Refused,
    Splitter,
    Waiting,
    encode,
    pack,
)
from ...control.process_identity import this_process
from ...control.waiting_line import WaitingLine
from ...control.wording import NODES
from ...diagnosis import Diagnosis, duration
from ...environments.world import Address
from ...errors import AllhandsError, error, fail
from ..attempt import NodeReport
from ..node_role import NodeRole
from ..options import Job
from ..verdict import NodeLoss, judge
from ..verdict_text import AttemptResult, result, verdict_text
from . import agent_messages as messages
from .agent_messages import (
    SILENCE_NOTICE_S,
    SILENCE_TIMEOUT_S,
    FromFollower,
    FromLeader,
    RendezvousStopped,
    StopCounter,
    decode_from_leader,
    silence_text,
)
from .tunnel import WorkerTunnel

__all__ = ["Follower", "Join", "JoinedConnection", "agent_claim"]

# How often a request to stop is checked while the roll call is open.
_POLL_S = 0.2

# Past the deadline, the leader's refusal may still be in transit.
_REFUSAL_S = 1.0

# How long to retry an address where another service answers: the previous job may be closing there.
_RETRY_S = 2.0

# Longer texts of a worker's end are cut, so that the report of a node fits in one frame.
_MOST_TEXT = 1 << 18

# How often the leader's silence is checked, and how often a line about it is printed.
_TICK_S, _NOTICE_S = 1.0, 10.0


# Joining ----------------------------------------------------------------------------------------------------------


class JoinedConnection(NamedTuple):
    """The connection to the leader after the roll call, with the frames that were received after the layout."""

    sock: socket.socket
    splitter: Splitter
    frames: list[bytes]
    layout: messages.JobLayout


def agent_claim(job: Job) -> Claim:
    """Return this agent's claim in the agents' roll call. ``local_world_size`` is how many ranks it will start."""
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
        timeout_s=job.timeout_s,
        local_world_size=job.local_world_size,
        mixed_versions=settings.read().mixed_versions,
    )


class Join:
    """Connects to the leader and answers the agents' roll call. `run` blocks; call `stop` from another thread."""

    def __init__(self, job: Job, address: Address, token: bytes, deadline: float, progress: WaitingLine) -> None:
        self._job, self._address, self._token = job, address, token
        self._deadline, self._progress = deadline, progress
        self._claim = agent_claim(job)
        self._stop = 0
        node = "this node" if job.node_rank < 0 else f"node {job.node_rank}"
        self._who = f"{node} ({self._claim.identity})"

    def stop(self, number: int) -> None:
        """Give up because this node received a signal."""
        self._stop = number

    def run(self) -> JoinedConnection:
        """Return the connection once all nodes have arrived; raise the reason where they do not."""
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
            job=self._job.name, attempt=0, rank=self._job.node_rank, world_size=self._job.nodes, token=self._token
        )
        address = str(self._address)
        splitter, frames = handshake.authenticate(sock, opening, self._token, address, self._deadline, wording=NODES)
        left_s = max(0.0, self._deadline - time.monotonic())
        self._send(sock, msgspec.structs.replace(self._claim, timeout_s=left_s))
        while True:
            for index, frame in enumerate(frames):
                match decode_from_leader(frame):
                    case messages.JobLayout() as layout:
                        return JoinedConnection(sock, splitter, frames[index + 1 :], layout)
                    case Closing():
                        return None
                    case message:
                        self._handle(sock, message)
            frames = self._receive(sock, splitter)

    def _handle(self, sock: socket.socket, message: FromLeader) -> None:
        match message:
            case Refused(diagnosis):
                raise error(diagnosis)
            case Waiting(line):
                self._progress(line)
            case Ping():
                self._send(sock, Pong())
            case messages.Stop(number, by):
                raise RendezvousStopped(number, by)
            case LogLine():
                pass
            case _:
                raise self._lost(f"it sent a {type(message).__name__} during the roll call")

    def _receive(self, sock: socket.socket, splitter: Splitter) -> list[bytes]:
        while True:
            if self._stop:
                self._send(sock, messages.RequestStop(self._stop, 1))
                raise RendezvousStopped(self._stop, "this node")
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


# Following --------------------------------------------------------------------------------------------------------


class Follower(NodeRole, asyncio.Protocol):
    """The role of a node other than 0, and the protocol of its connection to the leader."""

    def __init__(self, job: Job, joined: JoinedConnection, *, token: str) -> None:
        super().__init__(job, token=joined.layout.token or token, address=str(joined.sock.getsockname()[0]))
        self._joined = joined
        self._leader_address = str(joined.sock.getpeername()[0])
        self._splitter = joined.splitter
        self._tunnel = WorkerTunnel(self._send)
        self._transport: asyncio.Transport | None = None
        # The last attempt that the leader started, and its last verdict.
        self._started = -1
        self._over: AttemptResult | None = None
        self._changed = asyncio.Event()
        self._loss: NodeLoss | None = None
        self._closed = False
        self._refused: Diagnosis | None = None
        # Messages that arrived before the attempt that they are for.
        self._early: list[FromLeader] = []
        self._received_s = time.monotonic()
        # Since when the attempt is ending; None while it is not.
        self._ending_s: float | None = None
        self._noticed_s = 0.0
        self._stop_counter, self._own_stops = StopCounter(), 0
        self._hosts: list[str] = []
        self._set_layout(joined.layout)

    async def connect(self) -> None:
        """Continue with the connection in the event loop."""
        self._joined.sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._joined.sock)
        for frame in self._joined.frames:
            self._received(frame)

    def _set_layout(self, layout: messages.JobLayout) -> None:
        self._hosts = layout.hosts
        self.job = self.job._replace(node_rank=layout.node, layout=tuple(layout.ranks))

    # The connection ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]  # asyncio passes a Transport to stream protocols

    def data_received(self, data: bytes) -> None:
        """Handle each message; a malformed one ends the connection."""
        self._received_s = time.monotonic()
        try:
            for frame in self._splitter.feed(data):
                self._received(frame)
        except (FrameError, msgspec.MsgspecError) as problem:
            self._leader_lost(f"it sent what is no message ({problem})")

    def connection_lost(self, exc: Exception | None) -> None:
        """Entry that the leader is gone, or that this node is cut off from it."""
        self._leader_lost(f"the connection to it broke ({exc})" if exc is not None else "the connection to it closed")

    def pause_writing(self) -> None:
        """Stop reading from workers: the connection is full."""
        self._tunnel.pause(paused=True)

    def resume_writing(self) -> None:
        """Continue reading from workers."""
        self._tunnel.pause(paused=False)

    def _leader_lost(self, how: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        if self._closed or self._loss is not None:
            return
        self._loss = self._leader_loss(how)
        self._tunnel.close()
        if self.attempt is not None:
            self.attempt.end()
        self._changed.set()

    def _leader_loss(self, how: str, *, observed: bool = True) -> NodeLoss:
        host = self._hosts[0] if self._hosts else ""
        ranks, now = self.job.ranks_of_node(0), time.monotonic()
        return NodeLoss(
            0, host, self._leader_address, ranks, how, self._received_s, now, observed=observed, cut_off=True
        )

    def _send(self, message: FromFollower) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(encode(message)))

    # From the leader ---------------------------------------------------------------------------------------

    def _received(self, frame: bytes) -> None:
        match decode_from_leader(frame):
            case messages.ChannelData() | messages.ChannelClosed() as message:
                self._tunnel.received(message)
            case Ping():
                self._send(Pong())
            case messages.JobLayout() as layout:
                self._set_layout(layout)
            case messages.StartAttempt(attempt, host, port):
                self.master = Address(host, port)
                self._started = attempt
            case AttemptResult() as over:
                self._over = over
            case Refused(diagnosis):
                self._refused = diagnosis
            case LogLine(text):
                self.message(text)
            case Closing() | Waiting():
                pass  # The connection closes after a Closing.
            case message:
                self._apply(message)
        self._changed.set()

    def _apply(self, message: FromLeader) -> None:
        """Apply a message to the attempt that it is for."""
        self._note_ending()
        attempt = self.attempt
        if attempt is None:
            self._early.append(message)
            return
        match message:
            case messages.EndAttempt(number, wait_s) if number == self.number:
                attempt.end(wait_s)
            case messages.CollectStacks(number) if number == self.number:
                attempt.end_stalled()
            case messages.Stop(number, by, times):
                stops = self._stop_counter.add(by, times)
                if stops:
                    self.message(f"{by} was asked to stop: ending the job")
                for _ in range(stops):
                    attempt.stop(number)
            case _:
                pass  # Of an earlier attempt.

    def _note_ending(self) -> None:
        if self._ending_s is None:
            self._ending_s = time.monotonic()

    # NodeRole ----------------------------------------------------------------------------------------------

    async def begin(self, number: int) -> AttemptResult | None:
        """Wait for the leader to start the attempt; a result where it is lost, or ends the job instead."""
        while self._started < number:
            if self._refused is not None:
                # A node that was lost did not return in time.
                raise error(self._refused)
            if self._over is not None and not self._over.restart:
                return self._over
            if self._loss is not None or self._own_stops > 1:
                return self._own_result(None)
            await self._wait()
        self.number, self._over, self._ending_s = self._started, None, None
        return None

    async def serve(self, socket_name: str) -> None:
        """Accept the workers' connections, and forward them to the leader's coordinator."""
        if self._loss is None:
            await self._tunnel.listen(socket_name)
        elif self.attempt is not None:
            self.attempt.end()
        early, self._early = self._early, []
        for message in early:
            self._apply(message)

    def worker_failed(self) -> None:
        """Report it to the leader."""
        self._note_ending()
        self._send(messages.WorkerFailed(self.number))

    def stall_changed(self, *, stalled: bool, in_collective: bool) -> None:
        """Report it to the leader, which has the states of all nodes."""
        self._send(messages.StallChanged(self.number, stalled, in_collective))

    def stop(self, number: int) -> int:
        """Report it to the leader, which notifies the others."""
        self._note_ending()
        self._own_stops += 1
        self._send(messages.RequestStop(number, self._own_stops))
        self._changed.set()
        return self._stop_counter.add("this node", self._own_stops)

    async def settle(self, report: NodeReport) -> AttemptResult:
        """Send the report to the leader, and wait for its verdict."""
        self._tunnel.close()
        self._send(messages.ReportNode(self.number, _shortened(report), time.monotonic()))
        # A second request to stop does not wait for other nodes.
        while self._over is None and self._loss is None and self._own_stops < 2:
            self._check_silence()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wait(), _TICK_S)
        return self._over or self._own_result(report)

    def _check_silence(self) -> None:
        """Print a line about a silent leader, which sends a Ping every second; give it up while the job is ending."""
        now = time.monotonic()
        quiet_s = now - self._received_s
        if self._ending_s is not None and now - max(self._received_s, self._ending_s) >= SILENCE_TIMEOUT_S:
            self._loss = self._leader_loss("", observed=False)
        elif quiet_s >= SILENCE_NOTICE_S and now - self._noticed_s >= _NOTICE_S:
            self._noticed_s = now
            self.message(f"waiting for {silence_text(f'node 0 ({self._hosts[0]})', quiet_s)}")

    def _own_result(self, report: NodeReport | None) -> AttemptResult:
        """Judge by what is known on this node: there will be no verdict of the leader."""
        lost = [self._loss] if self._loss is not None else []
        if report is None:
            verdict = judge([], lost=lost)
            text = verdict_text(verdict, []) if verdict is not None else "allhands: the job was stopped here\n"
            return AttemptResult(1, text)
        by = "this node" if report.stopped and self._own_stops else ""
        verdict = judge(report.outcomes, stopped=report.stopped, stopped_by=by, lost=lost)
        return result(self.job, self.number, verdict, report.outcomes, report.leftovers)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """Close the connection."""
        self._closed = True
        self._tunnel.close()
        if self._transport is not None:
            self._transport.close()
        # One iteration of the loop lets the transports flush and close their descriptors.
        await asyncio.sleep(0)


def _shortened(report: NodeReport) -> NodeReport:
    outcomes = [
        msgspec.structs.replace(
            outcome,
            stack=outcome.stack[-_MOST_TEXT:],
            record={
                name: text[-_MOST_TEXT:] if isinstance(text, str) else text for name, text in outcome.record.items()
            },
        )
        for outcome in report.outcomes
    ]
    stall = report.stall
    if stall is not None:
        stall = msgspec.structs.replace(stall, stacks={rank: text[:_MOST_TEXT] for rank, text in stall.stacks.items()})
    return msgspec.structs.replace(report, outcomes=outcomes, stall=stall)
