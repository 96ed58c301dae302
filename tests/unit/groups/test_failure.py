"""The one path from an engine's failure to a diagnosis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from allhands.control.messages import Status
from allhands.diagnosis import Diagnosis
from allhands.diagnosis.majority import Judgement
from allhands.engines.base import CallMismatch, EngineAborted, EngineFailure, EngineTimeout, PeerDead, PeerLeft
from allhands.engines.base import TransportFailure as Transport
from allhands.errors import AllhandsError, PeerFailed, StoreTimeout, error, fail
from allhands.groups import failure
from unit.groups.fakes import FakeMember, make_session

GROUP: Any = SimpleNamespace(ranks=[4, 6])
VERDICT = Diagnosis("peer-failed", "rank 6 raised", who="rank 6", why="ValueError", fix="see there", ranks=(6,))


def explain(member: FakeMember, problem: BaseException, **more: Any) -> AllhandsError | None:
    """Explain ``problem`` of a call that is under way."""
    session = make_session(member)
    session.enter("all_reduce", "train.py:7")
    return failure.explain(session, problem, "all_reduce", "train.py:7", **more)


@pytest.mark.parametrize(
    "problem",
    [
        EngineTimeout(culprit=1),
        PeerDead(culprit=1),
        PeerLeft(culprit=1),
        EngineAborted(culprit=1),
        Transport("reset"),
        CallMismatch(Judgement((1,), ("rank 6 called barrier",))),
        ValueError("the caller's own"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_a_verdict_that_is_known_is_the_answer(problem: BaseException) -> None:
    """Every failure, of any kind, is explained by the verdict where there is one; nothing is waited for."""
    member = FakeMember(rank=4)
    member.verdict = VERDICT
    found = explain(member, problem, group=GROUP)
    assert isinstance(found, PeerFailed)
    assert (member.waits, member.condemned, member.verdict_raised) == ([], [], True)


@pytest.mark.parametrize("problem", [PeerDead(culprit=1), EngineAborted(culprit=1), Transport("reset by peer")])
def test_a_failure_caused_elsewhere_waits_once_for_the_verdict(problem: EngineFailure) -> None:
    """One bounded wait; the verdict that arrives meanwhile stands."""
    member = FakeMember(rank=4)
    member.arriving = VERDICT
    assert isinstance(explain(member, problem, group=GROUP), PeerFailed)
    assert member.waits == [failure._VERDICT_S]
    assert member.condemned == []


@pytest.mark.parametrize(
    ("problem", "slug", "ranks"),
    [
        (PeerDead(culprit=1), "peer-lost", (6,)),
        (PeerLeft(culprit=1), "peer-lost", (6,)),
        (CallMismatch(Judgement((1,), ("rank 6 called barrier",))), "collective-mismatch", (6,)),
        (EngineTimeout(culprit=1), "collective-timeout", (6,)),
        (Transport("reset by peer"), "engine-failed", (4,)),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "engine-failed", (4,)),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), "collective-timeout", (6,)),
        (StoreTimeout(fail("store-timeout", "late").diagnosis), "collective-timeout", (6,)),
    ],
    ids=str,
)
def test_without_a_verdict_the_diagnosis_becomes_everyones(
    problem: BaseException, slug: str, ranks: tuple[int, ...]
) -> None:
    """The kind of failure decides the slug, its culprit the rank; the coordinator passes it on."""
    member = FakeMember(rank=4)
    member.reported = [
        Status(4, "busy", "in all_reduce at train.py:7", 5.0, "host-a", 11),
        Status(6, "busy", "at train.py:9 in step", 5.0, "host-a", 12),
    ]
    found = explain(member, problem, group=GROUP)
    assert found is not None
    assert (found.slug, found.ranks) == (slug, ranks)
    assert member.condemned == [found.diagnosis]
    assert "in all_reduce at train.py:7" in found.diagnosis.who


def test_what_this_rank_found_itself_is_not_waited_for() -> None:
    """A timeout and a difference that this rank saw are reported at once."""
    for problem in (EngineTimeout(culprit=1), CallMismatch(Judgement((0,), ("rank 4 called barrier",)))):
        member = FakeMember(rank=4)
        explain(member, problem, group=GROUP)
        assert member.waits == [0]


def test_an_abort_ends_its_group_only() -> None:
    """The rank that aborted is named, and the coordinator is not asked to end the job."""
    member = FakeMember(rank=4)
    found = explain(member, EngineAborted(culprit=1), group=GROUP)
    assert found is not None
    assert (found.slug, found.ranks) == ("peer-lost", (6,))
    assert member.condemned == []


@pytest.mark.parametrize(
    "problem", [ValueError("bad argument"), RuntimeError("shape mismatch"), fail("invalid-argument", "no")]
)
def test_what_no_engine_raised_is_left_alone(problem: BaseException) -> None:
    """The caller's own mistake is not explained, and ends nothing."""
    member = FakeMember()
    assert explain(member, problem) is None
    assert (member.waits, member.condemned, member.verdict_raised) == ([], [], False)


def test_a_silent_rank_is_named_for_a_timeout() -> None:
    """A rank that is connected and does not answer is probably stopped."""
    member = FakeMember(rank=4)
    member.reported = [
        Status(4, "busy", "in all_reduce at train.py:7", 5.0, "host-a", 11),
        Status(6, "silent", "", 5.0, "host-a", 12),
    ]
    found = explain(member, EngineTimeout(culprit=1), group=GROUP)
    assert found is not None
    assert (found.slug, found.ranks, found.diagnosis.certain) == ("peer-silent", (6,), False)


def test_a_message_names_the_rank_that_its_peer_may_wait_for() -> None:
    """The peer answers; a third rank that does not is what it may wait for."""
    member = FakeMember(rank=4)
    member.reported = [
        Status(4, "busy", "in recv at train.py:7", 5.0, "host-a", 11),
        Status(6, "busy", "in recv at train.py:7", 5.0, "host-a", 12),
        Status(7, "silent", "", 5.0, "host-a", 13),
    ]
    found = explain(member, EngineTimeout(culprit=1), group=GROUP, peers=[6])
    assert found is not None
    assert (found.slug, found.ranks) == ("peer-silent", (7,))
    assert "rank 6 answers, and may wait for it too" in found.diagnosis.why


def test_a_rank_that_left_is_named() -> None:
    """The coordinator knows who left in good order."""
    member = FakeMember(rank=4)
    member.reported = [Status(6, "left", "destroyed the group", 2.0, "host-a", 12)]
    found = explain(member, Transport("connection closed"), group=GROUP)
    assert found is not None
    assert (found.slug, found.ranks) == ("peer-lost", (6,))


def test_an_exception_is_announced_once() -> None:
    """The first exception counts; one that an engine raised only follows from another rank's."""
    member = FakeMember()
    session = make_session(member)
    failure.announce(session, RuntimeError("connection reset by peer"))
    failure.announce(session, ValueError("second"))
    assert member.announced == [("RuntimeError", "connection reset by peer", True)]


def test_the_end_of_the_group_is_not_announced() -> None:
    """All ranks have received it."""
    member = FakeMember()
    session = make_session(member)
    failure.announce(session, error(VERDICT))
    assert (member.announced, session.failed) == ([], True)
