"""What follows from all nodes together, and how a lost node is judged and told."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from allhands.launch.attempt import Story
from allhands.launch.job import Job
from allhands.launch.multinode.agent_messages import Told, decode_from_convenor, decode_from_delegate
from allhands.launch.multinode.node_loss import Loss
from allhands.launch.multinode.nodes import Urging, again, merge, ranks_of, shifted, stands_still
from allhands.launch.stall import Hang
from allhands.launch.verdict import Outcome, Verdict, judge
from allhands.launch.verdict_text import brief, words
from allhands.observe.flight_recorder import Entry, FlightRecorder


def outcome(rank: int, status: int = 0, node: int = 0, **parts: Any) -> Outcome:
    """Return how a rank ended."""
    return Outcome(rank, f"host-{'abc'[node]}", 800 + rank, status, node=node, **parts)


def story(*outcomes: Outcome, hanging: Hang | None = None, stopped: int = 0, left: tuple[str, ...] = ()) -> Story:
    """Return what one node tells."""
    return Story(list(outcomes), hanging, stopped, list(left))


def board(rank: int) -> FlightRecorder:
    """Return a board with one call."""
    note = Entry(1, "g", 1, "all_reduce", "SUM", "float32", (2, 3), 24, -1, "t.py:1", "running", True, 1.0, 2.0, 0.0)
    return FlightRecorder(1, rank, 4, (note,))


def hang(rank: int) -> Hang:
    """Return what one node knows of its one rank when the job stands still."""
    return Hang({rank: board(rank)}, {rank: "stack"}, {rank: "sleeping"}, {rank: 800 + rank}, 3.0)


def lost(node: int = 1, at_s: float = 5.0, **parts: Any) -> Loss:
    """Return the loss of a node with two ranks."""
    seen: dict[str, Any] = {"how": "its connection closed", "seen_s": at_s + 1.0} | parts
    return Loss(node, f"host-{'abc'[node]}", f"10.0.0.{node}", (2 * node, 2 * node + 1), at_s=at_s, **seen)


def test_ranks_follow_nodes() -> None:
    """Nodes may have different numbers of ranks; ranks go by the order of nodes."""
    job = Job("a.py", local_world_size=3, nodes=3, node_rank=1, layout=(2, 3, 1))
    assert (job.world_size, job.rank(0), job.rank(2)) == (6, 2, 4)
    assert [ranks_of(job.layout, node) for node in range(3)] == [(0, 1), (2, 3, 4), (5,)]
    assert ranks_of((), 1) == ()


def test_another_nodes_clock() -> None:
    """All times of a story move together, and what never happened does not."""
    record = {"end": "raised", "at_s": 10.0}
    told = story(
        outcome(2, 1, record=record, ended_s=11.0), outcome(3, -15, sent=15, sent_s=12.0, ended_s=13.0, after_s=9.0)
    )
    first, second = shifted(told, 100.0).outcomes
    assert (first.at_s, first.ended_s, first.sent_s) == (110.0, 111.0, 0.0)
    assert (second.sent_s, second.ended_s, second.after_s) == (112.0, 113.0, 9.0)
    assert record["at_s"] == 10.0


def test_one_story_of_all() -> None:
    """Outcomes come in the order of ranks, stacks of all nodes together, leftovers with their node."""
    whole = merge(
        {
            1: story(outcome(2, node=1), outcome(3, node=1), hanging=hang(3), left=("pid 7",)),
            0: story(outcome(0), outcome(1), hanging=hang(1), stopped=signal.SIGTERM),
        }
    )
    assert [each.rank for each in whole.outcomes] == [0, 1, 2, 3]
    assert whole.hanging is not None
    assert sorted(whole.hanging.stacks) == [1, 3]
    assert (whole.leftovers, whole.stopped) == (["node 1: pid 7"], signal.SIGTERM)
    assert merge({0: story(outcome(0))}).hanging is None


@pytest.mark.parametrize(
    ("said", "hangs"),
    [
        ({}, False),
        ({0: (True, True)}, False),
        ({0: (True, True), 1: (False, False)}, False),
        ({0: (True, False), 1: (True, False)}, False),
        ({0: (True, True), 1: (True, False)}, True),
    ],
)
def test_a_hang_needs_all_nodes(said: dict[int, tuple[bool, bool]], hangs: bool) -> None:
    """One node that waits inside a collective while another moves is no hang."""
    assert stands_still([0, 1], said) is hangs
    assert not stands_still([], said)


@pytest.mark.parametrize(
    ("cause", "number", "restart_if", "expected"),
    [
        ("signal", 0, "any", True),
        ("signal", 2, "any", False),
        ("exception", 0, "signal,lost", False),
        ("lost", 0, "signal,lost", True),
        ("oom", 1, "signal", True),
        ("stopped", 0, "any", False),
    ],
)
def test_another_start(cause: str, number: int, restart_if: str, expected: bool) -> None:
    """Restarts are counted for the job and depend on the cause."""
    job = Job("a.py", max_restarts=2, restart_if=frozenset(restart_if.split(",")))
    verdict = Verdict(cause, (), "", "", "", 1)
    assert again(job, verdict, number) is expected
    assert not again(job, verdict, number, stopped=True)
    assert not again(job, None, number)


def test_the_same_signal_at_several_nodes_is_one() -> None:
    """A scheduler signals every agent at once; only who asks twice at one place wants everything killed."""
    urging = Urging({})
    assert [urging.more("node 0", 1), urging.more("node 1", 1), urging.more("node 1", 2), urging.more("node 0", 2)] == [
        1,
        0,
        1,
        0,
    ]


# Verdicts --------------------------------------------------------------------------------------------------------


def test_a_lost_node_is_to_blame() -> None:
    """Those who only follow, or were ended, are not; the node is told with host, address, ranks and what was seen."""
    follower = outcome(
        0,
        1,
        record={
            "end": "raised",
            "kind": "PeerLost",
            "message": "",
            "at_s": 6.0,
            "bases": ["GroupEnded"],
            "traceback": "",
        },
    )
    found = judge([follower, outcome(1, -15, sent=15, sent_s=8.0)], lost=[lost()])
    assert found is not None
    assert (found.cause, found.culprits, found.exit_code) == ("lost", (2, 3), 1)
    assert found.what == "node 1 (host-b, 10.0.0.1) was lost, and ranks 2 and 3 with it"
    assert found.why == "its connection closed (observed); it was last heard 1 s before"
    assert "dmesg" in found.fix


def test_a_rank_that_failed_before_is_to_blame() -> None:
    """A node that is lost in the course of the end is not the cause; one lost before a rank's own error is."""
    own = outcome(0, 3, record={"end": "exit", "message": "3", "at_s": 4.0})
    earlier, later = judge([own], lost=[lost(at_s=5.0)]), judge([own], lost=[lost(at_s=3.0)])
    assert earlier is not None
    assert later is not None
    assert (earlier.culprits, earlier.exit_code) == ((0,), 3)
    assert later.cause == "lost"


