"""Ranks that share a core while another has none go apart, and may run where they could before."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from threads import place, segments, together

pytest.importorskip("allhands._core", reason="the C core is built on Linux only")

F32, SUM = 12, 1
LIMIT_NS = 20 * 10**9

CORES = sorted(os.sched_getaffinity(0))

# How long the system may keep ranks apart before we see them on one core.
PATIENCE_S = 30.0

need_two = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def crowded(ranks: int, allowed: list[int], first: list[int], patience_s: float) -> tuple[list[int], list[set[int]]]:
    """Let ranks that may run on ``allowed`` begin on ``first``, again and again until one moved.

    Return how often each moved, and where each may run afterwards.
    """
    barrier = threading.Barrier(ranks, timeout=PATIENCE_S)
    masks: list[set[int]] = [set() for _ in range(ranks)]
    end = time.monotonic() + patience_s
    with segments(ranks, 1 << 20) as views:

        def work(rank: int) -> None:
            mine = np.ones(1 << 20, np.float32)
            over = False
            while not over:
                os.sched_setaffinity(0, first)
                os.sched_setaffinity(0, allowed)
                assert views[rank].all_reduce(*place(mine), F32, SUM, LIMIT_NS) == 0
                assert mine[0] == mine[-1] == ranks
                mine[:] = 1
                masks[rank] = os.sched_getaffinity(0)
                if barrier.wait() == 0:
                    verdict[0] = any(view.moved for view in views) or time.monotonic() > end
                barrier.wait()
                over = verdict[0]

        verdict = [False]
        together(ranks, work)
        return [view.moved for view in views], masks


@need_two
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_on_one_core_go_apart(ranks: int) -> None:
    """Where all begin on one core, some move, and each may still run on both."""
    two = CORES[:2]
    moved, masks = crowded(ranks, two, two[:1], PATIENCE_S)
    assert sum(moved) > 0
    assert masks == [set(two)] * ranks


def test_pinned_ranks_stay() -> None:
    """Ranks that may run on one core only are left there: whoever pinned them has a reason."""
    moved, masks = crowded(2, CORES[:1], CORES[:1], 0.5)
    assert moved == [0, 0]
    assert masks == [set(CORES[:1])] * 2


@pytest.mark.skipif(len(CORES) < 3, reason="needs three cores")
def test_where_cores_are_free_the_system_decides() -> None:
    """Fewer ranks than cores: nobody moves, because we do not know which core is free."""
    moved, _ = crowded(2, CORES[:3], CORES[:1], 0.5)
    assert moved == [0, 0]
