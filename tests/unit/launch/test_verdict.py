"""Outcomes in, verdict out: root causes and consequences."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from allhands.diagnosis import Diagnosis
from allhands.launch.options import Job
from allhands.launch.verdict import (
    NodeLoss,
    Outcome,
    Verdict,
    brief_text,
    judge,
    lagging_ranks,
    result,
    should_restart,
    status_name,
    verdict_text,
)
from allhands.observe.flight_recorder import Entry, FlightRecorder


def outcome(rank: int, status: int = 0, **parts: Any) -> Outcome:
    """Return how a rank ended."""
    return Outcome(rank, "node-a", 800 + rank, status, **parts)


def raised(kind: str, message: str = "", at_s: float = 1.0, **more: Any) -> dict[str, Any]:
    """Return the record of an exception."""
    bases = [kind, *more.pop("bases", ()), "Exception"]
    return {
        "end": "raised",
        "kind": kind,
        "message": message,
        "at_s": at_s,
        "bases": bases,
        "traceback": f"{kind}!",
        **more,
    }


def follower(rank: int, at_s: float = 1.0, of: tuple[int, ...] = (1,)) -> Outcome:
    """Return a rank that raised PeerFailed."""
    return outcome(
        rank, 1, record=raised("PeerFailed", at_s=at_s, bases=["GroupEnded"], slug="peer-failed", ranks=list(of))
    )


def judged(*outcomes: Outcome, **more: Any) -> Verdict:
    """Return the verdict, which there must be."""
    verdict = judge(outcomes, **more)
    assert verdict is not None
    return verdict


def test_success() -> None:
    """There is no verdict on a job whose ranks all end with 0, also if a signal requested its end."""
    assert judge([outcome(0), outcome(1)]) is None
    assert judge([outcome(0), outcome(1)], stopped=signal.SIGTERM) is None


def test_consequences_are_not_blamed() -> None:
    """Consequential failures that were faster than the root cause are not blamed."""
    found = judged(follower(0, 0.5), outcome(1, 1, record=raised("ValueError", "x", at_s=0.9)), follower(2, 0.4))
    assert (found.culprits, found.cause, found.exit_code) == ((1,), "exception", 1)
    assert found.others == (((0, 2), "raised PeerFailed"),)


def test_coordinator_finding_precedes_the_clock() -> None:
    """Of two primary failures, the one that the coordinator named is first."""
    one, two = outcome(0, 1, record=raised("KeyError", at_s=1.0)), outcome(1, -9, ended_s=2.0)
    assert judged(one, two).culprits == (0, 1)
    found = judged(one, two, findings=[Diagnosis("peer-lost", "rank 1 is gone", ranks=(1,))])
    assert (found.culprits, found.exit_code) == ((1, 0), 137)


def test_ended_by_agent() -> None:
    """A rank that got SIGTERM from the agent is a consequence; one that had raised before it is not."""
    first = outcome(0, 1, record=raised("ValueError", at_s=1.0))
    after = outcome(1, -15, sent=15, sent_s=3.0, ended_s=3.1)
    slow = outcome(2, 1, sent=15, sent_s=3.0, ended_s=5.0, record=raised("KeyError", at_s=2.0))
    late = outcome(3, 1, sent=15, sent_s=3.0, ended_s=5.0, record=raised("KeyError", at_s=4.0))
    found = judged(first, after, slow, late)
    assert found.culprits == (0, 2)
    assert found.others == (((1, 3), "ended by allhands (SIGTERM)"),)


@pytest.mark.parametrize(
    ("status", "parts", "cause", "code", "what"),
    [
        (-11, {"stack": "Fatal Python error"}, "signal", 139, "crashed with SIGSEGV"),
        (-11, {}, "signal", 139, "crashed with SIGSEGV"),
        (-9, {}, "signal", 137, "was ended by SIGKILL"),
        (-9, {"oom": "the kernel's log"}, "oom", 137, "was killed because memory ran out"),
        (3, {"record": {"end": "exit", "message": "3", "site": "a.py:1"}}, "exit", 3, "called sys.exit(3)"),
        (1, {"record": {"end": "exit", "message": "bad\nday"}}, "exit", 1, "exited with the message: bad"),
        (4, {}, "exit", 4, "ended with exit status 4 without a message"),
        (1, {"record": raised("ValueError", "a\nb")}, "exception", 1, "raised ValueError: a"),
    ],
)
def test_causes(status: int, parts: dict[str, Any], cause: str, code: int, what: str) -> None:
    """Each way to end has its cause, its words and its exit status."""
    found = judged(outcome(0), outcome(1, status, **parts))
    assert (found.cause, found.exit_code, found.what, found.culprits) == (cause, code, f"rank 1 {what}", (1,))


def test_transport_errors_are_consequences() -> None:
    """Gloo's 'connection closed by peer' is a consequence."""
    gloo = raised(
        "RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer", at_s=0.1, bases=["RuntimeError"]
    )
    assert judged(outcome(0, 1, record=gloo), outcome(1, -9, ended_s=0.2)).culprits == (1,)
    # Without a primary failure, the first consequence is blamed.
    assert judged(outcome(0, 1, record=gloo), outcome(1)).culprits == (0,)


