"""The leader: node 0's agent. It serves the agents' roll call, directs the followers, and judges the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from ...control.connection import Connection
from ...control.coordinator import Coordinator
from ...control.messages import Claim, Closing, Refused, Waiting, encode
from ...control.rollcall import Arrival, Waits
from ...control.wording import NODES
from ...diagnosis import Diagnosis, count
from ...errors import error
from ..attempt import NodeReport, next_change
from ..node_role import NodeRole
from ..options import Job
from ..termination import EXPLAIN_S
from ..verdict import AttemptResult, NodeLoss, Stall
from . import agent_messages as messages
from .agent_messages import (
    SILENCE_NOTICE_S,
    SILENCE_TIMEOUT_S,
    FromFollower,
    FromLeader,
    RendezvousStopped,
    StopCounter,
    decode_from_follower,
    silence_text,
)
from .tunnel import CoordinatorTunnel

__all__ = ["AgentCoordinator", "FollowerConnection", "Leader", "job_stalled", "merge_reports", "on_local_clock"]

# The node rank in the claim of an agent that was given none.
_UNASSIGNED = -1

# How often the nodes that are missing are named among the ranks' output.
_NOTICE_S = 10.0

# Time for followers to read the last message before their connections close.
_GOODBYE_S = 1.0


class FollowerConnection(Connection):
    """The connection of another node's agent."""

    coordinator: AgentCoordinator

    # Whether its node rank was assigned here, and may change while the roll call is open.
    rank_assigned = False

    def _handle_proven(self, frame: bytes) -> None:
        if self.arrival is None:
            super()._handle_proven(frame)
        else:
            self.coordinator.on_message(self, decode_from_follower(frame))


class AgentCoordinator(Coordinator):
    """The agents' roll call: a coordinator whose ranks are nodes. Later messages are passed to the leader."""

    members: dict[int, FollowerConnection]  # type: ignore[assignment]  # _make_connection makes all of them

    def __init__(self, own: Arrival, *, token: bytes) -> None:
        super().__init__(token=token)
        self.roll.wording = NODES
        self.roll.arrive(own)
        # Called for each message; for a lost node, with the reason; for the line about missing nodes; and when the
        # roll call is over.
        self.on_message: Callable[[FollowerConnection, FromFollower], None] = lambda *_: None
        self.on_lost: Callable[[FollowerConnection, str], None] = lambda *_: None
        self.on_waiting: Callable[[str], None] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def decided(self) -> bool:
        """Whether the roll call is over: all nodes have arrived, or it was refused."""
        return self.completed_at is not None or self.refused is not None

    def reopen(self, timeout_s: float) -> None:
        """Open the roll call again for the nodes that are missing."""
        now = time.monotonic()
        self.completed_at = None
        self.roll.opened = now
        self.roll.deadline = now + timeout_s
        for rank, arrival in self.roll.present.items():
            renewed = msgspec.structs.replace(arrival, deadline=now + timeout_s)
            self.roll.present[rank] = renewed
            if rank in self.members:
                self.members[rank].arrival = renewed

    def _make_connection(self) -> FollowerConnection:
        return FollowerConnection(self)

    def claim_received(self, connection: Connection, claim: Claim) -> None:
        """Register an agent; one without --node-rank gets the first free rank."""
        if not isinstance(connection, FollowerConnection):
            raise TypeError("an agent's connection is a FollowerConnection")
        rank, size = connection.opening.rank, connection.opening.world_size
        # One connection carries what the coordinator sends to all ranks of the node.
        connection.most_unread *= 1 + max(0, claim.local_world_size)
        if rank == _UNASSIGNED:
            free = self._free_rank(size)
            if free is None:
                connection.send(Refused(self._surplus(connection, claim)))
                return
            connection.rank_assigned = True
            connection.opening = msgspec.structs.replace(connection.opening, rank=free)
        elif not self.decided:
            self._reassign(rank, size)
        super().claim_received(connection, claim)

    def _free_rank(self, size: int) -> int | None:
        return next((rank for rank in range(size) if rank not in self.roll.present), None)

    def _reassign(self, rank: int, size: int) -> None:
        """Give another rank to an agent that was assigned ``rank``, which an agent with --node-rank claims."""
        follower = self.members.get(rank)
        free = self._free_rank(size)
        if follower is None or not follower.rank_assigned or follower.arrival is None or free is None:
            return
        self.roll.leave(follower.arrival, time.monotonic())
        del self.roll.gone[rank], self.members[rank]
        follower.opening = msgspec.structs.replace(follower.opening, rank=free)
        follower.arrival = msgspec.structs.replace(follower.arrival, rank=free)
        self.members[free] = follower
        self.roll.arrive(follower.arrival)

    def _surplus(self, follower: FollowerConnection, claim: Claim) -> Diagnosis:
        return Diagnosis(
            "duplicate-rank",
            f"all {count(self.roll.world_size, 'node')} of the job are there already",
            who=f"the agent on {claim.identity} came from {follower.came_from}",
            why="it has no --node-rank, and no number is free",
            fix="start as many agents as --nnodes says, or end the job that is left over at this address",
            hosts=(claim.identity.host,),
        )

    def _complete(self, *, one_host: bool) -> None:  # noqa: ARG002  # the signature of Coordinator
        self.on_change()

    def _refuse(self, diagnosis: Diagnosis, now: float) -> None:
        super()._refuse(diagnosis, now)
        self.on_change()

    def _show_waiting(self, waits: Waits) -> None:
        self.on_waiting(waits.explanation)
        for follower in self.members.values():
            follower.send(Waiting(waits.explanation))

    def disconnected(self, connection: Connection, how: str) -> None:
        """Handle the end of an agent's connection."""
        follower = self.members.get(connection.rank)
        if self.completed_at is None or connection.arrival is None or follower is not connection:
            super().disconnected(connection, how)
            return
        del self.members[connection.rank]
        self.roll.leave(connection.arrival, time.monotonic())
        super().disconnected(connection, how)
        self.on_lost(follower, how)


