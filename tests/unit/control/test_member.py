"""A rank's connection after the roll call, with the test as the coordinator at the other end of a socket pair."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from allhands.control import member as module
from allhands.control.member import Member
from allhands.control.messages import (
    Acknowledged,
    Closing,
    Complete,
    Ended,
    EndGroup,
    Failed,
    Leave,
    LeaveGranted,
    LogLine,
    Ping,
    Pong,
    Refused,
    Splitter,
    Status,
    StatusQuery,
    StatusReport,
    StatusRequest,
    StoreReply,
    StoreRequest,
    Waiting,
    decode_from_member,
    encode,
    pack,
)
from allhands.diagnosis import Diagnosis
from allhands.errors import AllhandsError
from unit.control.peers import claim

LOST = Diagnosis("peer-lost", "rank 1 is gone", ranks=(1,))
FAILED = Diagnosis("peer-failed", "rank 2 raised", ranks=(2,))


class Pair:
    """A member, and the coordinator's end of its connection."""

    def __init__(self, *, started: bool = True) -> None:
        ours, self.sock = socket.socketpair()
        self.sock.settimeout(10)
        self.member = Member(ours, Splitter(), rank=0, world_size=2, place="node-a:29500")
        if started:
            self.member.start([])
        self._splitter, self._frames = Splitter(), list[bytes]()
        self._pool = ThreadPoolExecutor()

    def send(self, *messages: Any) -> None:
        """Send messages to the member."""
        self.sock.sendall(b"".join(pack(encode(message)) for message in messages))

    def receive(self) -> Any:
        """Return the member's next message."""
        while not self._frames:
            data = self.sock.recv(65536)
            assert data, "the member closed"
            self._frames += self._splitter.feed(data)
        return decode_from_member(self._frames.pop(0))

    def call(self, function: Callable[..., Any], *args: Any, **kw: Any) -> Future[Any]:
        """Call ``function`` in another thread."""
        return self._pool.submit(function, *args, **kw)

    def sync(self) -> None:
        """Wait until the member has handled everything that was sent."""
        self.send(Ping())
        assert self.receive() == Pong()

    def close(self) -> None:
        """End both sides."""
        self.member.close()
        self.sock.close()
        self._pool.shutdown()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return a member and its coordinator."""
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def unclaimed() -> Iterator[Pair]:
    """Return a member that has not sent its claim, and its coordinator."""
    made = Pair(started=False)
    yield made
    made.close()


def raised(future: Future[Any]) -> AllhandsError:
    """Return what a call raised."""
    problem = future.exception(timeout=10)
    assert isinstance(problem, AllhandsError)
    return problem


# The roll call ---------------------------------------------------------------------------------------------------


def test_a_claim_returns_the_completed_group(unclaimed: Pair) -> None:
    """The claim is sent, the line about missing ranks is shown, and the decision is returned."""
    shown: list[str] = []
    unclaimed.member.show_waiting = shown.append
    call = unclaimed.call(unclaimed.member.claim, claim(0), [], 10)
    assert unclaimed.receive() == claim(0)
    unclaimed.send(StatusQuery())
    assert unclaimed.receive() == Status(0, "busy", "in the roll call")
    complete = Complete(one_host=True, session="x")
    unclaimed.send(Waiting("1 of 2 ranks are here"), complete)
    assert call.result(10) == complete
    assert shown == ["1 of 2 ranks are here"]
    unclaimed.sync()


def test_a_decision_may_arrive_with_the_proof(unclaimed: Pair) -> None:
    """Frames that followed the coordinator's proof are handled before those that arrive later."""
    complete = Complete(one_host=True, session="x")
    assert unclaimed.member.claim(claim(0), [encode(complete)], 10) == complete


def test_a_refused_claim_raises(unclaimed: Pair) -> None:
    """The diagnosis of the refusal is raised, and is no verdict of a group."""
    call = unclaimed.call(unclaimed.member.claim, claim(0), [], 10)
    unclaimed.send(Refused(LOST))
    assert raised(call).diagnosis == LOST
    assert unclaimed.member.verdict is None


def test_a_refusal_is_read_although_the_claim_cannot_be_sent(unclaimed: Pair) -> None:
    """A coordinator that refuses and closes before it reads the claim is understood."""
    unclaimed.send(Refused(LOST))
    unclaimed.sock.close()
    assert raised(unclaimed.call(unclaimed.member.claim, claim(0), [], 10)).diagnosis == LOST


@pytest.mark.parametrize("words", [[Closing()], []], ids=["closing", "no message"])
def test_a_coordinator_of_an_earlier_group(unclaimed: Pair, words: list[Any]) -> None:
    """A coordinator that closes before it reads the claim is that of an earlier group: there is no decision."""
    unclaimed.send(*words)
    unclaimed.sock.close()
    assert unclaimed.member.claim(claim(0), [], 10) is None
    assert unclaimed.member.verdict is None


