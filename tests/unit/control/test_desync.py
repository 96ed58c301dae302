"""What a rank tells of its calls: bounded, however many there are, and with numbers that other ranks tell of too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allhands.control.desync import Known, Tally, Teller
from allhands.control.messages import Said, encode

CALLS = [Known(code, f"called {code}") for code in (3, 5, 7, 11)]


def made(count: int, tally: Tally) -> None:
    """Make ``count`` calls."""
    for number in range(count):
        tally.add(CALLS[number % len(CALLS)])


@pytest.fixture
def teller() -> Teller:
    """Return the teller of a rank of two."""
    return Teller(lambda: None, 2)


def digests(said: Said) -> dict[int, int]:
    """Return what was said, by number."""
    return dict(zip(said.numbers, said.digests, strict=True))


def test_a_few_calls_are_told_one_by_one(teller: Teller) -> None:
    """Each once; the same calls give the same digests, and others do not."""
    one, other = teller.open("a", 2), teller.open("b", 2)
    made(10, one)
    made(10, other)
    first = one.take()
    assert (first.numbers, first.upto) == (list(range(1, 11)), 10)
    assert digests(first) == digests(other.take())
    one.add(CALLS[0])
    other.add(CALLS[1])
    assert [one.take().numbers, set(one.take().numbers)] == [[11], set()]
    assert other.take().digests != first.digests[-1:]
    assert len(set(first.digests)) == 10


@pytest.mark.parametrize("counts", [(200, 37), (5000, 300), (100_000, 9000), (100_000, 64), (250_000, 9000)])
def test_reports_of_any_length_have_numbers_in_common(counts: tuple[int, int]) -> None:
    """Two ranks that report after different numbers of calls can be compared as they go."""
    told: list[dict[int, int]] = []
    for each in counts:
        tally = Teller(lambda: None, 2).open("a", 2)
        heard: dict[int, int] = {}
        for _ in range(min(counts[0], 300_000) // each or 1):
            made(each, tally)
            heard |= digests(tally.take())
        told.append(heard)
    # Not the same calls: each report begins at the same call again. Common numbers are what is asked for here.
    least = min(max(heard) for heard in told)
    common = sorted(number for number in told[0].keys() & told[1].keys() if number <= least)
    assert common
    assert least - common[-1] < 4096


def test_memory_and_reports_are_bounded(teller: Teller) -> None:
    """After a million calls nothing is larger than after a third, though nobody took anything meanwhile."""

    def size(tally: Tally) -> int:
        return sum(len(value) for value in vars(tally).values() if hasattr(value, "__len__"))

    tally = teller.open("a", 2)
    made(300_000, tally)
    before = size(tally)
    made(700_000, tally)
    assert size(tally) <= before < 1000
    told = teller.take(0.0)
    assert told is not None
    assert len(told.groups) == 1
    assert len(encode(told)) < 2000
    assert told.groups[0].upto == 1_000_000


def test_what_is_remembered_can_be_asked_for(teller: Teller) -> None:
    """The newest calls by their words, as many as there are."""
    tally = teller.open("a", 2)
    made(1000, tally)
    answer = tally.recall(990, 995)
    assert (answer.first, answer.upto, len(answer.codes)) == (991, 995, 5)
    assert [answer.words[place] for place in answer.which] == [CALLS[number % 4].words for number in range(990, 995)]
    assert tally.recall(0, 10).codes == []
    assert tally.recall(0, 10).digest == 0
    assert tally.recall(998, 2000).digest == 0
    assert len(tally.recall(0, 1000).codes) == 256
    assert tally.recall(999, 1000).digest == digests(tally.take())[1000]


def test_a_teller_waits_between_reports(teller: Teller) -> None:
    """The first call is told at once, more of them together; anything else that is said takes them along."""
    tally = teller.open("a", 2)
    assert teller.wait_s(100.0) is None
    assert teller.take(100.0) is None
    made(1, tally)
    assert teller.wait_s(100.0) == 0
    assert teller.take(100.0) is not None
    made(5, tally)
    assert teller.wait_s(100.02) == pytest.approx(0.08)
    assert teller.take(100.02) is None
    told = teller.take(100.02, at_once=True)
    assert told is not None
    assert told.groups[0].numbers == [2, 3, 4, 5, 6]


def test_many_ranks_report_less_often() -> None:
    """However many ranks there are, the coordinator gets about as many reports."""
    teller = Teller(lambda: None, 4096)
    tally = teller.open("a", 4096)
    made(1, tally)
    teller.take(100.0)
    made(1, tally)
    assert teller.wait_s(100.0) == pytest.approx(2.048)


def test_a_name_that_comes_again_is_another_group(teller: Teller) -> None:
    """Nobody compares the calls of a destroyed group with those of the next; both can be asked about."""
    first = teller.open("a", 2)
    made(3, first)
    teller.close(first)
    second = teller.open("a", 2)
    assert first.name != second.name

    def remembered(names: list[str]) -> Iterator[int]:
        from allhands.control.messages import Recall

        for name in names:
            yield len(teller.recall(Recall(name, 0, 3)).codes)

    assert list(remembered([first.name, second.name, "c"])) == [3, 0, 0]
