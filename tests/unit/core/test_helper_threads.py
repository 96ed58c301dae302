"""Helper threads for large tensors, with threads as ranks, so that they also run under sanitizers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from allhands import _core
from threads import place, segments, together

F32, F64, I64 = (_core.DTYPES[name] for name in ("float32", "float64", "int64"))
SUM, AVG, MAX = (_core.REDUCTIONS[name] for name in ("SUM", "AVG", "MAX"))
LIMIT_NS = 20_000_000_000

# Bytes of a helper thread's slot: parts begin at multiples of it.
UNIT = 64 << 10


def helper_threads_of_all() -> int:
    """Return how many helper threads this process has."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            names.append(path.read_text())
    return names.count("allhands-helper\n")


def sizes() -> list[int]:
    """Return numbers of float32 around every place where parts, chunks and slices end."""
    return sorted({4 * UNIT * parts // 4 + more for parts in (1, 2, 3, 4) for more in (0, 1)} | {9 * UNIT + 17})


@pytest.mark.parametrize("helper_threads", range(1, _core.MAX_HELPER_THREADS + 1))
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_element_is_reduced_once(ranks: int, helper_threads: int) -> None:
    """Wherever parts, chunks and slices end, with any number of helper threads; other tensors are not changed."""
    with segments(ranks, 1 << 20, helper_threads=helper_threads) as views:

        def work(rank: int) -> None:
            for count in sizes():
                everyone = [(np.arange(count) * 7 + each) % 11 for each in range(ranks)]
                for kind, code, reduction in (("f4", F32, SUM), ("i8", I64, MAX), ("f8", F64, AVG)):
                    total = np.max(everyone, axis=0) if reduction == MAX else np.sum(everyone, axis=0)
                    want = (total / ranks if reduction == AVG else total).astype(kind)
                    mine = everyone[rank].astype(kind)
                    assert views[rank].all_reduce(*place(mine), code, reduction, LIMIT_NS) == 0
                    assert np.allclose(mine, want, rtol=1e-15, atol=0), (count, kind)
                    mine = everyone[rank].astype(kind)
                    assert views[rank].reduce(*place(mine), code, reduction, 1, LIMIT_NS) == 0
                    assert np.allclose(mine, want if rank == 1 else everyone[rank], rtol=1e-15, atol=0), (count, kind)

        together(ranks, work)


@pytest.mark.parametrize("helper_threads", [1, 3])
def test_a_window_is_split_between_helper_threads(helper_threads: int) -> None:
    """Each helper thread reduces part of its rank's slice, in the memory of all ranks."""
    stride, ranks = 4 << 20, 3
    with segments(ranks, 1 << 20, helper_threads=helper_threads) as views:
        descriptor = os.memfd_create("window")
        os.ftruncate(descriptor, ranks * stride)
        windows = [_core.Window(view, descriptor, stride) for view in views]
        os.close(descriptor)

        def work(rank: int) -> None:
            for count in (3 * UNIT, 1_000_000, 1_048_576, 786_433):
                mine = np.frombuffer(windows[rank], dtype="f4")[:count]  # type: ignore[call-overload]  # it has a buffer
                mine[:] = np.arange(count) % 5 + rank
                assert views[rank].all_reduce(*place(mine), F32, SUM, LIMIT_NS) == 0
                assert np.array_equal(mine, 3 * (np.arange(count) % 5) + 3)
            assert views[rank].window_calls == 4

        # The core finds a window by its address; here all ranks are one process, and each finds its own.
        together(ranks, work)


def test_the_order_of_additions_does_not_depend_on_hands() -> None:
    """The bits are the same with no helper thread and with three."""
    results = []
    given = [np.random.default_rng(rank).standard_normal(1_300_003).astype("f4") for rank in range(3)]
    for helper_threads in (0, 3):
        with segments(3, 1 << 20, helper_threads=helper_threads) as views:
            mine = [each.copy() for each in given]

            def work(rank: int, views: list[_core.Segment] = views, mine: list[np.ndarray] = mine) -> None:
                assert views[rank].all_reduce(*place(mine[rank]), F32, SUM, LIMIT_NS) == 0

            together(3, work)
            results += mine
    assert all(each.tobytes() == results[0].tobytes() for each in results)


def test_threads_come_with_the_first_large_call_and_go_with_the_group() -> None:
    """A small call starts no helper thread."""
    gc.collect()
    before = helper_threads_of_all()
    with segments(2, 1 << 20, helper_threads=3) as views:

        def work(rank: int, count: int) -> None:
            mine = np.ones(count, dtype="f4")
            assert views[rank].all_reduce(*place(mine), F32, SUM, LIMIT_NS) == 0

        together(2, lambda rank: work(rank, 1000))
        assert helper_threads_of_all() == before
        together(2, lambda rank: work(rank, 1 << 20))
        assert helper_threads_of_all() == before + 6
        views.clear()
    assert helper_threads_of_all() == before


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    """Helper threads that wait in the middle of a call end with it."""
    with segments(2, 1 << 20, helper_threads=3) as views:
        mine = [np.ones(1 << 20, dtype="f4") for _ in range(2)]
        together(2, lambda rank: views[rank].all_reduce(*place(mine[rank]), F32, SUM, LIMIT_NS))
        began = time.monotonic()
        assert views[0].all_reduce(*place(mine[0]), F32, SUM, 300_000_000) == 1
        assert (views[0].culprit(), time.monotonic() - began < 5) == (1, True)


def test_an_end_in_the_middle_of_a_call() -> None:
    """Ending the group while helper threads work ends the call of all ranks, with the same outcome."""
    codes: list[int] = []
    with segments(2, 1 << 20, helper_threads=3) as views:

        def work(rank: int) -> None:
            mine = np.ones(8 << 20, dtype="f4")
            while not (code := views[rank].all_reduce(*place(mine), F32, SUM, LIMIT_NS)):
                pass
            codes.append(code)

        timer = threading.Timer(0.3, views[0].end, (1,))
        timer.start()
        together(2, work)
        timer.join()
        assert codes == [3, 3]
        assert [view.culprit() for view in views] == [1, 1]


def test_a_signal_is_handled_while_helpers_work() -> None:
    """Signal handlers run in the calling thread, and one that raises ends the call."""

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    with segments(2, 1 << 20, helper_threads=3) as views:

        def other() -> None:
            mine = np.ones(8 << 20, dtype="f4")
            while not views[1].all_reduce(*place(mine), F32, SUM, LIMIT_NS):
                pass

        peer = threading.Thread(target=other)
        peer.start()
        mine = np.ones(8 << 20, dtype="f4")
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                all(views[0].all_reduce(*place(mine), F32, SUM, LIMIT_NS) == 0 for _ in range(100_000))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            views[0].end(0)
            peer.join()


def test_more_helper_threads_than_allowed() -> None:
    """They are refused where the segment is made."""
    descriptor = os.memfd_create("test")
    with pytest.raises(ValueError, match="MAX_HELPER_THREADS"):
        _core.segment_format(descriptor, 2, 4096, os.urandom(16), _core.MAX_HELPER_THREADS + 1)
    os.close(descriptor)