def test_a_coordinator_that_closes_after_the_claim_is_lost(unclaimed: Pair) -> None:
    """The end of the connection without a decision is coordinator-lost."""
    call = unclaimed.call(unclaimed.member.claim, claim(0), [], 10)
    unclaimed.receive()
    unclaimed.sock.close()
    assert raised(call).slug == "coordinator-lost"


# Requests --------------------------------------------------------------------------------------------------------


def test_replies_are_matched_by_id(pair: Pair) -> None:
    """Two threads that ask at the same time each get their own reply, in whatever order the replies arrive."""
    calls = {key: pair.call(pair.member.store_request, "get", [key], wait_s=5) for key in ("a", "b")}
    requests = [pair.receive(), pair.receive()]
    assert {type(request) for request in requests} == {StoreRequest}
    assert {request.keys[0] for request in requests} == {"a", "b"}
    for request in reversed(requests):
        pair.send(StoreReply(request.id, [request.keys[0].encode() * 2]))
    assert {key: call.result(10).values for key, call in calls.items()} == {"a": [b"aa"], "b": [b"bb"]}


def test_a_silent_coordinator_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that does not arrive in time raises coordinator-silent, which is not certain."""
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    found = raised(pair.call(pair.member.store_request, "get", ["key"]))
    assert (found.slug, found.diagnosis.certain) == ("coordinator-silent", False)
    assert "did not answer the store operation get" in found.diagnosis.what
    assert pair.member.verdict is None


def test_a_request_that_is_too_large_is_not_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message over the limit raises invalid-argument, and the connection remains open."""
    monkeypatch.setattr("allhands.control.messages.MOST_BYTES", 100)
    found = raised(pair.call(pair.member.store_request, "set", ["key"], [bytes(1000)]))
    assert found.slug == "invalid-argument"
    pair.sync()


def test_statuses(pair: Pair) -> None:
    """`statuses` returns what the coordinator reports."""
    call = pair.call(pair.member.statuses, 2.0)
    request = pair.receive()
    assert request == StatusRequest(request.id, 2.0)
    pair.send(StatusReport(request.id, [Status(1, "silent", "does not answer")]))
    assert call.result(10) == [Status(1, "silent", "does not answer")]


def test_a_failure_is_reported_until_it_is_acknowledged(pair: Pair) -> None:
    """`report_failure` returns once the coordinator has the exception."""
    call = pair.call(pair.member.report_failure, "KeyError", "x", "Traceback …", follows=True)
    message = pair.receive()
    assert message == Failed(message.id, "KeyError", "x", "Traceback …", follows=True)
    assert not call.done()
    pair.send(Acknowledged(message.id))
    call.result(10)


def test_the_first_verdict_stands(pair: Pair) -> None:
    """`end_group` returns an earlier verdict if there is one, else its own diagnosis."""
    call = pair.call(pair.member.end_group, FAILED)
    message = pair.receive()
    assert message == EndGroup(message.id, FAILED)
    pair.send(Ended(LOST), Acknowledged(message.id))
    assert call.result(10) == LOST


def test_leaving_returns_the_ranks_that_have_not_left(pair: Pair) -> None:
    """`leave` returns the ranks that have not left, and the coordinator's end is then no failure."""
    call = pair.call(pair.member.leave, "destroy", 3.0)
    message = pair.receive()
    assert message == Leave(message.id, "destroy", 3.0)
    pair.send(LeaveGranted(message.id, [Status(1, "busy", "in all_reduce")]))
    assert [status.rank for status in call.result(10)] == [1]
    pair.sock.close()
    pair.member.close()
    assert pair.member.over
    assert pair.member.verdict is None


# Messages of the coordinator -------------------------------------------------------------------------------------


def test_a_query_is_answered_with_what_the_rank_does(pair: Pair) -> None:
    """A StatusQuery is answered from `describe`."""
    pair.member.describe = lambda: ("in all_reduce at train.py:3", 1.5)
    pair.send(StatusQuery())
    assert pair.receive() == Status(0, "busy", "in all_reduce at train.py:3", 1.5)


def test_a_description_that_raises_is_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """An exception of `describe` is logged, the query is answered, and the connection remains open."""
    pair.member.describe = lambda: 1 / 0  # type: ignore[assignment, return-value]
    pair.send(StatusQuery())
    assert pair.receive() == Status(0, "busy", "running")
    assert "ZeroDivisionError" in caplog.text
    pair.sync()


def test_the_coordinators_errors_are_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """A LogLine is written to the log as a warning."""
    pair.send(LogLine("ValueError: x"))
    pair.sync()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "the coordinator reports: ValueError: x")
    ]


