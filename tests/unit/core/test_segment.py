"""The collectives of the C core, with threads as ranks, so that they also run under sanitizers."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from allhands import _core
from threads import place, places, segments, together

LIMIT_NS = 20_000_000_000
SLOT = 64 * 1024

# The core's numbers.
DTYPES = {"u1": 1, "i1": 2, "u2": 3, "i2": 4, "u4": 5, "i4": 6, "u8": 7, "i8": 8, "f2": 10, "f4": 12, "f8": 13}
SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR = (
    _core.REDUCTIONS[name] for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
)
TIMEOUT, ABORTED, MISMATCH, INVALID, LEFT = (
    _core.OUTCOMES[name] for name in ("timeout", "aborted", "mismatch", "invalid", "left")
)
MODELS: dict[int, Callable[..., Any]] = {
    SUM: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
    BAND: np.bitwise_and,
    BOR: np.bitwise_or,
    BXOR: np.bitwise_xor,
}


# Without single copy, with chunks at the head of their slots or rotating in them; with single copy; with one that
# the kernel refuses (there is no such process).
WHERE = {"slots": 0, "victim_l3": 0, "reading": os.getpid(), "refused": 2**22 + 1}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_random_operations_agree_with_numpy(ranks: int, where: str) -> None:
    """Random operations, types and sizes, from nothing to many chunks, give what numpy computes from all the data."""
    pids = (WHERE[where],) * ranks if WHERE[where] else None
    with segments(ranks, SLOT, pids=pids, victim_l3=where == "victim_l3") as views:

        def work(rank: int) -> None:
            choose, view = random.Random(7), views[rank]  # noqa: S311  # the same choices on every rank
            for step in range(120):
                kind = choose.choice([*DTYPES])
                count = choose.choice([0, 1, 5, 1000, 9000, 40_001])
                root, name = choose.randrange(ranks), choose.choice(OPERATIONS)
                sizes = [[choose.randrange(count + 1) for _ in range(ranks)] for _ in range(ranks)]
                made = np.random.default_rng(step)
                everyone = [made.integers(0, 4, count).astype(kind) for _ in range(ranks)]
                code = run_one(view, name, rank, root, DTYPES[kind], everyone, sizes)
                assert code == 0, (step, name, kind, count, code)

        together(ranks, work)
        assert all((view.single_copy_calls > 0) == (where == "reading" and ranks > 1) for view in views)


OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")


def run_one(  # noqa: PLR0917  # one call, taken apart
    view: _core.Segment, name: str, rank: int, root: int, dtype: int, everyone: list[Any], sizes: list[list[int]]
) -> int:
    """Do one operation as ``rank``, compare its result with the model, return its code."""
    mine, ranks = everyone[rank].copy(), len(everyone)
    own = [sizes[each][0] for each in range(ranks)]
    got: list[Any] = [mine]
    total = everyone[0].copy()
    for other in everyone[1:]:
        total = (total + other).astype(total.dtype)
    match name:
        case "all_reduce":
            code, want = view.all_reduce(*place(mine), dtype, SUM, LIMIT_NS), [total]
        case "reduce":
            code = view.reduce(*place(mine), dtype, SUM, root, LIMIT_NS)
            want = [total if rank == root else everyone[rank]]
        case "broadcast":
            code, want = view.broadcast(*place(mine), dtype, root, LIMIT_NS), [everyone[root]]
        case "all_gather" | "gather":
            given = mine[: own[rank]].copy()
            want = [each[:size] for each, size in zip(everyone, own, strict=True)]
            got = [np.zeros(size, mine.dtype) for size in own]
            if name == "all_gather":
                code = view.all_gather(*place(given), places(got), dtype, LIMIT_NS)
            else:
                code = view.gather(*place(given), places(got) if rank == root else None, dtype, root, LIMIT_NS)
                want = want if rank == root else got
        case "scatter":
            parts = [everyone[root][:size].copy() for size in own]
            got, want = [np.zeros(own[rank], mine.dtype)], [parts[rank]]
            given_parts = places(parts) if rank == root else None
            code = view.scatter(given_parts, *place(got[0]), dtype, root, LIMIT_NS)
        case "reduce_scatter":
            got, want = [np.zeros_like(mine)], [np.zeros_like(mine)]
            for _ in range(ranks):
                want = [(want[0] + everyone[rank]).astype(mine.dtype)]
            parts = [each.copy() for each in everyone]
            code = view.reduce_scatter(places(parts), *place(got[0]), dtype, SUM, LIMIT_NS)
        case _:
            parts = [mine[: sizes[rank][each]].copy() for each in range(ranks)]
            got = [np.zeros(sizes[each][rank], mine.dtype) for each in range(ranks)]
            want = [everyone[each][: sizes[each][rank]] for each in range(ranks)]
            code = view.all_to_all(places(parts), places(got), dtype, LIMIT_NS)
    for expected, found in zip(want, got, strict=True):
        assert np.array_equal(expected, found), name
    return code


@pytest.mark.parametrize("kind", DTYPES)
def test_every_reduction(kind: str) -> None:
    """Each reduction that a type has agrees with numpy; integers wrap; those that it has not are refused."""
    made = np.random.default_rng(3)
    integer = kind[0] in "ui"
    largest = np.iinfo(kind).max if integer else 100
    everyone = [made.integers(0, largest, 5000, dtype="u8" if kind == "u8" else "i8").astype(kind) for _ in range(3)]
    with segments(3, SLOT) as views:
        for reduction, model in MODELS.items():
            if reduction in {BAND, BOR, BXOR} and not integer:
                assert not _core.reducible(DTYPES[kind], reduction)
                assert views[0].all_reduce(*place(everyone[0].copy()), DTYPES[kind], reduction, LIMIT_NS) == INVALID
                continue
            if kind == "f2" and reduction == PRODUCT:
                continue  # numpy rounds after each product, the core once
            with np.errstate(over="ignore"):
                wide = [each.astype("f4") if kind == "f2" else each for each in everyone]
                want = model(model(wide[0], wide[1]), wide[2]).astype(kind)
            results = [each.copy() for each in everyone]

            def work(rank: int, results: list[Any] = results, reduction: int = reduction) -> None:
                assert views[rank].all_reduce(*place(results[rank]), DTYPES[kind], reduction, LIMIT_NS) == 0

            together(3, work)
            for result in results:
                assert np.array_equal(result, want), reduction


def test_a_mismatch_ends_the_group_for_all() -> None:
    """Ranks whose calls differ get the mismatch code, also in every later call."""
    codes = [0, 0, 0]
    with segments(3, SLOT) as views:

        def work(rank: int) -> None:
            data = np.ones(10 + (rank == 1), "f4")
            codes[rank] = views[rank].all_reduce(*place(data), DTYPES["f4"], SUM, LIMIT_NS)

        together(3, work)
        assert codes == [MISMATCH] * 3
        assert views[0].barrier(LIMIT_NS) == MISMATCH
        assert views[1].call(1)[4] == 44


@pytest.mark.parametrize("name", ["all_gather", "gather", "all_to_all", "scatter"])
@pytest.mark.parametrize("size", [12, 300_000])
def test_a_call_in_an_ended_group_publishes_its_size(name: str, size: int) -> None:
    """Sizes may differ between ranks, so they identify the odd call, also on a rank that found the end at once."""
    with segments(3, SLOT) as views:
        together(2, lambda rank: views[rank].compare_only(65 + rank, 1, 12, 40, -1, LIMIT_NS))
        parts = [np.ones(size, "u1") for _ in views]
        mine, all_, end = place(parts[0]), places(parts), (1, LIMIT_NS)
        calls: dict[str, Callable[[], int]] = {
            "all_gather": lambda: views[2].all_gather(*mine, all_, *end),
            "gather": lambda: views[2].gather(*mine, None, 1, 0, LIMIT_NS),
            "all_to_all": lambda: views[2].all_to_all(all_, all_, *end),
            "scatter": lambda: views[2].scatter(None, *mine, 1, 0, LIMIT_NS),
        }
        assert calls[name]() == MISMATCH
        assert views[0].call(2)[4] == size


@pytest.mark.parametrize("odd", [(65, 1, 12, 40, -1), (66, 2, 12, 40, -1), (66, 1, 13, 40, -1), (66, 1, 12, 44, -1)])
def test_a_call_that_is_done_elsewhere_is_compared(odd: tuple[int, ...]) -> None:
    """`compare_only` is a barrier if all calls are equal, and a mismatch on all ranks if one differs."""
    with segments(3, SLOT) as views:
        codes = [[-1, -1] for _ in views]

        def work(rank: int) -> None:
            codes[rank][0] = views[rank].compare_only(66, 1, 12, 40, -1, LIMIT_NS)
            codes[rank][1] = views[rank].compare_only(*(odd if rank == 1 else (66, 1, 12, 40, -1)), LIMIT_NS)

        together(3, work)
        assert codes == [[0, MISMATCH]] * 3


def test_agree_is_no_operation_of_the_core() -> None:
    """`compare_only` never matches an operation of the core, whatever call it compares."""
    with segments(2, SLOT) as views:
        codes = [0, 0]

        def work(rank: int) -> None:
            codes[rank] = views[rank].barrier(LIMIT_NS) if rank else views[rank].compare_only(65, 0, 0, 0, -1, LIMIT_NS)

        together(2, work)
        assert codes == [MISMATCH] * 2


def test_a_missing_rank_is_named_at_the_deadline() -> None:
    """A rank that waits in vain gets the timeout code, with the missing rank as culprit."""
    with segments(3, SLOT) as views:
        codes = [0, 0]

        def work(rank: int) -> None:
            codes[rank] = views[rank].barrier(300_000_000)

        together(2, work)
        assert codes == [TIMEOUT, TIMEOUT]
        assert views[0].culprit() == views[1].culprit() == 2


def test_an_end_wakes_waiting_ranks() -> None:
    """`end` reaches a rank that sleeps in a call at once."""
    with segments(2, SLOT) as views:
        timer = threading.Timer(0.1, views[1].end, (1,))
        timer.start()
        assert views[0].barrier(LIMIT_NS) == ABORTED
        assert views[0].culprit() == 1
        timer.join()


def test_the_first_end_is_kept() -> None:
    """A second `end` changes neither the outcome of the group nor its culprit."""
    with segments(3, SLOT) as views:
        views[1].end(1)
        views[0].end(0)
        assert views[2].barrier(LIMIT_NS) == ABORTED
        assert views[2].culprit() == 1


def test_a_rank_that_leaves_keeps_no_rank_waiting() -> None:
    """Calls of a rank before it left are complete; a rank that waits for a further one gets AH_LEFT at once."""
    with segments(2, SLOT) as views:
        together(2, lambda rank: bool(views[rank].barrier(LIMIT_NS)))
        views[1].leave()
        assert views[0].barrier(LIMIT_NS) == LEFT
        assert views[0].culprit() == 1
    with segments(2, SLOT) as views:
        data = [np.full(20_000, rank, "f4") for rank in range(2)]

        def work(rank: int) -> None:
            assert views[rank].broadcast(*place(data[rank]), DTYPES["f4"], 1, LIMIT_NS) == 0
            views[rank].leave()

        together(2, work)
        assert data[0][-1] == 1


def test_arguments_that_are_no_numbers_are_refused() -> None:
    """At any position in a list; parts that were parsed before are freed once."""
    with segments(2, SLOT) as views:
        good: tuple[Any, ...] = (0, 0) * 2
        for bad in (("x", 0, 0, 0), (0, 0, 0, "x")):
            for arguments in ((bad, good), (good, bad)):
                with pytest.raises(TypeError):
                    views[0].all_to_all(*arguments, 1, LIMIT_NS)


def test_a_dead_process_is_noticed() -> None:
    """The end of a rank's process is noticed through its pidfd, without a message from another rank."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    size, nonce = _core.segment_bytes(2, SLOT), os.urandom(16)
    descriptor, pidfd = os.memfd_create("test"), os.pidfd_open(child)
    os.ftruncate(descriptor, size)
    _core.segment_format(descriptor, 2, SLOT, nonce)
    view = _core.Segment(descriptor, size, 0, nonce, (-1, pidfd))
    assert view.barrier(LIMIT_NS) == 2
    assert view.culprit() == 1
    os.waitpid(child, 0)
    os.close(descriptor)
    os.close(pidfd)


def test_a_foreign_segment_is_refused() -> None:
    """Memory with another nonce or size, or without a header, is refused."""
    size, nonce = _core.segment_bytes(2, SLOT), os.urandom(16)
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size)
    with pytest.raises(ValueError, match="not the segment"):
        _core.Segment(descriptor, size, 0, nonce, (-1, -1))
    _core.segment_format(descriptor, 2, SLOT, nonce)
    for arguments in (
        (descriptor, size, 0, bytes(16), (-1, -1)),
        (descriptor, size - 4096, 0, nonce, (-1, -1)),
        (descriptor, size, 2, nonce, (-1, -1)),
        (descriptor, size, 0, nonce, (-1,)),
    ):
        with pytest.raises(ValueError, match="not the segment"):
            _core.Segment(*arguments)
    os.close(descriptor)
