"""Single copy, with threads as ranks, so that it also runs under sanitizers."""

from __future__ import annotations

import os

import numpy as np
import pytest

from allhands import _core
from threads import place, places, segments, together

LIMIT_NS = 20_000_000_000
SLOT = 1024 * 1024
U1 = _core.DTYPES["uint8"]

# A size that is read by single copy, and one that is too large for it.
READ, STAGED = 256 * 1024, 17 * 1024 * 1024

NOBODY = 2**22 + 1  # above any pid


def gather(view: _core.Segment, rank: int, sizes: list[int]) -> None:
    """Gather ``sizes`` bytes from each rank, and compare each."""
    given = np.full(sizes[rank], rank + 1, np.uint8)
    got = [np.zeros(size, np.uint8) for size in sizes]
    assert view.all_gather(*place(given), places(got), U1, LIMIT_NS) == 0
    for other, part in enumerate(got):
        assert (part == other + 1).all(), f"rank {rank} has wrong bytes of rank {other}"


def test_one_rank_that_may_not_read_sends_all_through_the_slots() -> None:
    """All ranks have the right bytes, also in the call in which reading failed; no rank tries it again."""
    ranks = 3
    with segments(ranks, SLOT, victim_l3=False) as views:
        for rank, view in enumerate(views):
            view.enable_single_copy((NOBODY if rank == 1 else os.getpid(),) * ranks)

        def work(rank: int) -> None:
            for _ in range(3):
                gather(views[rank], rank, [READ] * ranks)

        together(ranks, work)
        assert [view.single_copy_calls for view in views] == [0] * ranks


@pytest.mark.parametrize(
    ("sizes", "reached"),
    [
        ([READ, READ, READ], 1),
        ([READ, 5, 0], 1),
        ([5, 0, READ], 1),
        ([READ, STAGED, 5], 0),
        ([STAGED, STAGED, STAGED], 0),
        ([5, 6, 7], 0),
    ],
)
def test_ranks_with_parts_of_any_size_choose_the_same_method(sizes: list[int], reached: int) -> None:
    """Each rank knows only its own size before the others arrive, and may have copied its part in by then."""
    with segments(3, SLOT, pids=(os.getpid(),) * 3) as views:

        def work(rank: int) -> None:
            gather(views[rank], rank, sizes)
            gather(views[rank], rank, [READ] * 3)

        together(3, work)
        assert [view.single_copy_calls for view in views] == [reached + 1] * 3


@pytest.mark.parametrize("largest", [READ, STAGED])
def test_parts_of_any_size_for_each_rank(largest: int) -> None:
    """all_to_all: rank r sends rank t a part of its own size, also none and one that is too large to be read."""
    ranks = 3
    sizes = [[0, 7, READ], [READ + 1, 3, 0], [0, largest, 11]]
    with segments(ranks, SLOT, pids=(os.getpid(),) * ranks) as views:

        def work(rank: int) -> None:
            given = [np.full(size, 10 * rank + to, np.uint8) for to, size in enumerate(sizes[rank])]
            got = [np.zeros(sizes[source][rank], np.uint8) for source in range(ranks)]
            assert views[rank].all_to_all(places(given), places(got), U1, LIMIT_NS) == 0
            assert all((part == 10 * source + rank).all() for source, part in enumerate(got))

        together(ranks, work)
        assert [view.single_copy_calls for view in views] == [int(largest == READ)] * ranks


def test_roots_read_and_are_read() -> None:
    """The root of a gather reads all parts; the other ranks of a scatter read their parts from the root."""
    ranks = 3
    with segments(ranks, SLOT, pids=(os.getpid(),) * ranks) as views:

        def work(rank: int) -> None:
            view, mine = views[rank], np.full(READ, rank + 1, np.uint8)
            got = [np.zeros(READ, np.uint8) for _ in range(ranks)]
            assert view.gather(*place(mine), places(got) if rank == 1 else None, U1, 1, LIMIT_NS) == 0
            assert rank != 1 or all((part == other + 1).all() for other, part in enumerate(got))
            assert view.scatter(places(got) if rank == 1 else None, *place(mine), U1, 1, LIMIT_NS) == 0
            assert (mine == rank + 1).all()

        together(ranks, work)
        assert [view.single_copy_calls for view in views] == [2] * ranks


@pytest.mark.parametrize(
    ("ranks", "size", "blind", "reached"),
    [
        (2, READ, False, 3),
        (2, READ, True, 0),
        (2, 8 * 1024, False, 0),
        (2, STAGED, False, 0),
        (3, READ, False, 0),
    ],
)
def test_one_reads_what_is_broadcast(ranks: int, size: int, blind: bool, reached: int) -> None:
    """Of two ranks the other one reads from the root; if it may not, the same call goes through the slots."""
    with segments(ranks, SLOT, victim_l3=False) as views:
        for rank, view in enumerate(views):
            view.enable_single_copy((NOBODY if blind and rank == 1 else os.getpid(),) * ranks)

        def work(rank: int) -> None:
            for step in range(3):
                data = np.full(size, 7 + step if rank == 0 else 0, np.uint8)
                assert views[rank].broadcast(*place(data), U1, 0, LIMIT_NS) == 0
                assert (data == 7 + step).all(), f"rank {rank} has wrong bytes"

        together(ranks, work)
        assert [view.single_copy_calls for view in views] == [reached] * ranks


def test_pids_are_set_once_and_for_each_rank() -> None:
    """They must not change during a call."""
    with segments(2, SLOT) as views:
        for wrong in ((1,), [1, 2], ("a", "b")):
            with pytest.raises((ValueError, TypeError)):
                views[0].enable_single_copy(wrong)  # type: ignore[arg-type]
        views[1].enable_single_copy((1, 2))
        with pytest.raises(ValueError, match="once"):
            views[1].enable_single_copy((1, 2))


def test_no_single_copy_with_a_victim_l3() -> None:
    """All data is copied in, whatever its size."""
    with segments(2, SLOT, pids=(os.getpid(),) * 2, victim_l3=True) as views:

        def work(rank: int) -> None:
            for size in (READ, READ + 5, STAGED):
                gather(views[rank], rank, [size, READ])
            whole = np.full(READ, rank + 1, np.uint8)
            assert views[rank].broadcast(*place(whole), U1, 1, LIMIT_NS) == 0
            assert (whole == 2).all()
            given = [np.full(READ, 10 * rank + to, np.uint8) for to in range(2)]
            got = [np.zeros(READ, np.uint8) for _ in range(2)]
            assert views[rank].all_to_all(places(given), places(got), U1, LIMIT_NS) == 0
            assert all((part == 10 * source + rank).all() for source, part in enumerate(got))

        together(2, work)
        assert [view.single_copy_calls for view in views] == [0, 0]
