"""A follower: the agent of a node other than 0. It follows the leader's messages, and notices its loss."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import NamedTuple

import msgspec

from ...control.messages import Closing, FrameError, LogLine, Ping, Pong, Refused, Splitter, Waiting, encode, pack
from ...diagnosis import Diagnosis
from ...environments.world import Address
from ...errors import error
from ..attempt import NodeReport, next_change
from ..node_role import NodeRole
from ..options import Job
from ..verdict import AttemptResult, NodeLoss, judge, result, verdict_text
from . import agent_messages as messages
from .agent_messages import (
    SILENCE_NOTICE_S,
    SILENCE_TIMEOUT_S,
    FromFollower,
    FromLeader,
    StopCounter,
    decode_from_leader,
    silence_text,
)
from .tunnel import WorkerTunnel

__all__ = ["Follower", "JoinedConnection"]

# How often the leader's silence is checked, and how often a line about it is printed.
_TICK_S, _NOTICE_S = 1.0, 10.0


class JoinedConnection(NamedTuple):
    """The connection to the leader after the roll call, with the frames that were received after the layout."""

    sock: socket.socket
    splitter: Splitter
    frames: list[bytes]
    layout: messages.JobLayout


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
        """Handle the end of the leader, or of the network to it."""
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
        self._ending_s = self._ending_s or time.monotonic()
        attempt = self.attempt
        if attempt is None:
            self._early.append(message)
            return
        match message:
            case messages.EndAttempt(number, wait_s) if number == self.number:
                attempt.end(wait_s)
            case messages.CollectStacks(number) if number == self.number:
                attempt.end_stalled()
            case messages.Stop(number, times, by):
                stops = self._stop_counter.add(by, times)
                if stops:
                    self.message(f"{by} was asked to stop: ending the job")
                for _ in range(stops):
                    attempt.stop(number)
            case _:
                pass  # Of an earlier attempt.

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
            await next_change(self._changed)
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
        self._ending_s = self._ending_s or time.monotonic()
        self._send(messages.WorkerFailed(self.number))

    def stall_changed(self, *, stalled: bool, in_collective: bool) -> None:
        """Report it to the leader, which has the states of all nodes."""
        self._send(messages.StallChanged(self.number, stalled, in_collective))

    def stop(self, number: int) -> int:
        """Report it to the leader, which notifies the others."""
        self._ending_s = self._ending_s or time.monotonic()
        self._own_stops += 1
        self._send(messages.Stop(number, self._own_stops))
        self._changed.set()
        return self._stop_counter.add("this node", self._own_stops)

    async def settle(self, report: NodeReport) -> AttemptResult:
        """Send the report to the leader, and wait for its verdict."""
        self._tunnel.close()
        self._send(messages.ReportNode(self.number, report, time.monotonic()))
        # A second request to stop does not wait for other nodes.
        while self._over is None and self._loss is None and self._own_stops < 2:
            # The leader sends a Ping every second. It is given up while the job is ending.
            now = time.monotonic()
            quiet_s = now - self._received_s
            if self._ending_s is not None and now - max(self._received_s, self._ending_s) >= SILENCE_TIMEOUT_S:
                self._loss = self._leader_loss("", observed=False)
                break
            if quiet_s >= SILENCE_NOTICE_S and now - self._noticed_s >= _NOTICE_S:
                self._noticed_s = now
                self.message(f"waiting for {silence_text(f'node 0 ({self._hosts[0]})', quiet_s)}")
            await next_change(self._changed, _TICK_S)
        return self._over or self._own_result(report)

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

    async def close(self) -> None:
        """Close the connection."""
        self._closed = True
        self._tunnel.close()
        if self._transport is not None:
            self._transport.close()
        # One iteration of the loop lets the transports flush and close their descriptors.
        await asyncio.sleep(0)
