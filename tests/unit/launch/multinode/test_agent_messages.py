"""The agents' messages, and how repeated requests to stop are counted."""

from __future__ import annotations

import msgspec
import pytest

from allhands.launch.attempt import NodeReport
from allhands.launch.multinode.agent_messages import (
    ReportNode,
    StopCounter,
    decode_from_follower,
    decode_from_leader,
)
from allhands.launch.verdict import Outcome, Stall
from allhands.observe.flight_recorder import Entry, FlightRecorder


def test_report_round_trip() -> None:
    """A follower's report arrives as it was sent: outcomes, flight recorders, stacks."""
    call = Entry(1, "g", 1, "all_reduce", "SUM", "float32", (2, 3), 24, -1, "t.py:1", "running", True, 1.0, 2.0, 0.0)
    recording = FlightRecorder(1, 2, 4, (call,))
    outcome = Outcome(2, "host-b", 802, 1, record={"ranks": [1]}, recording=recording, node=1)
    stall = Stall({2: recording}, {2: "stack"}, {2: "sleeping"}, {2: 802}, 3.0)
    sent = ReportNode(1, NodeReport([outcome], stall, 0, ["pid 7"]), 9.0)
    assert decode_from_follower(msgspec.msgpack.encode(sent)) == sent


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgspec.msgpack.encode({"type": "ReportNode"}), b"\x91" * 5000])
def test_malformed_messages(frame: bytes) -> None:
    """Every malformed frame raises the same exception."""
    for decode in (decode_from_follower, decode_from_leader):
        with pytest.raises(msgspec.MsgspecError):
            decode(frame)


def test_signal_at_several_nodes_is_one_request() -> None:
    """A scheduler signals every agent at once; only a second signal at one node makes a second request."""
    counter = StopCounter()
    assert [counter.add("node 0", 1), counter.add("node 1", 1)] == [1, 0]
    assert [counter.add("node 1", 2), counter.add("node 0", 2)] == [1, 0]
