"""The coordinator's actions on what members send, over real Unix sockets; deadlines are given as arguments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from allhands.control.coordinator import Coordinator, _notable
from allhands.control.messages import (
    Acknowledged,
    Challenge,
    Closing,
    Complete,
    Ended,
    EndGroup,
    Failed,
    Leave,
    LeaveGranted,
    LogLine,
    Refused,
    Status,
    StatusQuery,
    StatusReport,
    StatusRequest,
    StoreReply,
    StoreRequest,
)
from allhands.diagnosis import Diagnosis
from unit.control.peers import TOKEN, claim, job


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario; a hang is a failure."""
    asyncio.run(asyncio.wait_for(scenario, 30))


async def until(condition: Any) -> None:
    """Wait until the coordinator has handled what was sent."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")


# The roll call ---------------------------------------------------------------------------------------------------


def test_the_last_member_completes_the_roll_call() -> None:
    """Every member gets the same Complete, after the last one has answered."""

    async def scenario() -> None:
        async with job() as made:
            first = await made.join(0, 2)
            second = await made.join(1, 2)
            complete = await first.receive()
            assert complete == Complete(one_host=True, session=complete.session)
            assert await second.receive() == complete

    run(scenario())


def test_every_member_gets_the_same_refusal() -> None:
    """Members that disagree are refused with one diagnosis; so is a later one of the same attempt."""

    async def scenario() -> None:
        async with job(linger_s=60) as made:
            peers = [await made.join(0, 3), await made.join(1, 4)]
            refused = [await peer.receive() for peer in peers]
            assert isinstance(refused[0], Refused)
            assert refused[0] == refused[1]
            assert refused[0].diagnosis.slug == "world-size-mismatch"
            late = await made.join(2, 3)
            assert await late.receive() == refused[0]

    run(scenario())


def test_the_refused_attempt_ends_the_coordinator() -> None:
    """A coordinator that refused is finished once every rank has received the refusal and disconnected."""

    async def scenario() -> None:
        async with job(linger_s=60) as made:
            peers = [await made.join(0, 2), await made.join(1, 2, backend="nccl")]
            for peer in peers:
                assert isinstance(await peer.receive(), Refused)
            assert not made.coordinator.finished.is_set()
            for peer in peers:
                peer.close()
            await until(lambda: not made.coordinator._connections)
            made.coordinator._finish(time.monotonic())
            assert made.coordinator.finished.is_set()

    run(scenario())


def test_a_claim_of_the_next_attempt_ends_a_refused_one() -> None:
    """A rank that was refused and answers again gets Closing: the next coordinator needs the address."""

    async def scenario() -> None:
        async with job(linger_s=60) as made:
            await made.join(0, 2)
            second = await made.join(1, 3)
            assert isinstance(await second.receive(), Refused)
            again = await made.join(1, 2, generation=1)
            assert await again.receive() == Closing()
            assert made.coordinator.finished.is_set()

    run(scenario())


def test_a_second_process_of_a_rank_is_refused_after_completion() -> None:
    """A process that answers late for a rank that is present is refused, and the group continues."""

    async def scenario() -> None:
        async with job() as made:
            peers = await made.form(2)
            double = await made.join(1, 2, pid=999)
            refused = await double.receive()
            assert (refused.diagnosis.slug, refused.diagnosis.ranks) == ("duplicate-rank", (1,))
            peers[0].send(StoreRequest(1, "num_keys"))
            assert await peers[0].receive() == StoreReply(1, number=0)

    run(scenario())


def test_the_next_group_of_the_same_processes_connects_again() -> None:
    """A member that is in this group already, and answers for the next one, gets Closing."""

    async def scenario() -> None:
        async with job() as made:
            await made.form(2)
            again = await made.join(1, 2, generation=1)
            assert await again.receive() == Closing()
            assert made.coordinator.verdict is None

    run(scenario())


def test_a_member_that_disconnects_during_the_roll_call_may_answer_again() -> None:
    """The end of a connection during the roll call is no failure: the rank is missing until it answers again."""

    async def scenario() -> None:
        async with job() as made:
            first = await made.join(0, 2)
            await until(lambda: 0 in made.coordinator.roll.present)
            first.close()
            await until(lambda: 0 in made.coordinator.roll.gone)
            await made.form(2)
            assert made.coordinator.verdict is None

    run(scenario())


def test_a_rank_without_the_token_is_refused_and_remembered() -> None:
    """A failed proof ends that connection only; the roll call remembers it as a reason for a missing rank."""

    async def scenario() -> None:
        async with job(token=TOKEN) as made:
            wrong = await made.connect()
            assert isinstance(await wrong.authenticate(1, 2, token=b"wrong"), Challenge)
            refused = await wrong.receive()
            assert (refused.diagnosis.slug, refused.diagnosis.ranks) == ("not-authorised", (1,))
            assert await wrong.receive() is None
            await until(lambda: made.coordinator.roll.unproven)
            assert list(made.coordinator.roll.unproven) == [1]
            peers = [await made.join(rank, 2, token=TOKEN) for rank in range(2)]
            assert isinstance(await peers[1].receive(), Complete)

    run(scenario())


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"ALLHANDS/1\r\n\r\n\xff\xff\xff\xff"])
def test_a_stranger_is_disconnected(data: bytes) -> None:
    """Bytes that are no handshake end their own connection and nothing else."""

    async def scenario() -> None:
        async with job() as made:
            stranger = await made.connect()
            stranger.writer.write(data)
            assert await stranger.receive() is None
            await made.form(1)

    run(scenario())


# The store -------------------------------------------------------------------------------------------------------


def test_a_get_waits_for_the_set_of_another_member() -> None:
    """The member that waits for a key gets the value when another one sets it."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            first.send(StoreRequest(1, "get", ["key"], wait_s=60))
            await until(lambda: made.coordinator.store._parked)
            second.send(StoreRequest(2, "set", ["key"], [b"value"]))
            assert await first.receive() == StoreReply(1, [b"value"])
            assert await second.receive() == StoreReply(2)

    run(scenario())


