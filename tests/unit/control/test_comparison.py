"""What the coordinator makes of the calls that ranks tell it about: every difference is found, and no other."""

from __future__ import annotations

import random

import pytest

from allhands.control.comparison import Comparison, Difference
from allhands.control.desync import Known, Tally, Teller
from allhands.control.messages import Recalled, Said, Told

USUAL = Known(3, "called all_reduce of float32 x 4 by SUM, [4], at train.py:41")
ODD = Known(5, "called broadcast of float32 x 4 with root 0, [4], at train.py:43")
OTHER = Known(7, "called barrier at train.py:50")


class Job:
    """Ranks with tallies of one group, and the coordinator's comparison, with a clock that the test moves."""

    def __init__(self, size: int) -> None:
        self.comparison = Comparison()
        self.now = 1000.0
        self.tellers = [Teller(lambda: None, size) for _ in range(size)]
        self.tallies: list[Tally] = [teller.open("0", size) for teller in self.tellers]
        self.mute: set[int] = set()
        self.asked = 0

    def call(self, *ranks: int, known: Known = USUAL, times: int = 1) -> None:
        """Let ``ranks``, or all, make a call."""
        for rank in ranks or range(len(self.tallies)):
            for _ in range(times):
                self.tallies[rank].add(known)

    def report(self, *ranks: int) -> None:
        """Let ``ranks``, or all, report what they have called."""
        for rank in ranks or range(len(self.tallies)):
            told = self.tellers[rank].take(self.now, at_once=True)
            if told is not None:
                self.comparison.hear(rank, told, self.now)

    def found(self, seconds: float = 2.0) -> Difference | None:
        """Let time pass and questions be answered; return what is found."""
        until = self.now + seconds
        while self.now < until:
            for rank, question in self.comparison.questions(self.now):
                self.asked += 1
                if rank not in self.mute:
                    self.report(rank)
                    self.comparison.hear(rank, self.tellers[rank].recall(question), self.now)
            found = self.comparison.judge(self.now)
            if found is not None:
                return found
            self.now += 0.05
        return None


def test_equal_calls_are_no_difference_and_leave_nothing() -> None:
    """Ranks that report at different times, in different portions, are never asked anything."""
    chance = random.Random(7)  # noqa: S311  # the same programs each time
    job = Job(4)
    calls = [chance.choice([USUAL, ODD, OTHER]) for _ in range(20_000)]
    made = [0] * 4
    while min(made) < len(calls):
        rank = chance.randrange(4)
        for known in calls[made[rank] : made[rank] + chance.choice([1, 3, 200, 5000])]:
            job.tallies[rank].add(known)
            made[rank] += 1
        job.report(rank)
        assert job.found(0.1) is None
    job.report()
    assert job.found() is None
    assert not job.comparison.doubtful
    assert len(vars(job.comparison)["_groups"]["0"].marks) <= 1024


def test_the_odd_rank_is_named_with_what_each_called() -> None:
    """The rank that differs from most, in the very call."""
    job = Job(4)
    job.call(times=10)
    job.call(0, 1, 3)
    job.call(2, known=ODD)
    job.report()
    found = job.found()
    assert found is not None
    assert (found.odd, found.number) == ((2,), 11)
    assert found.lines == (f"ranks 0, 1 and 3 {USUAL.words}", f"rank 2 {ODD.words}")


def test_more_ranks_are_heard_before_one_is_blamed() -> None:
    """Of two that differ nobody knows which is odd: a third that comes a moment later says so."""
    job = Job(3)
    job.call(0, known=ODD)
    job.call(1)
    job.report(0, 1)
    assert job.found(0.2) is None
    job.call(2)
    job.report(2)
    found = job.found()
    assert found is not None
    assert found.odd == (0,)


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    """The difference between those who have come is told."""
    job = Job(3)
    job.call(0, known=ODD)
    job.call(1)
    job.report()
    found = job.found()
    assert found is not None
    assert (found.odd, job.asked) == ((1,), 2)


