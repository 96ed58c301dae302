"""What ranks on a GPU tell each other, in real shared memory; only that the GPU reaches it is left out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from allhands.engines.base import EngineTimeout
from allhands.engines.cuda import driver, stream
from allhands.engines.cuda.stream import BROUGHT, CONSUMED, Counters
from allhands.engines.dtypes import operation_code
from allhands.engines.fingerprint import Call

SOON = 10.0


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counters]]:
    """Three ranks, called 4, 5 and 6, in one memory."""
    monkeypatch.setattr(driver, "map_host", lambda address, _size: address)
    monkeypatch.setattr(driver, "unmap_host", lambda _address: None)
    descriptor = os.memfd_create("counters")
    os.ftruncate(descriptor, stream.region_bytes(3) * 3)
    yield [Counters(descriptor, rank, [4, 5, 6]) for rank in range(3)]
    os.close(descriptor)


def call(number: int, name: str = "all_reduce", size: int = 4, *, uneven: bool = False) -> Call:
    """Return a call as a rank tells of it."""
    return Call(number, operation_code(name), size, dtype=12, uneven=uneven, shape="[1]", site="train.py:3")


def never() -> None:
    """Do what is to be done while waiting: nothing."""


def post(each: Counters, what: Call, sizes: list[int] | None = None) -> object:
    """Tell of a call, and do not wait for long."""
    return each.post(what, sizes or [], time.monotonic() + SOON, never)


def test_the_same_calls(three: list[Counters]) -> None:
    """Calls that are the same are compared and forgotten, however far one rank is ahead, up to the room."""
    for number in range(50):
        assert post(three[0], call(number)) is None
    assert three[0].compared == 0
    for each in three[1:]:
        for number in range(50):
            assert post(each, call(number)) is None
    assert three[2].compared == 50
    assert three[0].compare() is None
    assert three[0].compared == 50


def test_a_difference_is_found_by_everyone(three: list[Counters]) -> None:
    """Who comes last finds it at once, the others when they look; all blame the same rank."""
    assert post(three[0], call(0)) is None
    assert post(three[1], call(0, size=8)) is not None
    found = [post(three[2], call(0)), three[0].compare(), three[1].compare()]
    for judgement in found:
        assert judgement is not None
        assert judgement.odd == (1,)
        assert any("rank 5" in line and "x 2" in line for line in judgement.lines)


def test_sizes_that_do_not_fit_pair_by_pair(three: list[Counters]) -> None:
    """Uneven parts are compared between those who exchange them, once all have told."""
    gives = [[0, 4, 4], [4, 0, 4], [4, 4, 0]]
    takes = [[0, 4, 4], [4, 0, 8], [4, 4, 0]]
    found = [
        post(each, call(0, "all_to_all", 8, uneven=True), gives[rank] + takes[rank]) for rank, each in enumerate(three)
    ]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert any("rank 6 gives rank 5 4 bytes" in line for line in found[2].lines)  # type: ignore[attr-defined]


def test_who_is_too_far_ahead_waits(three: list[Counters]) -> None:
    """A rank waits for the slowest once its records have no room, and goes on when that one comes."""
    for number in range(64):
        assert post(three[0], call(number)) is None
    looked: list[int] = []

    def check() -> None:
        looked.append(1)
        for each in three[1:]:
            post(each, call(len(looked) - 1))
        three[0].compare()

    assert three[0].post(call(64), [], time.monotonic() + SOON, check) is None
    assert looked


def test_waiting_ends_at_the_deadline(three: list[Counters]) -> None:
    """Meeting names the rank that has not told; a check that raises ends it at once."""
    post(three[0], call(0))
    post(three[1], call(0))
    with pytest.raises(EngineTimeout) as caught:
        three[0].meet(time.monotonic() + 0.05, never)
    assert caught.value.culprit == 2

    def over() -> None:
        raise RuntimeError("the group is over")

    with pytest.raises(RuntimeError, match="over"):
        three[0].meet(time.monotonic() + SOON, over)


def test_release_is_above_every_number(three: list[Counters]) -> None:
    """After a release, every number that a stream may wait for is there, on every rank; as the driver compares."""
    three[1].release()
    for each in three:
        for rank in range(3):
            assert each.value(BROUGHT, rank) - (1 << 60) > 0
            assert each.value(CONSUMED, rank) < 1 << 63
    assert not three[0].all_closed()
    for each in three:
        each.mark_closed()
    assert three[0].all_closed()
    assert three[0].address(CONSUMED, 1) - three[0].address(CONSUMED, 0) == stream.region_bytes(3)
