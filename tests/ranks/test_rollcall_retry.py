"""A group that could not form can be retried at once, by the same processes at the same address."""

from __future__ import annotations

import pytest

from ranks.harness import free_port, launch

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("where", ["local", "tcp"])
def test_a_failed_roll_call_does_not_block_the_next(where: str) -> None:
    """The coordinator of a refused attempt sends a late rank the reason and ends: the next attempt of both forms."""
    method = f"tcp://127.0.0.1:{free_port()}" if where == "tcp" else None
    results = launch(
        f"""
import allhands as dist
if rank == 0:
    say(first=attempt(dist.init_process_group, "gloo", {method!r}, 1.0, rank=0, world_size=2))
gate("again")
tries = []
while len(tries) < 3 and "" not in tries:
    found = attempt(dist.init_process_group, "gloo", {method!r}, 10.0, rank=rank, world_size=2)
    tries.append(found.get("slug", found["kind"]))
say(tries=tries)
dist.destroy_process_group()
""",
        2,
    )
    assert results[0]["first"].get("slug") == "missing-ranks", results[0]["first"]
    assert results[0]["tries"] == [""]
    # It may have connected in time to get the reason of the first failure.
    assert results[1]["tries"] in ([""], ["missing-ranks", ""])


@pytest.mark.parametrize("where", ["local", "tcp"])
def test_the_first_rank_to_end_a_group_waits_for_the_next(where: str) -> None:
    """A rank that left its group by an exception joins the next one while others are in the old one: it forms."""
    method = f"tcp://127.0.0.1:{free_port()}" if where == "tcp" else None
    results = launch(
        f"""
import time
import allhands as dist, torch
def old():
    with dist.process_group("gloo", {method!r}, 20.0, rank=rank, world_size=2):
        if rank == 1:
            raise KeyError("left the block")
        # Still here when the other rank joins the next group, which forms after this one has ended.
        gate("left", 1)
        time.sleep(1.0)
        dist.barrier()
say(old=attempt(old))
with dist.process_group("gloo", {method!r}, 20.0, rank=rank, world_size=2):
    x = torch.ones(2)
    dist.all_reduce(x)
say(x=x.tolist())
""",
        2,
    )
    assert results[0]["old"]["slug"] == "peer-failed"
    for result in results:
        assert result["x"] == [2.0, 2.0]
