"""monitored_barrier, which names missing ranks, on our backend and on Gloo."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

# A deadline, not a figure: half a second of waiting, and what a busy machine adds; far below the group's own timeout.
AT_ONCE_S = 5.0

FORM = """
from datetime import timedelta
import torch
import allhands as dist

dist.init_process_group({backend!r}, rank=rank, world_size=size, timeout=20)
dist.monitored_barrier()
dist.monitored_barrier(dist.group.WORLD, timedelta(seconds=15), wait_all_ranks=True)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's output if it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize(("late", "everyone"), [((1,), False), ((1, 3), True), ((1, 3), False)])
def test_late_ranks_are_named_on_every_rank(late: tuple[int, ...], everyone: bool) -> None:
    """Late ranks are named on all ranks within a second: all of them with wait_all_ranks, else the first.

    So is a rank told that comes when it is too late. All there: it passes.
    """
    results = harness.launch(
        FORM.format(backend="allhands")
        + f"""
if rank in {late}:
    gate("over")
say(found=attempt(dist.monitored_barrier, timeout=timedelta(seconds=0.5), wait_all_ranks={everyone}))
if rank not in {late}:
    gate("over")
""",
        4,
    )
    check(results)
    named = list(late if everyone else late[:1])
    for result in results:
        found = result["found"]
        assert found["slug"] == "collective-timeout", found
        assert found["ranks"] == named
        assert "RuntimeError" in found["bases"]
        assert "in monitored_barrier at " in found["text"]
        assert f"rank {late[0]} is at rank_namespace.py" in found["text"]
        assert found["seconds"] < AT_ONCE_S
        if len(late) > len(named):
            assert "1 more" in found["text"]


def test_it_names_the_missing_rank_behind_a_collective_that_hangs() -> None:
    """A pending operation that a rank has not called does not keep the barrier from ending in time."""
    results = harness.launch(
        FORM.format(backend="allhands")
        + """
if rank != 1:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    say(found=attempt(dist.monitored_barrier, timeout=timedelta(seconds=0.5)))
gate("over")
""",
        3,
    )
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "collective-timeout", result["found"]
        assert result["found"]["ranks"] == [1]
        assert result["found"]["seconds"] < AT_ONCE_S


def test_subgroups_outsiders_and_wrong_timeouts() -> None:
    """A subgroup's barrier concerns its members only and names global ranks; a timeout of nothing is refused."""
    results = harness.launch(
        FORM.format(backend="allhands")
        + """
import warnings
group = dist.new_group([0, 2])
if rank == 1:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        dist.monitored_barrier(group, timeout=timedelta(seconds=5))
else:
    dist.monitored_barrier(group, timeout=5.0)
say(refused=attempt(dist.monitored_barrier, timeout=timedelta(0)))
dist.monitored_barrier()
if rank == 0:
    say(found=attempt(dist.monitored_barrier, group, timeout=0.5))
gate("over")
""",
        3,
    )
    check(results)
    for result in results:
        assert result["refused"]["kind"] == "ArgumentError"
    assert results[0]["found"]["ranks"] == [2]


def test_on_gloo_it_is_torchs() -> None:
    """On a Gloo group it passes if all ranks call it, and otherwise names the late ones."""
    results = harness.launch(
        FORM.format(backend="gloo")
        + """
if rank == 0:
    say(found=attempt(dist.monitored_barrier, timeout=timedelta(seconds=0.5), wait_all_ranks=True))
gate("over")
""",
        3,
    )
    assert "RuntimeError" in results[0]["found"]["bases"]
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in results[0]["found"]["text"]
