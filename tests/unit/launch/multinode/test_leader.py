"""The conclusions of the leader from the reports of all nodes, and its messages with a real follower."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from allhands.environments.world import Address
from allhands.errors import RollCallTimeout
from allhands.launch.attempt import NodeReport
from allhands.launch.multinode.agent_rendezvous import AgentRendezvous
from allhands.launch.multinode.follower import Follower
from allhands.launch.multinode.leader import Leader, job_stalled, merge_reports, on_local_clock
from allhands.launch.options import Job
from allhands.launch.termination import EXPLAIN_S
from allhands.launch.verdict import Outcome, Stall
from allhands.observe.flight_recorder import Entry, FlightRecorder

DEADLINE_S = 10.0


def outcome(rank: int, status: int = 0, node: int = 0, **parts: Any) -> Outcome:
    """Return how a rank ended."""
    return Outcome(rank, f"host-{'abc'[node]}", 800 + rank, status, node=node, **parts)


def report(*outcomes: Outcome, stall: Stall | None = None, stopped: int = 0, left: tuple[str, ...] = ()) -> NodeReport:
    """Return the report of one node."""
    return NodeReport(list(outcomes), stall, stopped, list(left))


def recording(rank: int) -> FlightRecorder:
    """Return a flight recorder with one call."""
    note = Entry(1, "g", 1, "all_reduce", "SUM", "float32", (2, 3), 24, -1, "t.py:1", "running", True, 1.0, 2.0, 0.0)
    return FlightRecorder(1, rank, 4, (note,))


def stalled(rank: int) -> Stall:
    """Return the state of the one rank of a node when the job stalled."""
    return Stall({rank: recording(rank)}, {rank: "stack"}, {rank: "sleeping"}, {rank: 800 + rank}, 3.0)


def test_ranks_of_nodes() -> None:
    """Nodes may have different numbers of ranks; ranks are numbered in the order of nodes."""
    job = Job("a.py", local_world_size=3, nodes=3, node_rank=1, layout=(2, 3, 1))
    assert (job.world_size, job.rank(0), job.rank(2)) == (6, 2, 4)
    assert [job.ranks_of_node(node) for node in range(3)] == [(0, 1), (2, 3, 4), (5,)]
    assert Job("a.py").ranks_of_node(1) == ()


def test_on_local_clock() -> None:
    """All times of a report move by the offset, except the time of a signal that was not sent."""
    record = {"end": "raised", "at_s": 10.0}
    sent = report(
        outcome(2, 1, record=record, ended_s=11.0), outcome(3, -15, sent=15, sent_s=12.0, ended_s=13.0, after_s=9.0)
    )
    first, second = on_local_clock(sent, 100.0).outcomes
    assert (first.failed_s, first.ended_s, first.sent_s) == (110.0, 111.0, 0.0)
    assert (second.sent_s, second.ended_s, second.after_s) == (112.0, 113.0, 9.0)
    assert record["at_s"] == 10.0


def test_merge_reports() -> None:
    """Outcomes are in the order of ranks, stacks of all nodes are merged, leftovers name their node."""
    whole = merge_reports(
        {
            1: report(outcome(2, node=1), outcome(3, node=1), stall=stalled(3), left=("pid 7",)),
            0: report(outcome(0), outcome(1), stall=stalled(1), stopped=signal.SIGTERM),
        }
    )
    assert [each.rank for each in whole.outcomes] == [0, 1, 2, 3]
    assert whole.stall is not None
    assert sorted(whole.stall.stacks) == [1, 3]
    assert (whole.leftovers, whole.stopped) == (["node 1: pid 7"], signal.SIGTERM)
    assert merge_reports({0: report(outcome(0))}).stall is None


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, False),
        ({0: (True, True)}, False),
        ({0: (True, True), 1: (False, False)}, False),
        ({0: (True, False), 1: (True, False)}, False),
        ({0: (True, True), 1: (True, False)}, True),
    ],
)
def test_stall_needs_all_nodes(states: dict[int, tuple[bool, bool]], expected: bool) -> None:
    """One node that waits in a collective while another makes progress is no stall."""
    assert job_stalled([0, 1], states) is expected
    assert not job_stalled([], states)


# A leader and a follower, over real connections ------------------------------------------------------------------


class Workers:
    """An attempt that records the requests to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._changed = asyncio.Event()

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        self._changed.set()

    def end(self, wait_s: float | None = None) -> None:
        """Note the request to end."""
        self._note("end", wait_s)

    def end_stalled(self) -> None:
        """Note the request to collect stacks."""
        self._note("end_stalled")

    def stop(self, number: int) -> None:
        """Note the signal."""
        self._note("stop", number)

    async def first(self) -> tuple[Any, ...]:
        """Return the first request, waiting for it."""
        while not self.calls:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), DEADLINE_S)
        return self.calls[0]


Scene = Callable[[Leader, Follower, Workers, Workers], Awaitable[None]]