def test_requests_after_the_end_are_not_parked() -> None:
    """After the group has ended nothing waits for a key that a dead rank would have set."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            second.close()
            assert isinstance(await first.receive(), Ended)
            first.send(StoreRequest(1, "get", ["key"], wait_s=60))
            assert await first.receive() == StoreReply(1, problem="timeout")

    run(scenario())


# Failures --------------------------------------------------------------------------------------------------------


def test_a_connection_that_closes_without_a_leave_ends_the_group() -> None:
    """The survivors get peer-lost with rank and host."""

    async def scenario() -> None:
        async with job() as made:
            peers = await made.form(3)
            peers[1].close()
            for peer in (peers[0], peers[2]):
                ended = await peer.receive()
                assert (ended.diagnosis.slug, ended.diagnosis.ranks) == ("peer-lost", (1,))
                assert ended.diagnosis.hosts == ("node-a",)
                assert "and it had not left the group (observed)" in ended.diagnosis.why

    run(scenario())


def test_an_exception_ends_the_group_with_its_traceback() -> None:
    """A Failed reaches every member as peer-failed with the traceback, and is acknowledged."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            second.send(Failed(7, "KeyError", "'x'", "Traceback …", follows=False))
            ended = await first.receive()
            assert (ended.diagnosis.slug, ended.diagnosis.ranks) == ("peer-failed", (1,))
            assert (ended.diagnosis.what, ended.diagnosis.traceback) == ("rank 1 raised KeyError: 'x'", "Traceback …")
            assert await second.receive(Ended) == Acknowledged(7)

    run(scenario())