def test_rank_exits_too_early() -> None:
    """A rank that ended with 0 too early is to blame, and the job still fails."""
    lost = Diagnosis("peer-lost", "all_reduce cannot finish: rank 1 left the group", ranks=(1,))
    found = judged(follower(0), outcome(1), findings=[lost])
    assert (found.culprits, found.exit_code, found.cause) == ((1,), 1, "lost")
    assert "ended well, but before the others were done" in found.what


def test_last_finding_counts() -> None:
    """A script may continue after a group failed: the last finding is the cause of the job's end."""
    early = Diagnosis("missing-ranks", "rank 3 did not come", ranks=(3,))
    late = Diagnosis("peer-silent", "rank 2 does not answer", ranks=(2,))
    assert judged(
        follower(0, of=()), follower(1, of=()), outcome(2, -15, sent=15), findings=[early, late]
    ).culprits == (2,)


def test_diagnosis_on_all_ranks() -> None:
    """Where every rank raises the same diagnosis, the rank that it names is to blame."""
    record = raised("CollectiveMismatch", "ranks differ   [collective-mismatch]", slug="collective-mismatch", ranks=[2])
    found = judged(*(outcome(rank, 1, record=record) for rank in range(3)))
    assert (found.culprits, found.cause) == ((2,), "exception")


def test_equal_tracebacks() -> None:
    """Ranks that failed alike share their words and their traceback."""
    found = judged(*(outcome(rank, 1, record=raised("ValueError", "x")) for rank in range(3)))
    assert found.what == "ranks 0-2 raised ValueError: x"
    assert found.traces == (((0, 1, 2), "ValueError!"),)


def test_stopped() -> None:
    """Interrupted ranks are not to blame; one that failed by itself before is."""
    hit = outcome(0, -2, sent=2, sent_s=1.0, ended_s=1.1)
    found = judged(
        hit, outcome(1, 1, sent=2, sent_s=1.0, record=raised("KeyboardInterrupt", at_s=1.1)), stopped=signal.SIGINT
    )
    assert (found.cause, found.culprits, found.exit_code) == ("stopped", (), 130)
    failed = outcome(1, 1, record=raised("ValueError", at_s=0.5))
    assert judged(hit, failed, stopped=signal.SIGINT).culprits == (1,)


def test_text_and_report_agree() -> None:
    """The text ends with the exit status; the report has the same facts as JSON."""
    found = judged(outcome(0), outcome(1, 3, record={"end": "exit", "message": "3", "site": "a.py:9"}))
    ended = result(Job("a.py", name="j"), 0, found, found.outcomes, ["pid 5 of rank 1: sleep"])
    assert ended.text.startswith("allhands: rank 1 called sys.exit(3)\n")
    assert "who:   rank 1 (node-a, pid 801), exit status 3" in ended.text
    assert "1 process ended by allhands" in ended.text
    assert ended.text.endswith("  exit status 3\n")
    data = json.loads(ended.report)
    assert (data["culprits"], data["exit_code"], data["ranks"][1]["exit_code"]) == ([1], 3, 3)
    assert (data["followers"], data["left_behind"]) == (
        [{"ranks": [0], "did": "ended well"}],
        ["pid 5 of rank 1: sleep"],
    )


def test_result_of_a_job_that_succeeded() -> None:
    """Without a verdict the exit status is 0, and only leftover processes are printed."""
    ended = result(Job("a.py"), 0, None, [outcome(0)], [])
    assert (ended.exit_code, ended.text, json.loads(ended.report)["exit_code"]) == (0, "", 0)
    assert "had left behind: pid 5" in result(Job("a.py"), 0, None, [outcome(0)], ["pid 5"]).text


def test_status_name() -> None:
    """Signals are named, unknown ones by number."""
    assert (status_name(3), status_name(-9), status_name(-42)) == ("exit status 3", "SIGKILL", "signal 42")


def call(number: int = 1, state: str = "running", *, sequence: int = 0, operation: str = "all_reduce") -> Entry:
    """Return a call."""
    return Entry(
        number, "default", sequence, operation, "SUM", "float32", (4,), 16, -1, "a.py:1", state, True, 100.0, 100.0, 0.0
    )  # fmt: skip