@pytest.mark.parametrize("behind", [1, 40, 200])
def test_a_skipped_call_is_found_where_the_next_one_differs(behind: int) -> None:
    """The first call that is not the same, wherever the report ends."""
    job = Job(2)
    job.call(times=100)
    job.call(0, known=ODD)
    job.call(times=behind)
    job.call(known=OTHER)
    job.report()
    found = job.found()
    assert found is not None
    assert found.number == 101
    assert found.odd == (1,)


def test_a_rank_that_stands_behind_in_another_call_is_found() -> None:
    """One rank is a thousand calls ahead, and reported none of those near the one in which the other stands."""
    job = Job(2)
    job.call(0, times=1000)
    job.report(0)
    job.call(1, times=899)
    job.call(1, known=ODD)
    job.report(1)
    found = job.found(5.0)
    assert found is not None
    assert (found.number, found.odd) == (900, (1,))


def test_a_difference_that_nobody_remembers_is_still_told() -> None:
    """The calls are too long ago to be told word by word."""
    job = Job(2)
    job.call(0, known=ODD)
    job.call(1)
    job.call(times=5000)
    job.report()
    found = job.found()
    assert found is not None
    assert found.odd == (1,)
    assert "something else before" in found.lines[0]


def test_a_silent_rank_and_one_that_is_gone_do_not_hold_it_up() -> None:
    """What the others know of them is told."""
    job = Job(4)
    job.call(0, 1)
    job.call(2, 3, known=ODD)
    job.report()
    job.comparison.gone(3)
    job.mute = {1, 3}
    found = job.found()
    assert found is not None
    assert found.odd == (2, 3)
    assert found.lines == (f"ranks 0 and 1 {USUAL.words}", f"ranks 2 and 3 {ODD.words}")


def test_a_call_that_was_not_made_is_no_difference() -> None:
    """A rank whose call was refused before it began says so, whenever; nothing is compared in that group any more."""
    for before in (True, False):
        job = Job(2)
        job.call(0, known=ODD)
        if before:
            job.tallies[0].give_up()
        job.call(1)
        job.report()
        if not before:
            job.tallies[0].give_up()
        assert job.found() is None
        job.call(0)
        job.call(1, known=ODD)
        job.report()
        assert job.found() is None


def test_groups_are_bounded() -> None:
    """Groups that were not heard of for longest are forgotten first."""
    comparison = Comparison()
    for number in range(10_000):
        comparison.hear(0, Told([Said(str(number), 2, 1, [1], [7])]), 0.0)
    groups = vars(comparison)["_groups"]
    assert len(groups) == 4096
    assert "9999" in groups


def test_a_rank_that_reports_alone_takes_no_memory() -> None:
    """The others call past allhands, so nothing is ever agreed about."""
    job = Job(2)
    for _ in range(3000):
        job.call(0)
        job.report(0)
    assert len(vars(job.comparison)["_groups"]["0"].marks) <= 1024


def test_nonsense_is_no_reason_to_fail() -> None:
    """What a proven member may say, however odd."""
    comparison = Comparison()
    comparison.hear(0, Told([Said("0", 0, 1, [1], [7]), Said("0", 2, -1, [1, 2], [7]), Said("0", -1, 0, [], [])]), 0.0)
    comparison.hear(1, Told([Said("0", 2, 1, [1], [8])]), 0.0)
    comparison.questions(1.0)
    comparison.hear(0, Recalled("0", 1, 1, [1, 2], [0, 9], ["a"], 5), 1.0)
    comparison.hear(1, Recalled("nobody's", 1, 1, [], [], []), 1.0)
    comparison.questions(9.0)
    comparison.judge(9.0)


def test_four_thousand_ranks() -> None:
    """One of them is odd, and everyone is asked once."""
    job = Job(4096)
    job.call(times=3)
    job.call(*(rank for rank in range(4096) if rank != 1234))
    job.call(1234, known=ODD)
    job.report()
    found = job.found()
    assert found is not None
    assert (found.odd, found.number, job.asked) == ((1234,), 4, 4096)
    assert len(found.lines) == 2
