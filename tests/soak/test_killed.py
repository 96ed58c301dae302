"""Every end of a rank, in every operation, in its middle and before it."""

from __future__ import annotations

import pytest

from faults.test_killed import OPERATIONS, fall

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]

# The time is drawn anew each time, because an operation has many states.
ROUNDS = 3


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_every_way_to_end_a_rank(name: str, how: str) -> None:
    """Survivors of a rank that is killed, exits or raises get an error with its rank within a second or so."""
    slowest = max([fall(name, how, early=True), *(fall(name, how) for _ in range(ROUNDS))])
    print(f"\n{name}, {how}: {slowest:.3f} s at most")  # noqa: T201  # what the test measures


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("early", [True, False])
def test_every_operation_names_the_ended_rank(name: str, early: bool) -> None:
    """A stopped rank is named when the timeout has passed."""
    fall(name, "stop", early=early)
