"""Outcomes in, verdict out: who is to blame and who only followed."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from allhands.diagnosis import Diagnosis
from allhands.launch.job import Job
from allhands.launch.verdict import Outcome, Verdict, judge, status_word
from allhands.launch.verdict_text import report, words


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


def test_all_went_well() -> None:
    """There is no verdict on a job whose ranks all end with 0, also if it was asked to end."""
    assert judge([outcome(0), outcome(1)]) is None
    assert judge([outcome(0), outcome(1)], stopped=signal.SIGTERM) is None


def test_by_cause_not_by_clock() -> None:
    """Followers that were faster do not take the blame."""
    found = judged(follower(0, 0.5), outcome(1, 1, record=raised("ValueError", "x", at_s=0.9)), follower(2, 0.4))
    assert (found.culprits, found.cause, found.exit_code) == ((1,), "exception", 1)
    assert found.followers == (((0, 2), "raised PeerFailed"),)


def test_the_coordinators_word_comes_before_the_clock() -> None:
    """Of two that failed by themselves, the one that the coordinator saw first comes first."""
    one, two = outcome(0, 1, record=raised("KeyError", at_s=1.0)), outcome(1, -9, ended_s=2.0)
    assert judged(one, two).culprits == (0, 1)
    found = judged(one, two, findings=[Diagnosis("peer-lost", "rank 1 is gone", ranks=(1,))])
    assert (found.culprits, found.exit_code) == ((1, 0), 137)


def test_whom_the_agent_ended() -> None:
    """A rank that got SIGTERM from the agent follows; one that had raised before it does not."""
    first = outcome(0, 1, record=raised("ValueError", at_s=1.0))
    after = outcome(1, -15, sent=15, sent_s=3.0, ended_s=3.1)
    slow = outcome(2, 1, sent=15, sent_s=3.0, ended_s=5.0, record=raised("KeyError", at_s=2.0))
    late = outcome(3, 1, sent=15, sent_s=3.0, ended_s=5.0, record=raised("KeyError", at_s=4.0))
    found = judged(first, after, slow, late)
    assert found.culprits == (0, 2)
    assert found.followers == (((1, 3), "ended by allhands (SIGTERM)"),)


@pytest.mark.parametrize(
    ("status", "parts", "cause", "code", "what"),
    [
        (-11, {"stack": "Fatal Python error"}, "signal", 139, "crashed with SIGSEGV"),
        (-11, {}, "signal", 139, "crashed with SIGSEGV"),
        (-9, {}, "signal", 137, "was ended by SIGKILL"),
        (-9, {"memory": "the kernel's log"}, "oom", 137, "was killed because memory ran out"),
        (3, {"record": {"end": "exit", "message": "3", "site": "a.py:1"}}, "exit", 3, "called sys.exit(3)"),
        (1, {"record": {"end": "exit", "message": "bad\nday"}}, "exit", 1, "exited, saying: bad"),
        (4, {}, "exit", 4, "ended with exit status 4 and said nothing"),
        (1, {"record": raised("ValueError", "a\nb")}, "exception", 1, "raised ValueError: a"),
    ],
)
def test_causes(status: int, parts: dict[str, Any], cause: str, code: int, what: str) -> None:
    """Each way to end has its cause, its words and its exit status."""
    found = judged(outcome(0), outcome(1, status, **parts))
    assert (found.cause, found.exit_code, found.what, found.culprits) == (cause, code, f"rank 1 {what}", (1,))


def test_an_engine_that_lost_its_peer_follows() -> None:
    """Gloo's 'connection closed by peer' is no cause of its own."""
    gloo = raised(
        "RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer", at_s=0.1, bases=["RuntimeError"]
    )
    assert judged(outcome(0, 1, record=gloo), outcome(1, -9, ended_s=0.2)).culprits == (1,)
    # With nobody else to blame it is what there is.
    assert judged(outcome(0, 1, record=gloo), outcome(1)).culprits == (0,)


def test_all_point_at_one_that_ended_well() -> None:
    """A rank that ended with 0 too early is to blame, and the job still fails."""
    lost = Diagnosis("peer-lost", "all_reduce cannot finish: rank 1 left the group", ranks=(1,))
    found = judged(follower(0), outcome(1), findings=[lost])
    assert (found.culprits, found.exit_code, found.cause) == ((1,), 1, "lost")
    assert "ended well, but before the others were done" in found.what


def test_the_last_group_counts() -> None:
    """A script may go on after a group failed: what ended the last one is what ended the job."""
    early = Diagnosis("missing-ranks", "rank 3 did not come", ranks=(3,))
    late = Diagnosis("peer-silent", "rank 2 does not answer", ranks=(2,))
    assert judged(
        follower(0, of=()), follower(1, of=()), outcome(2, -15, sent=15), findings=[early, late]
    ).culprits == (2,)


def test_a_diagnosis_that_all_raise() -> None:
    """Where every rank raises the same diagnosis, whoever it names is to blame."""
    record = raised("CollectiveMismatch", "ranks differ   [collective-mismatch]", slug="collective-mismatch", ranks=[2])
    found = judged(*(outcome(rank, 1, record=record) for rank in range(3)))
    assert (found.culprits, found.cause) == ((2,), "exception")


def test_equal_tracebacks_are_shown_once() -> None:
    """Ranks that failed alike share their words and their traceback."""
    found = judged(*(outcome(rank, 1, record=raised("ValueError", "x")) for rank in range(3)))
    assert found.what == "ranks 0-2 raised ValueError: x"
    assert found.traces == (((0, 1, 2), "ValueError!"),)


def test_stopped() -> None:
    """Who was interrupted is not to blame; whoever failed by itself before still is."""
    hit = outcome(0, -2, sent=2, sent_s=1.0, ended_s=1.1)
    found = judged(
        hit, outcome(1, 1, sent=2, sent_s=1.0, record=raised("KeyboardInterrupt", at_s=1.1)), stopped=signal.SIGINT
    )
    assert (found.cause, found.culprits, found.exit_code) == ("stopped", (), 130)
    failed = outcome(1, 1, record=raised("ValueError", at_s=0.5))
    assert judged(hit, failed, stopped=signal.SIGINT).culprits == (1,)


def test_words_and_report_say_the_same() -> None:
    """The screen ends with the exit status; the report has the same and survives JSON."""
    found = judged(outcome(0), outcome(1, 3, record={"end": "exit", "message": "3", "site": "a.py:9"}))
    text = words(found, ["pid 5 of rank 1: sleep"])
    assert text.startswith("allhands: rank 1 called sys.exit(3)\n")
    assert "who:   rank 1 (node-a, pid 801), exit status 3" in text
    assert "1 process ended by allhands" in text
    assert text.endswith("  exit status 3\n")
    data = report(Job("a.py", name="j"), 0, found, list(found.outcomes), [])
    assert (data["culprits"], data["exit_code"], data["ranks"][1]["exit_code"]) == ([1], 3, 3)
    assert report(Job("a.py"), 0, None, [outcome(0)], [])["exit_code"] == 0


def test_status_words() -> None:
    """Signals are named, unknown ones by number."""
    assert (status_word(3), status_word(-9), status_word(-42)) == ("exit status 3", "SIGKILL", "signal 42")
