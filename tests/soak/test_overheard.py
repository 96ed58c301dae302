"""torch's own groups across hosts: every kind of difference, and long programs without one."""

from __future__ import annotations

import pytest

from hosts.conftest import Making
from hosts.test_overheard import TOO_LARGE, check_matching, check_mismatch, check_skipped, check_too_large
from hosts.test_wide import MISMATCHES

pytestmark = [pytest.mark.soak, pytest.mark.hosts]

MORE = {
    "gather": (
        "dist.all_gather([torch.ones(4) for _ in range(size)], torch.ones(4))",
        "dist.all_reduce(torch.ones(4))",
    ),
    "size": ("dist.all_reduce(torch.ones(50_000))", "dist.all_reduce(torch.ones(70_000))"),
    "barrier": ("dist.barrier()", "dist.all_reduce(torch.ones(4))"),
    "reduce": ("dist.reduce(torch.ones(4), 0)", "dist.reduce(torch.ones(4), 1)"),
}


@pytest.mark.parametrize("kind", [*MISMATCHES, *MORE])
def test_every_mismatch(network: Making, kind: str) -> None:
    """Operation, type, count, root, reduction: all ranks are told who called what."""
    check_mismatch(network(), *{**MISMATCHES, **MORE}[kind])


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_gloo_that_gives_up(network: Making, kind: str) -> None:
    """Waited for at once, later, and by the root's readers."""
    check_too_large(network(), TOO_LARGE[kind])


def test_a_rank_that_makes_no_call(network: Making) -> None:
    """It is named at the deadline, with the line that it is at."""
    check_skipped(network(), "time.sleep(15)", "collective-timeout", "rank 2 is at script.py:")


def test_long_matching_programs(network: Making) -> None:
    """No false alarm in thousands of calls."""
    check_matching(network(), 3000)