@pytest.mark.parametrize(
    "data",
    [pack(b"\xc1"), b"\xff\xff\xff\xff", pack(encode(Complete(one_host=True, session="x")))],
    ids=["not msgpack", "a length over the limit", "a message of the roll call"],
)
def test_malformed_data_ends_the_connection(pair: Pair, data: bytes) -> None:
    """Data that is no message for a member ends the group on this rank."""
    pair.sock.sendall(data)
    verdict = pair.member.wait_for_verdict(10)
    assert verdict is not None
    assert verdict.slug == "coordinator-lost"


# The end of the group --------------------------------------------------------------------------------------------


def test_the_end_wakes_every_request(pair: Pair) -> None:
    """A store operation that waits raises the verdict when the group ends, and so does `check`."""
    call = pair.call(pair.member.store_request, "get", ["key"], wait_s=60)
    pair.receive()
    pair.send(Ended(LOST))
    assert raised(call).diagnosis == LOST
    assert pair.member.wait_for_verdict(10) == LOST
    with pytest.raises(AllhandsError, match="peer-lost"):
        pair.member.check()
    assert pair.member.verdict_raised


def test_a_coordinator_that_closes_without_notice_is_lost(pair: Pair) -> None:
    """The end of the connection ends the group, with the coordinator's place in the diagnosis."""
    pair.sock.close()
    verdict = pair.member.wait_for_verdict(10)
    assert verdict is not None
    assert (verdict.slug, verdict.ranks) == ("coordinator-lost", (0,))
    assert verdict.what == "the coordinator at node-a:29500 is gone"
    assert raised(pair.call(pair.member.store_request, "get", ["key"])).slug == "coordinator-lost"


def test_a_coordinator_that_exits_normally_is_not_lost(pair: Pair) -> None:
    """After Closing the end of the connection is no failure; later requests report that the coordinator has exited."""
    pair.send(Closing())
    pair.sock.shutdown(socket.SHUT_WR)
    pair.member.wait_for_verdict(10)
    assert pair.member.over
    assert pair.member.verdict is None
    found = raised(pair.call(pair.member.store_request, "get", ["key"]))
    assert (found.slug, "has exited" in found.diagnosis.what) == ("coordinator-silent", True)


def test_every_callback_runs_although_one_raises(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """An exception of a callback is logged; the other callbacks run, and the thread still answers pings."""
    seen: list[object] = []

    def wrong(_: Diagnosis) -> None:
        raise KeyError("callback")

    for callback in (seen.append, wrong, seen.append):
        pair.member.on_end(callback)
    pair.send(Ended(LOST))
    pair.sync()
    assert seen == [LOST, LOST]
    assert "KeyError: 'callback'" in caplog.text


def test_a_callback_registered_after_the_end_runs_at_once(pair: Pair) -> None:
    """`on_end` after the end of the group calls the callback before it returns; only the first verdict counts."""
    pair.send(Ended(LOST), Ended(FAILED))
    pair.sync()
    seen: list[object] = []
    pair.member.on_end(seen.append)
    assert seen == [LOST]


def test_a_callback_runs_once_however_its_registration_races_with_the_end(pair: Pair) -> None:
    """Callbacks that are registered while the group ends each run exactly once."""
    counts, threads, each = [0] * 400, 4, 100
    begin = threading.Barrier(threads + 1)

    def register(first: int) -> None:
        begin.wait(10)
        for number in range(first, first + each):
            pair.member.on_end(lambda _, number=number: counts.__setitem__(number, counts[number] + 1))

    calls = [pair.call(register, thread * each) for thread in range(threads)]
    begin.wait(10)
    pair.send(Ended(LOST))
    for call in calls:
        call.result(10)
    pair.sync()
    assert counts == [1] * len(counts)


def test_a_removed_callback_does_not_run(pair: Pair) -> None:
    """`off_end` removes a callback; removing it twice, or after it ran, is allowed."""
    seen: list[str] = []

    def first(_: Diagnosis) -> None:
        seen.append("first")

    def second(_: Diagnosis) -> None:
        seen.append("second")

    pair.member.on_end(first)
    pair.member.on_end(second)
    pair.member.off_end(first)
    pair.send(Ended(LOST))
    pair.sync()
    assert seen == ["second"]
    pair.member.off_end(first)
    pair.member.off_end(second)


# The process -----------------------------------------------------------------------------------------------------


def test_closing_ends_the_thread(pair: Pair) -> None:
    """`close` ends thread and connection, may be repeated, and requests without a verdict then return nothing."""
    pair.member.close()
    pair.member.close()
    assert pair.member.over
    assert pair.sock.recv(1) == b""
    assert pair.member.statuses() == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_no_member(pair: Pair) -> None:
    """In a forked child every request raises forked-process, and the parent's connection remains open."""
    child = os.fork()
    if not child:
        try:
            pair.member.store_request("get", ["key"])
        except AllhandsError as problem:
            os._exit(7 if problem.slug == "forked-process" and pair.member.forked else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not pair.member.forked
    pair.sync()
