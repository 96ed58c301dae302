"""Ten thousand random operations, on the C core with threads as ranks and on real processes, against numpy.

The seed is printed; SEED=… in the environment runs the same programs again.
"""

from __future__ import annotations

import os
import secrets

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from unit.core.test_program import Program
from unit.core.test_program import programs as core_programs
from unit.core.test_program import run as run_on_core

pytestmark = pytest.mark.soak

OPERATIONS = 10_000

SEED = int(os.environ.get("SEED") or secrets.randbelow(2**32))

# Programs have ten operations or so: this many are enough.
CHOSEN = settings(
    max_examples=OPERATIONS // 8,
    deadline=None,
    database=None,
    # Without shrinking: each failing program ends its ranks.
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def test_ten_thousand_operations_on_the_core() -> None:
    """With threads as ranks, so that sanitizers see them."""
    done = 0

    @seed(SEED)
    @CHOSEN
    @given(core_programs(5, 40))
    def run(program: Program) -> None:
        nonlocal done
        run_on_core(program)
        done += len(program.ops)

    print(f"\nSEED={SEED}")  # noqa: T201  # so that it can be run again
    run()
    print(f"{done} operations, no difference")  # noqa: T201
    assert done >= OPERATIONS


@pytest.mark.usefixtures("fork_server")
def test_ten_thousand_operations_on_processes() -> None:
    """Overlapping groups, several operations in flight, both libraries."""
    from ranks.program import Op
    from ranks.random_programs import ProgramRanks, programs

    print(f"\nSEED={SEED}")  # noqa: T201
    with ProgramRanks(timeout=1800) as ranks:

        @seed(SEED)
        @CHOSEN
        @given(programs(5, 40))
        def run(program: list[Op]) -> None:
            ranks.run(program)

        run()
    print(f"{ranks.operations} operations, no difference")  # noqa: T201
    assert ranks.operations >= OPERATIONS
