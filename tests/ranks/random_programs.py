"""Three ranks that run random programs, and the strategy that draws the programs.

Hypothesis draws a program in the test's process and passes it to long-lived ranks: forming a group for each would take
longer than the program. After a program that fails or hangs, the next one gets new ranks.
"""

from __future__ import annotations

import contextlib
import json
from types import TracebackType
from typing import Self

from hypothesis import strategies as st

from ranks import harness
from ranks.program import DTYPES, GROUPS, LAYOUTS, NAMES, REDUCTIONS, Op, supported

__all__ = ["ProgramRanks", "programs"]

WORLD = 3

# Programs take milliseconds; ranks that are late by this much hang.
PATIENCE_S = 60.0

SCRIPT = """
import json, os, time, warnings
from pathlib import Path
import torch
import torch.distributed as torch_dist
import allhands as dist
from ranks.program import GROUPS, Op, perform

warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=%r)
groups = [dist.group.WORLD, *(dist.new_group(members) for members in GROUPS[1:])]
number = 0
while True:
    order = Path(os.environ["GATES"]) / f"program.{number}"
    while not order.exists():
        time.sleep(0.001)
    program = [Op(*each) for each in json.loads(order.read_text())]
    if not program:
        break
    # The two libraries in turn.
    wrong = perform(program, dist if number %% 2 else torch_dist, groups, rank)
    say(**{f"did{number}": wrong})
    number += 1
dist.destroy_process_group()
"""

# Around the size of a slot (1 MiB), of the one-shot limit (64 KiB in all) and of a chunk (512 KiB).
COUNTS = st.one_of(
    st.integers(0, 10), st.sampled_from([1023, 5461, 8192, 16_385, 65_537, 131_073]), st.integers(0, 20_000)
)
SHAPES = st.one_of(
    st.just(()),
    COUNTS.map(lambda count: (count,)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)


def _fitting(op: Op) -> Op:
    if not supported(op.dtype, op.reduction):
        op = op._replace(reduction="SUM")
    if not supported(op.dtype, op.reduction) and "reduce" in op.name:
        op = op._replace(name="all_gather")
    # One tensor for all ranks needs a first dimension.
    return op._replace(shape=(1,)) if "tensor" in op.name and not op.shape else op


OPS = st.builds(
    Op,
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
    shape=SHAPES,
    layout=st.sampled_from(LAYOUTS),
    group=st.integers(0, len(GROUPS) - 1),
    root=st.integers(0, WORLD - 1),
    reduction=st.sampled_from(REDUCTIONS),
    later=st.booleans(),
    hold=st.integers(0, 6),
    seed=st.integers(0, 2**32 - 1),
).map(_fitting)


def programs(least: int, most: int) -> st.SearchStrategy[list[Op]]:
    """Return a strategy of programs of ``least`` to ``most`` operations."""
    return st.lists(OPS, min_size=least, max_size=most)


class ProgramRanks:
    """The ranks, as a context: `run` runs one program on them and fails if a result differs from the model."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._stack = contextlib.ExitStack()
        self._job: harness.Job | None = None
        self._number = 0
        self.operations = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        with self._stack:
            if self._job is not None and kind is None:
                self._hand([])
                for result in self._job.results():
                    assert result.returncode == 0, result.stderr

    def _hand(self, program: list[Op]) -> None:
        assert self._job is not None
        # In one step: a rank must not read half of it.
        draft = self._job.folder / "draft"
        draft.write_text(json.dumps(program))
        draft.rename(self._job.folder / "gates" / f"program.{self._number}")

    def run(self, program: list[Op]) -> None:
        """Run ``program`` on every rank."""
        if self._job is None:
            self._job = self._stack.enter_context(harness.running(SCRIPT % 20, WORLD, timeout=self._timeout))
            self._number = 0
        try:
            self._hand(program)
            found = self._job.wait_for(f"did{self._number}")
        except BaseException:
            self._job = None
            self._stack.close()
            raise
        self._number += 1
        self.operations += len(program)
        wrong = [f"rank {rank}: {words}" for rank, each in found.items() for words in each]
        assert not wrong, "\n".join(wrong)
