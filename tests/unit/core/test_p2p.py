"""Messages through shared memory, with threads as ranks, so that they also run under sanitizers."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from allhands import _core
from threads import place, segments, together

LIMIT_NS = 20_000_000_000
U1, F4 = _core.DTYPES["uint8"], _core.DTYPES["float32"]
OK, TIMEOUT, DEAD, ABORTED, MISMATCH, INVALID = (
    _core.OUTCOMES[name] for name in ("ok", "timeout", "dead", "aborted", "mismatch", "invalid")
)
UNDER_WAY = -1
EAGER = 4096


@contextmanager
def p2ps(ranks: int, pidfds: tuple[int, ...] | None = None) -> Iterator[list[_core.P2P]]:
    """Yield the P2P object of each rank of a fresh segment."""
    with p2ps_and_segments(ranks, pidfds) as found:
        yield [p2p for p2p, _ in found]


@contextmanager
def p2ps_and_segments(
    ranks: int, pidfds: tuple[int, ...] | None = None
) -> Iterator[list[tuple[_core.P2P, _core.Segment]]]:
    """Yield the P2P object and the segment of each rank."""
    with segments(ranks, 4096, pidfds) as views:
        yield [(_core.P2P(view), view) for view in views]


@contextmanager
def progressing(p2p: _core.P2P) -> Iterator[list[int]]:
    """Run the progress thread of ``p2p``; yield the list of the keys of completed messages."""
    keys: list[int] = []

    def run() -> None:
        while found := p2p.progress():
            keys.extend(found)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield keys
    finally:
        p2p.stop()
        thread.join()


def until(true: Callable[[], bool]) -> None:
    """Wait until ``true``; a test's own deadline."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def pattern(source: int, target: int, tag: int, number: int, size: int) -> Any:
    """Return the bytes of one message, unique among all messages."""
    return np.random.default_rng([source, target, tag, number]).integers(0, 256, size, dtype="u1")


SIZES = (0, 1, 7, 100, EAGER, EAGER + 1, 20_000, 131_072, 131_073, 600_001, 1_500_000)


@pytest.mark.parametrize(("ranks", "anyone"), [(1, False), (2, False), (3, False), (4, True)])
def test_random_messages_agree_with_a_model(ranks: int, anyone: bool) -> None:
    """Messages of all sizes, posted in any order, with few tags, arrive once, complete, and in order for each tag."""
    choose = random.Random(ranks)  # noqa: S311  # the same plan for all
    plan: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    counts: dict[tuple[int, int, int], int] = defaultdict(int)
    for _ in range(40 * ranks):
        source, target, tag = choose.randrange(ranks), choose.randrange(ranks), choose.randrange(3)
        # A receive from any source cannot have a size that depends on the source.
        size = SIZES[tag * 4] if anyone else choose.choice(SIZES)
        plan[source, target].append((tag, counts[source, target, tag], size))
        counts[source, target, tag] += 1

    def work(rank: int) -> None:
        p2p, got = found[rank], []
        sends = [(target, *each) for target in range(ranks) for each in plan[rank, target]]
        receives = [(source, *each) for source in range(ranks) for each in plan[source, rank]]
        for step, (sending, peer, tag, number, size) in enumerate(merge(random.Random(rank), sends, receives)):  # noqa: S311
            if sending:
                data = pattern(rank, peer, tag, number, size)
                request = p2p.post_send(*place(data), U1, peer, tag, LIMIT_NS, step)
            else:
                data = np.full(size, 255, "u1")
                request = p2p.post_recv(*place(data), U1, -1 if anyone else peer, tag, LIMIT_NS, step)
            got.append((request, sending, peer, tag, number, data))
            if not sending and step % 7 == 0:
                p2p.wait(request, 0) if not isinstance(request, int) else None
        # Receives with one tag complete in the order in which they were posted.
        seen: dict[tuple[int, int], int] = defaultdict(int)
        for request, sending, peer, tag, number, data in got:
            outcome = request if isinstance(request, int) else p2p.wait(request, LIMIT_NS)
            who, code = divmod(outcome, 256)
            assert (code, outcome >= 0) == (OK, True)
            if not sending:
                assert who == peer or anyone
                expected = pattern(who, rank, tag, seen[who, tag] if anyone else number, data.nbytes)
                assert np.array_equal(data, expected), (who, tag, number)
                seen[who, tag] += 1

    with p2ps(ranks) as found:
        together(ranks, work)