def test_silence_is_not_death() -> None:
    """An agent that does not tell its story is not called lost, and comes after one whose end was seen."""
    silent, seen = lost(2, at_s=1.0, observed=False), lost(1, at_s=5.0)
    found = judge([outcome(0)], lost=[silent])
    assert found is not None
    assert found.what == "node 2 (host-c, 10.0.0.2) does not answer"
    assert "inferred from silence" in found.why
    both = judge([outcome(0)], lost=[silent, seen])
    assert both is not None
    assert both.what.startswith("node 1 (host-b, 10.0.0.1) was lost")


def test_a_node_that_is_cut_off() -> None:
    """It says that it ended its own ranks, and what to look at where the network gave up."""
    found = judge([outcome(2)], lost=[lost(0, how="it broke ([Errno 110] Connection timed out)", cut_off=True)])
    assert found is not None
    assert "this node ended its ranks" in found.why
    assert "its network is (ping, ip link)" in found.fix


def test_who_asked_for_the_end() -> None:
    """With several nodes the verdict says at which of them."""
    found = judge([outcome(0, -2, sent=2)], stopped=signal.SIGINT, by="node 1 (host-b)")
    assert found is not None
    assert found.what == "the job was stopped by Ctrl-C or SIGINT on node 1 (host-b)"


def test_in_short() -> None:
    """Other nodes' screens show who and why, without the traceback, and name the node."""
    record = {"end": "raised", "kind": "ValueError", "message": "x", "at_s": 1.0, "bases": [], "traceback": "Trace!"}
    found = judge([outcome(0), outcome(3, 1, node=1, record=record)])
    assert found is not None
    assert "rank 3 (node 1, host-b, pid 803)" in brief(found)
    assert "Trace!" not in brief(found)
    assert "Trace!" in words(found, [])


# Messages --------------------------------------------------------------------------------------------------------


def test_a_story_travels_whole() -> None:
    """What a delegate tells arrives as it was: outcomes, boards, stacks."""
    told = Told(1, story(outcome(2, 1, record={"ranks": [1]}, board=board(2)), hanging=hang(2), left=("x",)), 9.0)
    assert decode_from_delegate(msgspec.msgpack.encode(told)) == told


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgspec.msgpack.encode({"type": "Told"}), b"\x91" * 5000])
def test_what_is_no_message(frame: bytes) -> None:
    """Anything else has one error."""
    for decode in (decode_from_delegate, decode_from_convenor):
        with pytest.raises(msgspec.MsgspecError):
            decode(frame)