def play(scene: Scene, *, max_restarts: int = 0) -> None:
    """Run ``scene`` with the roles of a job with ranks 0 and 1 on node 0, and 2 on node 1, in attempt 0."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = Address(*free.getsockname())
        job = Job("train.py", name="j", nodes=2, coordinator=address, timeout_s=DEADLINE_S, max_restarts=max_restarts)
        leading = AgentRendezvous(job._replace(node_rank=0, local_world_size=2))
        following = AgentRendezvous(job._replace(node_rank=1, local_world_size=1))
        leader, follower = await asyncio.gather(leading.run(), following.run())
        assert isinstance(leader, Leader)
        assert isinstance(follower, Follower)
        workers = Workers(), Workers()
        try:
            assert (await leader.begin(0), await follower.begin(0)) == (None, None)
            leader.attempt, follower.attempt = workers  # type: ignore[assignment]  # they have what roles call
            await asyncio.wait_for(scene(leader, follower, *workers), 3 * DEADLINE_S)
        finally:
            await asyncio.gather(leader.close(), follower.close())

    asyncio.run(run())


def test_roles_agree_on_the_job() -> None:
    """Both nodes know all ranks, one token, and one MASTER_ADDR and MASTER_PORT."""

    async def scene(leader: Leader, follower: Follower, *_: Workers) -> None:
        assert (leader.job.layout, follower.job.layout) == ((2, 1), (2, 1))
        assert (leader.job.node_rank, follower.job.node_rank, follower.job.rank(0)) == (0, 1, 2)
        assert leader.token == follower.token != ""
        assert leader.master == follower.master

    play(scene)


def test_failure_ends_the_attempt_on_all_nodes() -> None:
    """A failure on either node ends the workers of the other."""

    async def at_follower(_: Leader, follower: Follower, leaders: Workers, __: Workers) -> None:
        follower.worker_failed()
        assert (await leaders.first())[0] == "end"

    async def at_leader(leader: Leader, _: Follower, __: Workers, followers: Workers) -> None:
        leader.worker_failed()
        assert await followers.first() == ("end", EXPLAIN_S)

    play(at_follower)
    play(at_leader)


def test_stall_ends_the_attempt_on_all_nodes() -> None:
    """Once every node reports that it makes no progress, all collect stacks; one alone does nothing."""

    async def scene(leader: Leader, follower: Follower, leaders: Workers, followers: Workers) -> None:
        leader.stall_changed(stalled=True, in_collective=True)
        assert leaders.calls == []
        follower.stall_changed(stalled=True, in_collective=False)
        assert await leaders.first() == await followers.first() == ("end_stalled",)

    play(scene)


def test_signal_reaches_the_other_node() -> None:
    """A signal at the follower stops the leader's workers, and the verdict names the node."""

    async def scene(leader: Leader, follower: Follower, leaders: Workers, _: Workers) -> None:
        assert follower.stop(signal.SIGTERM) == 1
        assert await leaders.first() == ("stop", signal.SIGTERM)
        stopped = [outcome(rank, -15, sent=15) for rank in range(2)]
        first, second = await asyncio.gather(
            leader.settle(report(*stopped, stopped=signal.SIGTERM)),
            follower.settle(report(outcome(2, -15, node=1, sent=15), stopped=signal.SIGTERM)),
        )
        assert first.exit_code == second.exit_code == 128 + signal.SIGTERM
        assert "the job was stopped by SIGTERM on node 1 (" in first.text

    play(scene)


def test_verdict_on_all_nodes() -> None:
    """The leader judges the outcomes of all nodes; the follower prints the short verdict and exits alike."""

    async def scene(leader: Leader, follower: Follower, *_: Workers) -> None:
        first, second = await asyncio.gather(
            leader.settle(report(outcome(0), outcome(1))), follower.settle(report(outcome(2, 3, node=1)))
        )
        assert first.exit_code == second.exit_code == 3
        assert "rank 2 ended with exit status 3" in first.text
        assert "(the whole verdict is on node 0)" in second.text
        assert not first.restart
        assert json.loads(first.report) == json.loads(second.report)

    play(scene)


def test_restart_on_all_nodes() -> None:
    """A verdict that allows a restart begins the next attempt on every node."""

    async def scene(leader: Leader, follower: Follower, *_: Workers) -> None:
        first, second = await asyncio.gather(
            leader.settle(report(outcome(0, 3), outcome(1))), follower.settle(report(outcome(2, node=1)))
        )
        assert first.restart
        assert second.restart
        assert await asyncio.gather(leader.begin(1), follower.begin(1)) == [None, None]
        assert leader.number == follower.number == 1

    play(scene, max_restarts=1)


def test_lost_follower() -> None:
    """A follower that is gone without its report ends the leader's workers, and is to blame."""

    async def scene(leader: Leader, follower: Follower, leaders: Workers, _: Workers) -> None:
        await follower.close()
        assert (await leaders.first())[0] == "end"
        ended = await leader.settle(report(outcome(0, -15, sent=15), outcome(1, -15, sent=15)))
        assert ended.exit_code == 1
        assert "was lost, and rank 2 with it" in ended.text

    play(scene)


def test_missing_node() -> None:
    """Where a node does not arrive by the deadline, the error on the others names it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Address(*free.getsockname())
    job = Job("train.py", name="j", nodes=2, node_rank=0, coordinator=address, timeout_s=0.5)

    async def run() -> None:
        await AgentRendezvous(job).run()

    with pytest.raises(RollCallTimeout, match="missing-ranks"):
        asyncio.run(run())