def merge(choose: random.Random, sends: list[Any], receives: list[Any]) -> list[Any]:
    """Merge two lists at random; each keeps its order."""
    sends, receives, mixed = sends[::-1], receives[::-1], []
    while sends or receives:
        sending = bool(sends) and (not receives or choose.random() < 0.5)
        mixed.append((sending, *(sends if sending else receives).pop()))
    return mixed


def test_a_large_message_lets_a_small_one_pass() -> None:
    """Receiving in another order than sending works with messages of any size; so do sends to each other."""
    huge = np.random.default_rng(1).integers(0, 256, 5_000_000, dtype="u1")

    def work(rank: int) -> None:
        p2p, other = found[rank], 1 - rank
        first = p2p.post_send(*place(huge), U1, other, 1, LIMIT_NS, 1)
        small = np.full(10, rank, "u1")
        second = p2p.post_send(*place(small), U1, other, 2, LIMIT_NS, 2)
        assert second == other << 8
        got, large = np.zeros(10, "u1"), np.zeros_like(huge)
        assert p2p.recv(*place(got), U1, other, 2, LIMIT_NS) == other << 8
        assert p2p.recv(*place(large), U1, other, 1, LIMIT_NS) == other << 8
        assert p2p.wait(first, LIMIT_NS) == other << 8
        assert np.array_equal(got, np.full(10, other))
        assert np.array_equal(large, huge)

    with p2ps(2) as found:
        together(2, work)


def test_more_offers_than_blocks() -> None:
    """Unexpected messages hold no block: a hundred large ones do not block another one."""
    large = [np.full(200_000, number, "u1") for number in range(100)]
    with p2ps(2) as (one, two):
        requests = [one.post_send(*place(data), U1, 1, number, LIMIT_NS, 0) for number, data in enumerate(large)]

        def work(rank: int) -> None:
            if rank == 0:
                for request in requests:
                    assert one.wait(request, LIMIT_NS) == 1 << 8
                return
            for number in reversed(range(100)):
                got = np.zeros(200_000, "u1")
                assert two.recv(*place(got), U1, 0, number, LIMIT_NS) == 0
                assert (got == number).all()

        together(2, work)


def test_many_small_messages_before_the_one_that_is_wanted() -> None:
    """Far more messages than a mailbox holds wait for a busy receiver; none is lost if it receives the last first."""
    with p2ps(2) as (one, two):

        def work(rank: int) -> None:
            data = np.zeros(500, "u1")
            for number in range(1000):
                if rank == 0:
                    data.fill(number % 251)
                    assert one.send(*place(data), U1, 1, 5, LIMIT_NS) == 1 << 8
                    if number == 999:
                        assert one.send(*place(data), U1, 1, 6, LIMIT_NS) == 1 << 8
                else:
                    if number == 0:
                        time.sleep(0.05)
                        assert two.recv(*place(data), U1, 0, 6, LIMIT_NS) == 0
                    assert two.recv(*place(data), U1, 0, 5, LIMIT_NS) == 0
                    assert (data == number % 251).all()

        together(2, work)


def test_any_source_receives_in_order_of_arrival() -> None:
    """A receive from any source gets the earliest message with its tag, and returns its source."""
    with p2ps(4) as found:
        for source in (2, 1, 3):
            data = np.full(3, source, "u1")
            assert found[source].send(*place(data), U1, 0, 9, LIMIT_NS) == 0
        got = np.zeros(3, "u1")
        assert [found[0].recv(*place(got), U1, -1, 9, LIMIT_NS) for _ in range(3)] == [2 << 8, 1 << 8, 3 << 8]
        assert got.tolist() == [3] * 3


