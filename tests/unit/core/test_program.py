"""Random programs of operations on the C core, with threads as ranks, against numpy.

Hypothesis draws a program once and every rank runs it, so that a failure shrinks to the operations that matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allhands import _core
from threads import place, places, segments, together
from unit.core.test_segment import (
    BAND,
    BOR,
    BXOR,
    DTYPES,
    LIMIT_NS,
    MAX,
    MIN,
    PRODUCT,
    SUM,
)

AVG = 2
BOOL, BF16 = _core.DTYPES["bool"], _core.DTYPES["bfloat16"]
# numpy has no bfloat16: its bits are in uint16, its values in float32.
KINDS = {**DTYPES, "?": BOOL, "bf16": BF16}
REDUCTIONS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)
NAMES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
FOLDS: dict[int, Callable[..., Any]] = {
    SUM: np.add,
    AVG: np.add,
    PRODUCT: np.multiply,
    MIN: np.minimum,
    MAX: np.maximum,
    BAND: np.bitwise_and,
    BOR: np.bitwise_or,
    BXOR: np.bitwise_xor,
}


class Op(NamedTuple):
    """One operation. ``counts`` are repeated over the ranks if these may differ; else the first one is used."""

    name: str
    kind: str
    counts: tuple[int, ...]
    root: int
    reduction: int
    seed: int


class Program(NamedTuple):
    """What all ranks do. Small slots make many chunks."""

    ranks: int
    slot: int
    ops: list[Op]


# From nothing to many chunks, around the sizes of slots and slices.
COUNTS = st.one_of(st.integers(0, 20), st.sampled_from([1023, 1024, 1025, 4096, 8191]), st.integers(0, 12_000))


def _fitting(op: Op) -> Op:
    """Return ``op`` with a reduction that its type has."""
    return op if _core.reducible(KINDS[op.kind], op.reduction) else op._replace(reduction=SUM)


OPS = st.builds(
    Op,
    name=st.sampled_from(NAMES),
    kind=st.sampled_from(sorted(KINDS)),
    counts=st.lists(COUNTS, min_size=1, max_size=5).map(tuple),
    root=st.integers(0, 4),
    reduction=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 2**32 - 1),
).map(_fitting)


def programs(least: int, most: int) -> st.SearchStrategy[Program]:
    """Return a strategy of programs of ``least`` to ``most`` operations."""
    return st.builds(
        Program,
        ranks=st.integers(1, 5),
        slot=st.sampled_from([4096, 8192, 65_536, 1 << 20]),
        ops=st.lists(OPS, min_size=least, max_size=most),
    )


def store(kind: str, wide: Any) -> Any:
    """Return numbers as the core stores them; bfloat16 is rounded to nearest, ties to even."""
    if kind != "bf16":
        return wide.astype(kind)
    bits = wide.astype("f4").view("u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")


def values(op: Op, source: int, to: int, count: int) -> Any:
    """Return the data of ``source`` for ``to``: any integers; small whole floats, whose sums are exact in any order."""
    made = np.random.default_rng((op.seed, source, to))
    if op.kind[0] in "ui":
        limits = np.iinfo(op.kind)
        return made.integers(limits.min, limits.max, count, dtype=op.kind, endpoint=True)
    numbers = made.integers(0, 2 if op.kind == "?" else 4, count)
    return numbers.astype("f4" if op.kind == "bf16" else op.kind)


def reduced(op: Op, arrays: list[Any]) -> Any:
    """Return the reduction of ``arrays``; half types are summed in float32 and rounded once."""
    wide = [each.astype("f4") if op.kind in {"f2", "bf16"} else each for each in arrays]
    fold = FOLDS[op.reduction]
    if op.kind == "?":
        fold = {SUM: np.logical_or, PRODUCT: np.logical_and}.get(op.reduction, fold)
    total = wide[0]
    for other in wide[1:]:
        total = fold(total, other)
    if op.reduction == AVG:
        total = total / total.dtype.type(len(arrays))
    return store(op.kind, total)


def perform(view: _core.Segment, op: Op, rank: int, ranks: int) -> None:
    """Do one operation as ``rank`` and compare the result with the model."""
    root, dtype = op.root % ranks, KINDS[op.kind]
    counts = [op.counts[each % len(op.counts)] for each in range(ranks)]
    same = counts[0]

    def has(source: int, to: int, count: int) -> Any:
        return store(op.kind, values(op, source, to, count))

    def empty(count: int) -> Any:
        return store(op.kind, np.ones(count, "f4"))

    def all_of(to: int) -> Any:
        return reduced(op, [values(op, each, to, same) for each in range(ranks)])

    one = has(rank, 0, same)
    got: list[Any] = [one]
    want: list[Any] = []
    match op.name:
        case "all_reduce":
            code = view.all_reduce(*place(one), dtype, op.reduction, LIMIT_NS)
            want = [all_of(0)]
        case "reduce":
            code = view.reduce(*place(one), dtype, op.reduction, root, LIMIT_NS)
            want = [all_of(0) if rank == root else has(rank, 0, same)]
        case "broadcast":
            code = view.broadcast(*place(one), dtype, root, LIMIT_NS)
            want = [has(root, 0, same)]
        case "all_gather" | "gather":
            given = has(rank, 0, counts[rank])
            wanted = op.name == "all_gather" or rank == root
            got = [empty(count) for count in counts] if wanted else []
            want = [has(each, 0, counts[each]) for each in range(ranks)] if wanted else []
            if op.name == "all_gather":
                code = view.all_gather(*place(given), places(got), dtype, LIMIT_NS)
            else:
                code = view.gather(*place(given), places(got) if wanted else None, dtype, root, LIMIT_NS)
        case "scatter":
            parts = [has(rank, to, counts[to]) for to in range(ranks)]
            got, want = [empty(counts[rank])], [has(root, rank, counts[rank])]
            code = view.scatter(places(parts) if rank == root else None, *place(got[0]), dtype, root, LIMIT_NS)
        case "reduce_scatter":
            parts = [has(rank, to, same) for to in range(ranks)]
            got, want = [empty(same)], [all_of(rank)]
            code = view.reduce_scatter(places(parts), *place(got[0]), dtype, op.reduction, LIMIT_NS)
        case "all_to_all":
            # Size of the part for another rank: the counts, rotated by the sender.
            sizes = [[op.counts[(each + to) % len(op.counts)] for to in range(ranks)] for each in range(ranks)]
            parts = [has(rank, to, sizes[rank][to]) for to in range(ranks)]
            got = [empty(sizes[each][rank]) for each in range(ranks)]
            want = [has(each, rank, sizes[each][rank]) for each in range(ranks)]
            code = view.all_to_all(places(parts), places(got), dtype, LIMIT_NS)
        case _:
            code, got = view.barrier(LIMIT_NS), []
    assert code == 0, (op, code)
    for expected, found in zip(want, got, strict=True):
        assert expected.tobytes() == found.tobytes(), op


def run(program: Program) -> None:
    """Run ``program`` with a thread for each rank."""
    with (
        segments(program.ranks, program.slot, pids=(os.getpid(),) * program.ranks) as views,
        np.errstate(over="ignore"),
    ):

        def work(rank: int) -> None:
            try:
                for op in program.ops:
                    perform(views[rank], op, rank, program.ranks)
            except BaseException:
                views[rank].end(rank)  # the others would wait for this rank until their limit
                raise

        together(program.ranks, work)


@settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs(1, 30))
def test_random_programs_agree_with_numpy(program: Program) -> None:
    """Programs of any operations, types, sizes, roots and reductions give what numpy computes from all the data."""
    run(program)
