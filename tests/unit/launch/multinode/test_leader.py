"""What the leader concludes from the reports of all nodes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from allhands.launch.attempt import NodeReport
from allhands.launch.multinode.leader import job_stalled, merge_reports, on_local_clock
from allhands.launch.options import Job
from allhands.launch.verdict import Outcome, Stall
from allhands.observe.flight_recorder import Entry, FlightRecorder


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
    """Return what one node collected of its one rank when the job stalled."""
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