def test_the_progress_thread_completes_messages_without_waiters() -> None:
    """Large messages progress while both ranks do other things, and their keys are reported on completion."""
    data, got = np.arange(3_000_000, dtype="u4"), np.zeros(3_000_000, "u4")
    with p2ps(2) as (one, two), progressing(one) as sent, progressing(two) as received:
        first = two.post_recv(*place(got), F4, 0, 0, LIMIT_NS, 17)
        second = one.post_send(*place(data), F4, 1, 0, LIMIT_NS, 18)
        until(lambda: received == [17] and sent == [18])
        assert np.array_equal(data, got)
        assert (two.test(first), one.test(second)) == (0, 1 << 8)
        # The progress thread goes to sleep and is woken again.
        time.sleep(0.05)
        third = two.post_recv(*place(got), F4, 0, 0, LIMIT_NS, 19)
        assert one.pending_sends() == 0
        back = data[::-1].copy()
        fourth = one.post_send(*place(back), F4, 1, 0, LIMIT_NS, 20)
        assert two.wait(third, LIMIT_NS) == 0
        assert one.wait(fourth, LIMIT_NS) == 1 << 8
        assert np.array_equal(back, got)


def test_a_waiting_thread_does_not_delay_reports() -> None:
    """A complete posted message is reported although another thread of the rank waits for another message."""
    with p2ps(2) as (one, two), progressing(one) as keys:
        never, got = np.zeros(8, "u1"), np.zeros(8, "u1")
        outcomes: list[int] = []
        blocked = threading.Thread(target=lambda: outcomes.append(one.recv(*place(never), U1, 1, 1, LIMIT_NS)))
        blocked.start()
        time.sleep(0.05)
        for tag in (2, 3):
            request = one.post_recv(*place(got), U1, 1, tag, LIMIT_NS, tag)
            assert two.send(*place(never), U1, 0, tag, LIMIT_NS) == 0
            until(lambda tag=tag: tag in keys)  # type: ignore[misc]
            assert one.test(request) == 1 << 8
        assert outcomes == []
        assert two.send(*place(never), U1, 0, 1, LIMIT_NS) == 0
        blocked.join()
        assert outcomes == [1 << 8]


def test_threads_share_one_mail() -> None:
    """Threads of one rank, each with its own tag, neither receive nor delay each other's messages."""
    with p2ps(2) as found:

        def work(number: int) -> None:
            rank, tag = number % 2, number // 2
            p2p, other, choose = found[rank], 1 - rank, random.Random(tag)  # noqa: S311
            for step in range(60):
                size = choose.choice(SIZES[:9])
                data = pattern(tag, tag, tag, step, size)
                if (step + rank) % 2:
                    assert p2p.send(*place(data), U1, other, tag, LIMIT_NS) == other << 8
                else:
                    got = np.zeros(size, "u1")
                    assert p2p.recv(*place(got), U1, other, tag, LIMIT_NS) == other << 8
                    assert np.array_equal(got, data)

        together(8, work)


@pytest.mark.parametrize("size", [40, 40_000])
@pytest.mark.parametrize("late", [False, True])
def test_a_message_that_does_not_fit_ends_the_group(size: int, late: bool) -> None:
    """A size or dtype that the receive does not expect: both ranks get the mismatch, no data is written."""
    for wanted, dtype in ((size + 4, F4), (size, U1), (0, F4)):
        with p2ps_and_segments(2) as ((one, _), (two, view)):
            codes = [0, 0]
            got = np.full(wanted, 7, "u1")

            def work(rank: int, got: Any = got, dtype: int = dtype, codes: list[int] = codes, **p2p: Any) -> None:
                if rank == 0:
                    if late:
                        time.sleep(0.05)
                    data = np.zeros(size, "u1")
                    codes[0] = p2p["one"].send(*place(data), F4, 1, 3, LIMIT_NS) % 256
                    # A small send is complete when it is in the mailbox: the next call fails.
                    until(lambda: p2p["two"].mismatch() is not None)
                    codes[0] = codes[0] or p2p["one"].send(*place(data), F4, 1, 3, LIMIT_NS) % 256
                else:
                    codes[1] = p2p["two"].recv(*place(got), dtype, 0, 3, LIMIT_NS)

            together(2, lambda rank, work=work, one=one, two=two: work(rank, one=one, two=two))  # type: ignore[misc]
            assert codes == [MISMATCH, MISMATCH]
            assert (got == 7).all()
            assert one.mismatch() == (0, 1, 3, F4, size, dtype, wanted)
            assert view.barrier(LIMIT_NS) == MISMATCH