class Leader(NodeRole):
    """The role of node 0. Created when the agents' roll call is open."""

    def __init__(
        self, job: Job, coordinator: AgentCoordinator, *, address: str, token: str, has_shared_token: bool
    ) -> None:
        """``has_shared_token`` is whether every node was given the token."""
        super().__init__(job, token=token, address=address)
        self._has_shared_token = has_shared_token
        self._agents = coordinator
        self._agents.on_message, self._agents.on_lost = self._received, self._lost
        self._tunnel = CoordinatorTunnel(self._send)
        self._tunnel.coordinator = lambda: self._host.coordinator if self._host is not None else None
        self._coordinator_opened = self._tunnel.attach
        self._hosts: list[str] = []
        self._changed = asyncio.Event()
        # When the workers of all nodes are expected to end by themselves; None while the attempt is not ending.
        self._ending_s: float | None = None
        self._reports: dict[int, NodeReport] = {}
        self._stall_states: dict[int, tuple[bool, bool]] = {}
        self._stop_counter = StopCounter()
        self._own_stops = 0
        self._noticed_s = 0.0

    # The roll call -----------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Wait for the agents of all nodes; raise the reason where they do not all arrive."""
        present = self._agents.roll.present
        while True:
            self._agents.on_change = self._changed.set
            while not self._agents.decided and not self._stopped:
                await next_change(self._changed)
            if self._stopped:
                raise RendezvousStopped(self._stopped, self._stopped_by)
            if self._agents.refused is not None:
                # Agents that are still starting receive the same diagnosis.
                await self._agents.finished.wait()
                raise error(self._agents.refused)
            if len(present) == self.job.nodes:
                break
            # A node was lost right after its arrival.
            self._agents.reopen(self.job.timeout_s)
        claims = [present[node].claim for node in range(self.job.nodes)]
        self._hosts = [claim.identity.host for claim in claims]
        self.job = self.job._replace(node_rank=0, layout=tuple(claim.local_world_size for claim in claims))
        token = "" if self._has_shared_token else self.token
        for node in list(self._agents.members):
            self._send(node, messages.JobLayout(node, list(self.job.layout), self._hosts, token))

    def _name(self, node: int) -> str:
        arrival = self._agents.roll.present.get(node)
        host = self._hosts[node] if self._hosts else arrival.claim.identity.host if arrival is not None else ""
        return f"node {node} ({host})" if host else f"node {node}"

    # To the followers --------------------------------------------------------------------------------------

    def _send(self, node: int, message: FromLeader) -> None:
        follower = self._agents.members.get(node)
        if follower is not None:
            follower.send_body(encode(message))

    def _send_all(self, message: FromLeader, excluded: int = -1) -> None:
        for node in list(self._agents.members):
            if node != excluded:
                self._send(node, message)

    async def begin(self, number: int) -> AttemptResult | None:
        """Start the attempt on all nodes; where one was lost, wait for its agent to be started again."""
        missing = [node for node in range(self.job.nodes) if node not in self._agents.roll.present]
        if missing:
            # A node may also have been lost after its report, which is no `NodeLoss`.
            names = {loss.node: str(loss) for loss in self._losses}
            lost = " and ".join(names.get(node, self._name(node)) for node in missing)
            self.message(f"waiting for {lost}: the job goes on once the agent there is started again (--timeout)")
            self._agents.on_waiting = self._notice
            self._agents.reopen(self.job.timeout_s)
            try:
                await self.gather()
            except RendezvousStopped:
                text = f"allhands: the job was stopped on {self._stopped_by} while it waited for a node\n"
                over = AttemptResult(128 + self._stopped, text)
                self._send_all(over)
                return over
        self._reports, self._stall_states, self._losses, self._ending_s = {}, {}, [], None
        await super().begin(number)
        self._send_all(messages.StartAttempt(number, self.master.host, self.master.port))
        return None

    def _notice(self, line: str) -> None:
        now = time.monotonic()
        if now - self._noticed_s >= _NOTICE_S:
            self._noticed_s = now
            self.message(line)

    def worker_failed(self) -> None:
        """End the attempt on the other nodes."""
        self._end_attempt(EXPLAIN_S)

    def _end_attempt(self, wait_s: float, excluded: int = -1) -> None:
        if self._ending_s is None:
            self._ending_s = time.monotonic() + wait_s
            self._send_all(messages.EndAttempt(self.number, wait_s), excluded)

    def stall_changed(self, *, stalled: bool, in_collective: bool) -> None:
        """Record it for this node."""
        self._note_stall(0, stalled=stalled, in_collective=in_collective)

    def _note_stall(self, node: int, *, stalled: bool, in_collective: bool) -> None:
        self._stall_states[node] = (stalled, in_collective)
        # Nodes whose workers have all ended are not waited for.
        running = [each for each in (0, *self._agents.members) if each not in self._reports]
        if self._ending_s is None and job_stalled(running, self._stall_states):
            self._ending_s = time.monotonic()
            self._send_all(messages.CollectStacks(self.number))
            if self.attempt is not None:
                self.attempt.end_stalled()

    def stop(self, number: int) -> int:
        """Send the request to every node, with this node's name."""
        self._own_stops += 1
        return self._stop(0, number, self._own_stops)

    def _stop(self, node: int, number: int, times: int) -> int:
        name = self._name(node)
        self._stopped, self._stopped_by = self._stopped or number, self._stopped_by or name
        self._ending_s = self._ending_s or time.monotonic()
        self._send_all(messages.Stop(number, times, name), excluded=node)
        self._changed.set()
        return self._stop_counter.add(name, times)

    # From the followers ------------------------------------------------------------------------------------

    def _received(self, follower: FollowerConnection, message: FromFollower) -> None:
        node = follower.rank
        match message:
            case messages.ChannelOpened() | messages.ChannelData() | messages.ChannelClosed():
                self._tunnel.received(node, follower.came_from, message)
            case messages.WorkerFailed(attempt) if attempt == self.number:
                self._end_attempt(EXPLAIN_S, excluded=node)
                if self.attempt is not None:
                    self.attempt.end()
            case messages.StallChanged(attempt, stalled, in_collective) if attempt == self.number:
                self._note_stall(node, stalled=stalled, in_collective=in_collective)
            case messages.Stop(number, times):
                stops = self._stop(node, number, times)
                if stops:
                    self.message(f"{self._name(node)} was asked to stop: ending the job")
                for _ in range(stops):
                    if self.attempt is not None:
                        self.attempt.stop(number)
            case messages.ReportNode(attempt, report, clock_s) if attempt == self.number:
                self._reports[node] = on_local_clock(report, time.monotonic() - clock_s)
                self._changed.set()
            case _:
                pass  # Of an earlier attempt, or a Pong.

    def _lost(self, follower: FollowerConnection, how: str) -> None:
        node = follower.rank
        self._tunnel.node_lost(node, f"the agent of its node was lost: {how}")
        if node not in self._reports:
            self._losses.append(self._loss(follower, how))
        self._end_attempt(EXPLAIN_S)
        if self.attempt is not None:
            self.attempt.end()
        self._changed.set()

    def _loss(self, follower: FollowerConnection, how: str, *, observed: bool = True) -> NodeLoss:
        node = follower.rank
        return NodeLoss(
            node,
            self._hosts[node] if self._hosts else "",
            follower.came_from,
            self.job.ranks_of_node(node),
            how,
            last_received_s=follower.received_at,
            seen_s=time.monotonic(),
            observed=observed,
        )

    # The end -----------------------------------------------------------------------------------------------

    async def settle(self, report: NodeReport) -> AttemptResult:
        """Wait for the reports of all nodes, judge, and send the verdict to every node."""
        self._reports[0] = report
        await self._collect_reports()
        ended = await super().settle(merge_reports(self._reports))
        self._send_all(msgspec.structs.replace(ended, text=ended.brief))
        return ended

    async def _collect_reports(self) -> None:
        while missing := [follower for node, follower in self._agents.members.items() if node not in self._reports]:
            timeout_s = 1.0
            if self._ending_s is not None:
                left_s = self._ending_s + self.job.grace_s + SILENCE_TIMEOUT_S - time.monotonic()
                if left_s <= 0:
                    self._losses += [self._loss(follower, "", observed=False) for follower in missing]
                    return
                timeout_s = min(timeout_s, left_s)
            for follower in missing:
                quiet_s = time.monotonic() - follower.received_at
                if quiet_s >= SILENCE_NOTICE_S:
                    self._notice(f"waiting for {silence_text(self._name(follower.rank), quiet_s)}")
            await next_change(self._changed, timeout_s)

    async def close(self) -> None:
        """Wait a moment for the followers to read the verdict, then close every connection."""
        await self._close_attempt()
        self._send_all(Closing())
        self._agents.on_lost = lambda *_: self._changed.set()
        deadline = time.monotonic() + _GOODBYE_S
        while self._agents.members and (left_s := deadline - time.monotonic()) > 0:
            await next_change(self._changed, left_s)
        await self._agents.close()


