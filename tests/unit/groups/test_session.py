"""What a session knows of its rank's calls, and how it ends their waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from allhands.diagnosis import Diagnosis
from allhands.errors import PeerLost
from allhands.groups import session as sessions
from unit.groups.fakes import FakeMember, make_session

LOST = Diagnosis("peer-lost", "rank 1 is gone", who="rank 0", why="its process ended", fix="run it again", ranks=(1,))


def test_there_is_one_current_session() -> None:
    """`current` returns what `set_current` was given, None at first."""
    assert sessions.current() is None
    made = make_session(FakeMember())
    sessions.set_current(made)
    try:
        assert sessions.current() is made
    finally:
        sessions.set_current(None)


def test_a_call_site_is_the_users_line() -> None:
    """Frames of allhands and torch are left out; this file's are not."""
    assert sessions.call_site().startswith("test_session.py:")


def test_calls_nest_and_belong_to_a_thread() -> None:
    """`leave` restores the call around; another thread's call does not make this one busy."""
    session = make_session(FakeMember())
    assert not session.busy
    assert session.waited_s() is None
    outer = session.enter("barrier", "a.py:1")
    inner = session.enter("all_reduce", "a.py:2", since=0.0)
    assert session.waited_s() == pytest.approx(sessions.time.monotonic(), abs=5)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(session.busy))
    thread.start()
    thread.join()
    session.leave(inner)
    assert session.waited_s() == pytest.approx(0, abs=5)
    session.leave(outer)
    assert (session.busy, found) == (False, [False])


def test_a_rank_reports_its_call_else_its_line() -> None:
    """The coordinator's question is answered with the call under way, or the main thread's line."""
    member = FakeMember()
    session = make_session(member)
    doing, since_s = member.describe()
    assert doing.startswith("at ")
    assert since_s == 0
    session.enter("all_reduce", "train.py:7")
    doing, since_s = member.describe()
    assert doing == "in all_reduce at train.py:7"
    assert since_s < 5


def test_the_end_of_the_group_ends_waits_in_python() -> None:
    """A wait for an operation that the engine does not end raises the verdict."""
    member = FakeMember()
    session = make_session(member)
    late = threading.Timer(0.05, member.end, [LOST])
    late.start()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        session.wait_for(threading.Event(), SimpleNamespace(is_completed=lambda: False))
    assert session.abandoned
    # A wait that begins afterwards is bounded, too.
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        session.wait_for(threading.Event(), SimpleNamespace(is_completed=lambda: False))
    late.join()


def test_an_operation_that_ends_in_time_is_not_abandoned() -> None:
    """The verdict is not raised where the operation was complete."""
    session = make_session(FakeMember())
    done = threading.Event()
    done.set()
    session.wait_for(done, SimpleNamespace(is_completed=lambda: True))
    assert not session.abandoned
    assert session.waiting == set()


def test_nccl_does_not_delay_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback of the group's end returns although NCCL's abort blocks."""
    release, begun = threading.Event(), threading.Event()
    order: list[str] = []

    class ProcessGroupNCCL:
        def abort(self) -> None:
            begun.set()
            release.wait(5)
            order.append("NCCL")

    monkeypatch.setattr(sessions._torch, "groups", lambda: ["group"])
    monkeypatch.setattr(sessions._torch, "backends", lambda _: [ProcessGroupNCCL()])
    member = FakeMember()
    make_session(member)
    member.on_end(lambda _: order.append("shared memory"))
    member.end(LOST)
    assert order == ["shared memory"]
    assert begun.wait(10)
    assert not release.is_set()
    release.set()
