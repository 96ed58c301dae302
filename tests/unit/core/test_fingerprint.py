"""Calls that do not wait, in the C core: their fingerprints are read and compared later.

Ranks are views of one segment. A rank that does not wait needs no thread of its own, so most tests are one thread that
makes the calls of all ranks in an order that real ranks could have.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allhands import _core
from threads import place, places, segments, together

LIMIT_NS = 20_000_000_000
# Timeout of calls that must reach their deadline.
SHORT_NS = 50_000_000
SLOT = 64 * 1024
F4, F8, SUM = _core.DTYPES["float32"], _core.DTYPES["float64"], _core.REDUCTIONS["SUM"]
OK, TIMEOUT, MISMATCH, LEFT = (_core.OUTCOMES[name] for name in ("ok", "timeout", "mismatch", "left"))

# AH_CALL_DEPTH in csrc/shm/segment.h.
FINGERPRINTS = 32


def broadcast(view: _core.Segment, data: Any, root: int = 0, limit: int = LIMIT_NS, dtype: int = F4) -> int:
    """Broadcast an array."""
    return view.broadcast(*place(data), dtype, root, limit)


def reduce(view: _core.Segment, data: Any, root: int = 0) -> int:
    """Sum up an array."""
    return view.reduce(*place(data), F4, SUM, root, LIMIT_NS)


def scatter(view: _core.Segment, given: list[Any] | None, data: Any, root: int = 0) -> int:
    """Scatter arrays."""
    return view.scatter(None if given is None else places(given), *place(data), F4, root, LIMIT_NS)


@pytest.mark.parametrize("bytes_", [4, 72, 76, 4096])
def test_a_root_waits_only_when_all_its_fingerprints_are_unread(bytes_: int) -> None:
    """It runs ahead by FINGERPRINTS calls, times out on the rank that did not arrive, and loses nothing."""
    with segments(2, SLOT) as views:
        for value in range(FINGERPRINTS):
            assert broadcast(views[0], np.full(bytes_ // 4, value, "f4")) == OK
        last = np.full(bytes_ // 4, FINGERPRINTS, "f4")
        assert broadcast(views[0], last, limit=SHORT_NS) == TIMEOUT
        assert views[0].culprit() == 1
        got = np.empty(bytes_ // 4, "f4")
        for value in range(FINGERPRINTS):
            assert broadcast(views[1], got) == OK
            assert (got == value).all()
            # One fingerprint is free again, and no more.
            assert broadcast(views[0], np.full(bytes_ // 4, FINGERPRINTS + value, "f4")) == OK
            assert broadcast(views[0], last, limit=0) == TIMEOUT
        for value in range(FINGERPRINTS):
            assert broadcast(views[1], got) == OK
            assert (got == FINGERPRINTS + value).all()


def test_slow_readers_get_every_value() -> None:
    """Changing roots that run ahead, readers that are late: each gets the value of its call."""
    ranks, steps = 3, 400
    with segments(ranks, SLOT) as views:

        def work(rank: int) -> None:
            choose, own = random.Random(3), random.Random(rank)  # noqa: S311  # the first is the same on every rank
            for step in range(steps):
                count, root = choose.choice([1, 18, 19, 300, 1024, 1025]), choose.choice([0, 0, 0, 0, 1, 2])
                name = choose.choice(["broadcast", "broadcast", "broadcast", "reduce", "scatter"])
                data = np.full(count, step * 10 + rank, "f4")
                if name == "broadcast":
                    assert broadcast(views[rank], data, root) == OK
                    assert (data == step * 10 + root).all()
                elif name == "reduce":
                    assert reduce(views[rank], data, root) == OK
                    assert (data == (step * 30 + 3 if rank == root else step * 10 + rank)).all()
                else:
                    parts = [np.full(count, step * 100 + each, "f4") for each in range(ranks)]
                    assert scatter(views[rank], parts if rank == root else None, data, root) == OK
                    assert (data == step * 100 + rank).all()
                if own.random() < 0.05:
                    time.sleep(0.002)

        together(ranks, work)


ONE = np.ones(1, "f4")

# The call of rank 0, which does not wait, and the different call of rank 1.
DIFFERENT: dict[str, tuple[Callable[[Any], int], Callable[[Any], int]]] = {
    "count": (lambda view: broadcast(view, ONE), lambda view: broadcast(view, np.ones(2, "f4"))),
    "many": (lambda view: broadcast(view, ONE), lambda view: broadcast(view, np.ones(9000, "f4"))),
    "type": (lambda view: broadcast(view, ONE), lambda view: broadcast(view, np.ones(1), dtype=F8)),
    "root": (lambda view: broadcast(view, ONE), lambda view: broadcast(view, ONE, 1)),
    "operation": (lambda view: broadcast(view, ONE), lambda view: view.barrier(LIMIT_NS)),
    "both leave": (lambda view: broadcast(view, ONE), lambda view: reduce(view, ONE)),
    "two roots": (lambda view: broadcast(view, ONE), lambda view: scatter(view, [ONE, ONE], ONE, 1)),
    "given to a root": (lambda view: reduce(view, ONE, 1), lambda view: reduce(view, np.ones(3, "f4"), 1)),
    "part": (lambda view: scatter(view, [ONE, ONE], ONE), lambda view: scatter(view, None, np.ones(2, "f4"))),
    "part, many": (lambda view: scatter(view, [ONE, ONE], ONE), lambda view: scatter(view, None, np.ones(9000, "f4"))),
}


# Those in which rank 1 does not wait either.
NEITHER_WAITS = {"root", "both leave", "two roots"}


@pytest.mark.parametrize("next_rank", [0, 1])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_call_that_did_not_wait_is_compared_later(name: str, next_rank: int) -> None:
    """A rank that waits finds the mismatch in that call; if neither waited, the next call for all finds it.

    Both ranks end with a mismatch about the other, and exactly one of them is the one that found it.
    """
    first, second = DIFFERENT[name]
    with segments(2, SLOT) as views:
        assert first(views[0]) == OK
        assert second(views[1]) == (OK if name in NEITHER_WAITS else MISMATCH)
        finder = next_rank if name in NEITHER_WAITS else 1
        for rank in (next_rank, 1 - next_rank):
            assert views[rank].barrier(LIMIT_NS) == MISMATCH
            assert views[rank].culprit() == 1 - rank
        assert [bool(view.found_mismatch) for view in views] == [finder == 0, finder == 1]


@pytest.mark.parametrize("root", [0, 1])
def test_two_roots_are_found_before_a_call_for_all_completes(root: int) -> None:
    """Two ranks called as the root: each finds the other before it publishes a call for all."""
    with segments(3, SLOT) as views:
        data = np.ones(4, "f4")
        for rank in (0, 1):
            assert broadcast(views[rank], data, rank) == OK
        assert broadcast(views[2], data, 0) == OK
        # With the fingerprints of both, rank 2 would complete.
        assert views[root].barrier(LIMIT_NS) == MISMATCH
        assert views[2].barrier(LIMIT_NS) == MISMATCH


def test_ranks_that_never_wait_are_compared() -> None:
    """Different calls, neither of which waits, are found at the latest when all fingerprints are in use."""
    with segments(2, SLOT) as views:
        for _ in range(FINGERPRINTS):
            assert broadcast(views[0], ONE) == OK
            assert reduce(views[1], ONE) == OK
        assert broadcast(views[0], ONE) == MISMATCH
        assert views[0].culprit() == 1
        # The reported call is the one that differed, not the one that found it.
        assert views[0].call(0)[:2] == (0, 4)
        assert views[0].call(1)[:2] == (0, 3)
        assert reduce(views[1], ONE) == MISMATCH


def test_the_next_call_that_waits_names_a_missing_rank() -> None:
    """A root that did not wait does not notice missing readers; the next call that waits does."""
    with segments(3, SLOT) as views:
        assert broadcast(views[0], ONE) == OK
        assert views[0].barrier(SHORT_NS) == TIMEOUT
        assert views[0].culprit() == 1
    with segments(3, SLOT) as views:
        assert broadcast(views[1], ONE, root=2, limit=SHORT_NS) == TIMEOUT
        assert views[1].culprit() == 2


def test_data_of_a_rank_that_left_can_be_read() -> None:
    """Readers copy what a root published before it left; a further call ends with its rank."""
    with segments(2, SLOT) as views:
        assert broadcast(views[0], np.full(1, 7, "f4")) == OK
        views[0].leave()
        got = np.zeros(1, "f4")
        assert broadcast(views[1], got) == OK
        assert got[0] == 7
        assert broadcast(views[1], got) == LEFT
        assert views[1].culprit() == 0


def test_parts_of_different_sizes_go_through_the_slots() -> None:
    """One rank's parts fit into its payload, another's do not: each gets its own."""
    ranks = 3
    with segments(ranks, SLOT) as views:

        def work(rank: int) -> None:
            for large in (2, 3, 9000):
                counts = [1, 1, large]
                whole = [np.full(count, 10 + each, "f4") for each, count in enumerate(counts)]
                got = [np.zeros(count, "f4") for count in counts]
                assert views[rank].all_gather(*place(whole[rank]), places(got), F4, LIMIT_NS) == OK
                assert all((each == 10 + number).all() for number, each in enumerate(got))
                part = np.zeros(counts[rank], "f4")
                assert scatter(views[rank], whole if rank == 1 else None, part, 1) == OK
                assert (part == 10 + rank).all()
                # Ranks 0 and 1 have equal parts for all but rank 2.
                given = [np.full(large if {rank, each} == {2} else 1, rank * 10 + each, "f4") for each in range(ranks)]
                taken = [np.zeros(large if {rank, each} == {2} else 1, "f4") for each in range(ranks)]
                assert views[rank].all_to_all(places(given), places(taken), F4, LIMIT_NS) == OK
                assert all((each == number * 10 + rank).all() for number, each in enumerate(taken))
                out = places(got) if rank == 0 else None
                assert views[rank].gather(*place(whole[rank]), out, F4, 0, LIMIT_NS) == OK

        together(ranks, work)