# Conclusions from the reports of all nodes. Pure. ----------------------------------------------------------------


def on_local_clock(report: NodeReport, offset_s: float) -> NodeReport:
    """Return a report of another node with ``offset_s`` added to its times."""
    outcomes = []
    for outcome in report.outcomes:
        record = dict(outcome.record)
        if "at_s" in record:
            record["at_s"] = float(record["at_s"]) + offset_s
        # 0 where no signal was sent.
        sent_s = outcome.sent_s + offset_s if outcome.sent else 0.0
        outcomes.append(
            msgspec.structs.replace(outcome, record=record, ended_s=outcome.ended_s + offset_s, sent_s=sent_s)
        )
    return msgspec.structs.replace(report, outcomes=outcomes)


def merge_reports(reports: Mapping[int, NodeReport]) -> NodeReport:
    """Return one report of all nodes; leftovers name their node."""
    nodes = sorted(reports)
    outcomes = [outcome for node in nodes for outcome in reports[node].outcomes]
    leftovers = [f"node {node}: {each}" for node in nodes for each in reports[node].leftovers]
    stopped = next((report.stopped for report in reports.values() if report.stopped), 0)
    stalls = [stall for node in nodes if (stall := reports[node].stall) is not None]
    merged = None
    if stalls:
        merged = Stall(
            recordings={rank: each for stall in stalls for rank, each in stall.recordings.items()},
            stacks={rank: text for stall in stalls for rank, text in stall.stacks.items()},
            states={rank: state for stall in stalls for rank, state in stall.states.items()},
            pids={rank: pid for stall in stalls for rank, pid in stall.pids.items()},
            after_s=max(stall.after_s for stall in stalls),
        )
    return NodeReport(sorted(outcomes, key=lambda outcome: outcome.rank), merged, stopped, leftovers)


def job_stalled(nodes: Iterable[int], states: Mapping[int, tuple[bool, bool]]) -> bool:
    """Return whether every one of ``nodes`` makes no progress, and one of them has a rank in a collective.

    ``states`` has what `NodeRole.stall_changed` reported for each node.
    """
    known = [states.get(node, (False, False)) for node in nodes]
    return bool(known) and all(stalled for stalled, _ in known) and any(inside for _, inside in known)