def test_a_rank_that_does_not_send_is_named_at_the_deadline() -> None:
    """A receive and a large send without a counterpart end at their deadline, with the rank they waited for."""
    with p2ps(3) as found:
        data = np.zeros(100_000, "u1")
        started = time.monotonic()
        assert found[0].recv(*place(data), U1, 2, 0, 200_000_000) == 2 << 8 | TIMEOUT
        assert 0.2 <= time.monotonic() - started < 10
        # No peer knew of that receive: the group lives on.
        assert found[0].recv(*place(data), U1, -1, 0, 50_000_000) % 256 == TIMEOUT
        assert found[2].send(*place(data[:5]), U1, 0, 4, LIMIT_NS) == 0
        assert found[0].recv(*place(data[:5]), U1, 2, 4, LIMIT_NS) == 2 << 8
        assert found[0].send(*place(data), U1, 1, 0, 200_000_000) == 1 << 8 | TIMEOUT
        # That send had been offered; its data is gone.
        assert found[1].recv(*place(data), U1, 0, 0, LIMIT_NS) % 256 == TIMEOUT
        with progressing(found[2]) as keys:
            assert found[2].post_recv(*place(data), U1, 1, 0, LIMIT_NS, 4) % 256 == TIMEOUT
            assert keys == []


def test_waiting_may_have_a_limit_of_its_own() -> None:
    """A wait that times out leaves its message pending; a later wait or the progress thread completes it."""
    with p2ps(2) as (one, two), progressing(one) as keys:
        got = np.zeros(8, "u1")
        request = one.post_recv(*place(got), U1, 1, 0, LIMIT_NS, 5)
        assert one.wait(request, 30_000_000) == UNDER_WAY
        assert one.test(request) == UNDER_WAY
        assert two.send(*place(np.arange(8, dtype="u1")), U1, 0, 0, LIMIT_NS) == 0
        until(lambda: keys == [5])
        assert one.wait(request, 0) == 1 << 8
        assert got.tolist() == list(range(8))


@pytest.mark.parametrize("size", [8, 1_000_000])
def test_an_end_wakes_waiting_ranks(size: int) -> None:
    """`end` with `wake_all` ends a sleeping send or receive at once, and posted messages too."""
    with p2ps_and_segments(3) as ((one, _), (two, view), (three, _)), progressing(three) as keys:
        data, large = np.zeros(size, "u1"), np.zeros(1_000_000, "u1")
        posted = three.post_recv(*place(data), U1, 0, 0, LIMIT_NS, 6)
        other = three.post_send(*place(large), U1, 0, 0, LIMIT_NS, 7)

        def end() -> None:
            view.end(1)
            two.wake_all()

        timer = threading.Timer(0.1, end)
        timer.start()
        assert one.recv(*place(data), U1, 1, 0, LIMIT_NS) == 1 << 8 | ABORTED
        assert one.send(*place(data), U1, 1, 0, LIMIT_NS) == 1 << 8 | ABORTED
        until(lambda: sorted(keys) == [6, 7])
        assert three.wait(posted, LIMIT_NS) == three.test(other) == 1 << 8 | ABORTED
        timer.join()