def recording(*calls: Entry) -> FlightRecorder:
    """Return a flight recorder with these calls."""
    return FlightRecorder(1, 0, 2, calls)


def test_lagging_ranks() -> None:
    """Those outside any collective, else those at an earlier call, else those at another; none where all agree."""
    inside = recording(call())
    assert lagging_ranks({0: inside, 1: recording(call(1, "done")), 2: None}) == (1, 2)
    assert lagging_ranks(
        {0: recording(call(3, sequence=3)), 1: recording(call(2, sequence=2)), 2: recording(call(3, sequence=3))}
    ) == (1,)
    assert lagging_ranks({0: inside, 1: inside, 2: recording(call(1, operation="broadcast"))}) == (2,)
    assert lagging_ranks({0: inside, 1: inside}) == ()
    assert lagging_ranks({0: None, 1: None}) == ()


# Restarts and lost nodes -------------------------------------------------------------------------------------------


def on_node(rank: int, status: int = 0, node: int = 0, **parts: Any) -> Outcome:
    """Return how a rank of a job with several nodes ended."""
    return Outcome(rank, f"host-{'abc'[node]}", 800 + rank, status, node=node, **parts)


def lost(node: int = 1, last_received_s: float = 5.0, **parts: Any) -> NodeLoss:
    """Return the loss of a node with two ranks."""
    seen: dict[str, Any] = {"how": "its connection closed", "seen_s": last_received_s + 1.0} | parts
    return NodeLoss(
        node, f"host-{'abc'[node]}", f"10.0.0.{node}", (2 * node, 2 * node + 1), last_received_s=last_received_s, **seen
    )


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
def test_should_restart(cause: str, number: int, restart_if: str, expected: bool) -> None:
    """Restarts are counted for the job and depend on the cause."""
    job = Job("a.py", max_restarts=2, restart_if=frozenset(restart_if.split(",")))
    verdict = Verdict(cause, (), "", "", "", 1)
    assert should_restart(job, verdict, number) is expected
    assert not should_restart(job, verdict, number, stopped=True)
    assert not should_restart(job, None, number)


def test_lost_node() -> None:
    """A lost node is blamed, with host, address, ranks and the observation; other failures are consequences."""
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


def test_rank_failed_before_the_node_was_lost() -> None:
    """A node that is lost in the course of the end is not the cause; one lost before a rank's own error is."""
    own = outcome(0, 3, record={"end": "exit", "message": "3", "at_s": 4.0})
    earlier, later = judge([own], lost=[lost(last_received_s=5.0)]), judge([own], lost=[lost(last_received_s=3.0)])
    assert earlier is not None
    assert later is not None
    assert (earlier.culprits, earlier.exit_code) == ((0,), 3)
    assert later.cause == "lost"


def test_silent_node() -> None:
    """A silent agent is not called lost, and is blamed after one whose end was observed."""
    silent, seen = lost(2, last_received_s=1.0, observed=False), lost(1, last_received_s=5.0)
    found = judge([outcome(0)], lost=[silent])
    assert found is not None
    assert found.what == "node 2 (host-c, 10.0.0.2) does not answer"
    assert "inferred from silence" in found.why
    both = judge([outcome(0)], lost=[silent, seen])
    assert both is not None
    assert both.what.startswith("node 1 (host-b, 10.0.0.1) was lost")


def test_node_cut_off() -> None:
    """A node that lost the leader reports that it ended its own ranks; a network error has its own remedy."""
    found = judge([outcome(2)], lost=[lost(0, how="it broke ([Errno 110] Connection timed out)", cut_off=True)])
    assert found is not None
    assert "this node ended its ranks" in found.why
    assert "its network is (ping, ip link)" in found.fix


def test_stopped_on_a_node() -> None:
    """With several nodes the verdict names the node that received the signal."""
    found = judge([outcome(0, -2, sent=2)], stopped=signal.SIGINT, stopped_by="node 1 (host-b)")
    assert found is not None
    assert found.what == "the job was stopped by Ctrl-C or SIGINT on node 1 (host-b)"


def test_brief_text() -> None:
    """The terminals of other nodes show culprit and cause with the node, without the traceback."""
    record = {"end": "raised", "kind": "ValueError", "message": "x", "at_s": 1.0, "bases": [], "traceback": "Trace!"}
    found = judge([on_node(0), on_node(3, 1, node=1, record=record)])
    assert found is not None
    assert "rank 3 (node 1, host-b, pid 803)" in brief_text(found)
    assert "Trace!" not in brief_text(found)
    assert "Trace!" in verdict_text(found, [])
