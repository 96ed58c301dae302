"""Tensor lists in the C core, with threads as ranks, so that they also run under sanitizers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from allhands import _core
from threads import place, places, segments, together

LIMIT_NS = 20_000_000_000
SLOT = 64 * 1024
DTYPES = {"u1": 1, "i8": 8, "f2": 10, "f4": 12, "f8": 13}
SUM, MISMATCH = _core.REDUCTIONS["SUM"], _core.OUTCOMES["mismatch"]


@pytest.mark.parametrize(("ranks", "helper_threads"), [(1, 0), (2, 0), (5, 0), (2, 3)])
def test_any_sizes_of_any_type(ranks: int, helper_threads: int) -> None:
    """From nothing to many chunks, from one tensor to many; each in its own memory, with a guard behind it."""
    with segments(ranks, SLOT, helper_threads=helper_threads) as views:

        def work(rank: int) -> None:
            choose = random.Random(11)  # noqa: S311  # the same choices on every rank
            for step in range(60):
                kind = choose.choice([*DTYPES])
                sizes = [choose.choice([0, 1, 7, 300, 9001, 200_000]) for _ in range(choose.randint(1, 12))]
                made = np.random.default_rng(step)
                everyone = [[made.integers(0, 4, size + 1).astype(kind) for size in sizes] for _ in range(ranks)]
                mine = [each.copy() for each in everyone[rank]]
                told = views[rank].all_reduce_list(places([each[:-1] for each in mine]), DTYPES[kind], SUM, LIMIT_NS)
                assert told == 0, (step, kind, sizes)
                for index, each in enumerate(mine):
                    assert np.array_equal(each[:-1], sum(given[index][:-1] for given in everyone)), (step, index)
                    assert each[-1] == everyone[rank][index][-1], (step, index)

        together(ranks, work)


@pytest.mark.parametrize("kind", ["f4", "i8"])
def test_what_no_cache_holds(kind: str) -> None:
    """Results of large tensors bypass the caches: none is lost or misplaced, whatever the alignment of its ends."""
    ranks, sizes = 3, [1_000_003, 5, 700_001, 64, 1100, 1_300_021]
    made = np.random.default_rng(5)
    everyone = [[made.integers(0, 99, size + 1).astype(kind) for size in sizes] for _ in range(ranks)]
    with segments(ranks, SLOT) as views:

        def work(rank: int) -> None:
            mine = [each.copy() for each in everyone[rank]]
            given = places([each[:-1] for each in mine])
            assert views[rank].all_reduce_list(given, DTYPES[kind], SUM, LIMIT_NS) == 0
            for index, each in enumerate(mine):
                assert np.array_equal(each[:-1], sum(other[index][:-1] for other in everyone)), index
                assert each[-1] == everyone[rank][index][-1], index

        together(ranks, work)


def test_one_tensor_is_the_same_call_as_alone() -> None:
    """A rank may pass either of them."""
    data = [np.ones(5000, "f4") for _ in range(2)]
    with segments(2, SLOT) as views:

        def work(rank: int) -> None:
            if rank:
                assert views[1].all_reduce(*place(data[1]), DTYPES["f4"], SUM, LIMIT_NS) == 0
            else:
                assert views[0].all_reduce_list(place(data[0]), DTYPES["f4"], SUM, LIMIT_NS) == 0

        together(2, work)
    assert all((each == 2).all() for each in data)


@pytest.mark.parametrize("sizes", [(20, 10), (10, 10, 10), (30,), (10, 20, 0), (31, 10)])
def test_other_sizes_are_a_mismatch(sizes: tuple[int, ...]) -> None:
    """Also with equal totals: values would be added to those of other tensors."""
    codes = [0, 0]
    with segments(2, SLOT) as views:

        def work(rank: int) -> None:
            data = [np.ones(size, "f4") for size in (sizes if rank else (10, 20))]
            codes[rank] = views[rank].all_reduce_list(places(data), DTYPES["f4"], SUM, LIMIT_NS)

        together(2, work)
        assert codes == [MISMATCH] * 2
        *_, root, digest = views[0].call(0)
        assert root == -1
        assert digest != 0


def test_overlapping_tensors_are_found() -> None:
    """In any order; adjacent tensors, and those without bytes, share none."""
    data = np.zeros(100, "u1")
    assert _core.disjoint(places([data[50:], data[:50], data[20:20]]))
    assert not _core.disjoint(places([data[50:], data[:10], data[49:50], data[40:60]]))
    assert not _core.disjoint(places([data, data]))
    assert not _core.disjoint(places([data, data[20:20], data[99:]]))


@pytest.mark.parametrize("bad", [(), (1,), (0, 0, 0), ("x", 0), (0, "x"), (0, 0, 0, "x"), [0, 0]])
def test_what_is_no_list_of_tensors_is_refused(bad: Any) -> None:
    """An empty list, half a pair, and objects that are no numbers; parts that were parsed before are freed once."""
    with segments(1, SLOT) as views, pytest.raises((TypeError, ValueError)):
        views[0].all_reduce_list(bad, DTYPES["f4"], SUM, LIMIT_NS)
    with pytest.raises((TypeError, ValueError)):
        _core.disjoint(bad)