def test_the_cause_is_reported_and_not_its_consequence() -> None:
    """A transport error that one rank raises because another died does not become the verdict."""

    async def scenario() -> None:
        async with job() as made:
            first, second, third = await made.form(3)
            second.send(Failed(1, "RuntimeError", "Connection closed by peer", "", follows=True))
            assert await second.receive() == Acknowledged(1)
            assert made.coordinator.verdict is None
            third.close()
            ended = await first.receive()
            assert (ended.diagnosis.slug, ended.diagnosis.ranks) == ("peer-lost", (2,))

    run(scenario())


def test_a_consequence_without_a_cause_ends_the_group_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no death explains the transport error, the error itself is the verdict."""
    monkeypatch.setattr("allhands.control.coordinator._FOLLOW_S", 0.05)

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            second.send(Failed(1, "RuntimeError", "Connection closed by peer", "", follows=True))
            assert await second.receive() == Acknowledged(1)
            assert (await first.receive()).diagnosis.slug == "peer-failed"

    run(scenario())


def test_the_first_diagnosis_is_the_verdict() -> None:
    """The group ends once: a second EndGroup is acknowledged, and not sent to members."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            verdict = Diagnosis("collective-mismatch", "ranks called different things", ranks=(1,))
            first.send(EndGroup(1, verdict))
            assert await first.receive() == Ended(verdict)
            second.send(EndGroup(2, Diagnosis("peer-silent", "rank 0 is silent")))
            assert [await second.receive(), await second.receive()] == [Ended(verdict), Acknowledged(2)]
            assert made.coordinator.verdict == verdict

    run(scenario())


@pytest.mark.parametrize("before", ["the claims", "completion"])
def test_the_death_of_rank_0_is_reported_before_the_end(before: str) -> None:
    """A coordinator whose rank 0 ended sends this to the others, and finishes when they have disconnected."""

    async def scenario() -> None:
        async with job() as made:
            peers = [await made.join(rank, 2 + (before == "completion")) for rank in range(2)]
            if before == "the claims":
                for peer in peers:
                    assert isinstance(await peer.receive(), Complete)
            await until(lambda: len(made.coordinator.members) == 2)
            made.coordinator.abandon("its process ended")
            message = await peers[1].receive()
            assert isinstance(message, Ended if before == "the claims" else Refused)
            assert (message.diagnosis.slug, message.diagnosis.ranks) == ("peer-lost", (0,))
            peers[1].close()
            await until(lambda: not made.coordinator._connections)
            made.coordinator._finish(time.monotonic() + 60)
            assert made.coordinator.finished.is_set()

    run(scenario())


# Leaving ---------------------------------------------------------------------------------------------------------


def test_members_that_leave_wait_for_each_other() -> None:
    """A Leave is granted when the last member leaves; the coordinator is finished when all have disconnected."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            first.send(Leave(1, "destroy", 60.0))
            await until(lambda: made.coordinator._leaving)
            second.send(Leave(2, "destroy", 60.0))
            assert await first.receive(StatusQuery) == LeaveGranted(1, [])
            assert await second.receive(StatusQuery) == LeaveGranted(2, [])
            for peer in (first, second):
                peer.close()
            await made.coordinator.finished.wait()
            assert made.coordinator.verdict is None

    run(scenario())


def test_a_leave_is_granted_at_its_deadline_with_the_others_statuses() -> None:
    """At the deadline of its wait a member learns which ranks have not left, and what they do."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            first.send(Leave(1, "destroy", 5.0))
            assert await second.receive() == StatusQuery()
            second.send(Status(1, "busy", "in all_reduce", 2.0))
            await until(lambda: made.coordinator.members[1].status)
            made.coordinator._grant_leaves(time.monotonic())
            assert made.coordinator._leaving
            made.coordinator._grant_leaves(time.monotonic() + 6)
            granted = await first.receive()
            assert [(status.rank, status.doing) for status in granted.still] == [(1, "in all_reduce")]

    run(scenario())


