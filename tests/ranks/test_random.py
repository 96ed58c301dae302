"""Random programs of collectives on real processes, against numpy."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ranks.program import Op
from ranks.random_programs import ProgramRanks, programs

pytestmark = pytest.mark.usefixtures("fork_server")


def test_random_programs_agree_with_numpy() -> None:
    """Any operation, dtype, shape, layout, group, root, reduction, waited for at once or later, agrees with numpy.

    Groups overlap and several operations are in flight. The soak test runs ten thousand operations.
    """
    with ProgramRanks(timeout=120) as ranks:

        @settings(
            derandomize=True,
            phases=[Phase.generate],
            max_examples=100,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(programs(1, 30))
        def run(program: list[Op]) -> None:
            ranks.run(program)

        run()
    print(f"\n{ranks.operations} operations")  # noqa: T201  # what the test measures
    assert ranks.operations > 200