def test_stopping_ends_pending_messages_of_this_rank_only() -> None:
    """`stop` ends the progress thread and this rank's messages; the other rank is not notified."""
    with p2ps(2) as (one, two):
        got = np.zeros(8, "u1")
        request = one.post_recv(*place(got), U1, 1, 0, LIMIT_NS, 1)
        with progressing(one):
            pass
        assert one.wait(request, LIMIT_NS) == ABORTED
        assert one.recv(*place(got), U1, 1, 0, LIMIT_NS) == ABORTED
        assert two.send(*place(got), U1, 0, 0, LIMIT_NS) == 0


def test_dropping_a_request_is_safe() -> None:
    """Freeing a receive without a match has no effect; freeing a send that a peer knows of ends the group."""
    with p2ps_and_segments(2) as ((one, _), (two, view)):
        got = np.zeros(100_000, "u1")
        request = one.post_recv(*place(got[:8]), U1, 1, 0, LIMIT_NS, 1)
        del request
        assert two.send(*place(np.ones(8, "u1")), U1, 0, 0, LIMIT_NS) == 0
        assert one.recv(*place(got[8:16]), U1, 1, 0, LIMIT_NS) == 1 << 8
        assert got[:16].tolist() == [0] * 8 + [1] * 8
        request = one.post_send(*place(got), U1, 1, 0, LIMIT_NS, 1)
        del request
        assert two.recv(*place(got), U1, 0, 0, LIMIT_NS) % 256 == ABORTED
        assert view.barrier(LIMIT_NS) == ABORTED


def test_a_dead_process_is_noticed() -> None:
    """The end of a rank's process is noticed through its pidfd; messages that it had sent still arrive."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    pidfd = os.pidfd_open(child)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for source in (1, -1):
        with p2ps(2, (-1, pidfd)) as (one, two):
            data = np.full(8, 3, "u1")
            assert two.send(*place(data), U1, 0, 0, LIMIT_NS) == 0
            got = np.zeros(8, "u1")
            assert one.recv(*place(got), U1, source, 0, LIMIT_NS) == 1 << 8
            assert got.tolist() == [3] * 8
            assert one.recv(*place(got), U1, source, 0, LIMIT_NS) == 1 << 8 | DEAD
    with p2ps(3, (-1, pidfd, -1)) as (one, _, three):
        # Another rank may still send.
        request = one.post_recv(*place(got), U1, -1, 0, LIMIT_NS, 1)
        assert one.wait(request, 200_000_000) == UNDER_WAY
        assert three.send(*place(data), U1, 0, 0, LIMIT_NS) == 0
        assert one.wait(request, LIMIT_NS) == 2 << 8
        assert one.send(*place(np.zeros(10_000, "u1")), U1, 1, 0, LIMIT_NS) == 1 << 8 | DEAD
    os.waitpid(child, 0)
    os.close(pidfd)


def test_arguments_that_make_no_sense_are_refused() -> None:
    """A rank outside the group is an outcome; an object that is no Segment or no request of this object raises."""
    data = np.zeros(8, "u1")
    with p2ps(2) as (one, two):
        assert one.send(*place(data), U1, 2, 0, LIMIT_NS) % 256 == INVALID
        assert one.send(*place(data), U1, -1, 0, LIMIT_NS) % 256 == INVALID
        assert one.recv(*place(data), U1, 2, 0, LIMIT_NS) % 256 == INVALID
        request = one.post_recv(*place(data), U1, 1, 0, LIMIT_NS, 1)
        with pytest.raises(ValueError, match="another P2P object"):
            two.wait(request, 0)
        with pytest.raises(ValueError, match="PyCapsule"):
            one.wait(3, 0)
        with pytest.raises(TypeError, match="arguments"):
            one.send(1)  # type: ignore[call-arg]
        with pytest.raises(OverflowError):
            one.send(*place(data), U1, 1, -1, LIMIT_NS)
    with pytest.raises(TypeError, match="Segment"):
        _core.P2P(3)  # type: ignore[arg-type]