def test_leaving_after_the_end_is_granted_at_once() -> None:
    """In a group that has ended a Leave is granted at once."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            second.close()
            assert isinstance(await first.receive(), Ended)
            first.send(Leave(1, "destroy", 60.0))
            assert await first.receive() == LeaveGranted(1, [])

    run(scenario())


def test_closing_is_sent_to_every_member() -> None:
    """`close` sends Closing; a member that connects meanwhile gets it too."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            closing = asyncio.ensure_future(made.coordinator.close())
            assert [await first.receive(), await second.receive()] == [Closing(), Closing()]
            assert [await first.receive(), await second.receive()] == [None, None]
            await closing

    run(scenario())


# Statuses --------------------------------------------------------------------------------------------------------


def test_statuses_are_reported_when_all_have_answered() -> None:
    """A StatusRequest queries every member, and is answered after the last Status."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            first.send(StatusRequest(1, 60.0))
            for rank, peer in enumerate((first, second)):
                assert await peer.receive() == StatusQuery()
                peer.send(Status(rank, "busy", f"in call {rank}", 1.0))
            report = await first.receive()
            assert isinstance(report, StatusReport)
            assert [(each.rank, each.state, each.doing, each.host) for each in report.everyone] == [
                (0, "busy", "in call 0", "node-a"),
                (1, "busy", "in call 1", "node-a"),
            ]

    run(scenario())


def test_a_member_that_does_not_answer_is_silent() -> None:
    """At the deadline of a StatusRequest the rank that has not answered is reported as silent."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            first.send(StatusRequest(1, 2.0))
            assert await first.receive() == StatusQuery()
            assert await second.receive() == StatusQuery()
            first.send(Status(0, "busy", "waiting"))
            await until(lambda: made.coordinator.members[0].status)
            made.coordinator._report_statuses(time.monotonic() + 3)
            report = await first.receive()
            assert [each.state for each in report.everyone] == ["busy", "silent"]

    run(scenario())


def test_reports_about_large_groups_are_short() -> None:
    """Of many ranks only those are reported that differ from the others, 64 at most."""
    same = [Status(rank, "busy", "in all_reduce") for rank in range(1000)]
    assert _notable(same[:64]) == same[:64]
    assert _notable(same) == same[:64]
    same[500] = Status(500, "busy", "in barrier")
    same[7] = Status(7, "silent", "in all_reduce")
    assert [status.rank for status in _notable(same)] == [7, 500]


# The clock -------------------------------------------------------------------------------------------------------


def test_a_roll_call_ends_at_its_deadline() -> None:
    """The clock refuses a roll call at the deadline of its first claim."""

    async def scenario() -> None:
        async with job(ticking=True) as made:
            peer = await made.join(0, 2, timeout_s=0.01)
            refused = await peer.receive()
            assert (refused.diagnosis.slug, refused.diagnosis.ranks) == ("missing-ranks", (1,))

    run(scenario())


def test_an_error_of_the_event_loop_goes_to_a_members_log() -> None:
    """`log` sends message and traceback to the lowest rank, and does nothing without members."""

    async def scenario() -> None:
        async with job() as made:
            made.coordinator.log({"message": "too early"})
            first, _ = await made.form(2)
            made.coordinator.log({"message": "a task failed", "exception": ValueError("x")})
            line = await first.receive()
            assert isinstance(line, LogLine)
            assert line.text.startswith("a task failed\n")
            assert "ValueError: x" in line.text

    run(scenario())


def test_a_second_claim_ends_the_connection() -> None:
    """A member that claims twice is disconnected."""

    async def scenario() -> None:
        async with job() as made:
            first, second = await made.form(2)
            second.send(claim(1))
            assert await second.receive() is None
            assert (await first.receive()).diagnosis.slug == "peer-lost"

    run(scenario())


def test_a_coordinator_without_members_is_not_finished() -> None:
    """Before the roll call is complete nothing finishes a coordinator."""

    async def scenario() -> None:
        coordinator = Coordinator()
        coordinator._finish(time.monotonic() + 1e6)
        assert not coordinator.finished.is_set()

    run(scenario())
