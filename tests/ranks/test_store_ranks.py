"""The store of ranks in processes of their own, and what torch builds on a store."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ranks.harness import Result, launch, running

INIT = """
import time
from datetime import timedelta
import allhands as dist
import torch
from allhands.groups import session
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
store = session.current().store
"""


def fine(results: list[Result]) -> list[Result]:
    """Return ``results`` if every rank ended well; fail with their output otherwise."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"
    return results


@pytest.mark.usefixtures("fork_server")
def test_two_ranks_share_the_store() -> None:
    """One rank waits for the other's key, counts are common, and a queue gives each value to one rank."""
    results = fine(
        launch(
            INIT
            + """
if rank:
    gate("waiting")
    time.sleep(0.1)
    store.set("from 1", b"\\xff")
else:
    gate("waiting")
    say(value=store.get("from 1").hex())
total = [store.add("n", 1) for _ in range(100)]
store.barrier("counted", size)
say(total=store.add("n", 0), mine=total)
for number in range(5):
    store.queue_push("q", f"{rank}-{number}")
store.barrier("pushed", size)
say(popped=[store.queue_pop("q").decode() for _ in range(5)])
dist.destroy_process_group()
""",
            2,
        )
    )
    assert results[0]["value"] == "ff"
    assert [result["total"] for result in results] == [200, 200]
    assert sorted(results[0]["mine"] + results[1]["mine"]) == list(range(1, 201))
    popped = [result["popped"] for result in results]
    assert sorted(popped[0] + popped[1]) == [f"{rank}-{number}" for rank in range(2) for number in range(5)]
    for mine in popped:
        for rank in "01":
            ours = [value for value in mine if value.startswith(rank)]
            assert ours == sorted(ours)


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize(
    "call",
    [
        "store.get('never')",
        "store.wait(['never'], timedelta(seconds=60))",
        "store.queue_pop('never')",
        "dist.PrefixStore('x', store).multi_get(['never'])",
    ],
)
def test_waiting_for_a_key_ends_when_a_peer_is_killed(call: str) -> None:
    """Whoever waits for a key that a killed rank might have set raises PeerLost with its number, at once."""
    with running(
        INIT
        + f"""
say(ready=True)
if rank:
    time.sleep(60)
say(blocked=attempt(lambda: {call}))
""",
        2,
    ) as job:
        job.wait_for("ready")
        time.sleep(0.1)
        killed = job.signal(1, signal.SIGKILL)
        blocked = job.results()[0]["blocked"]
    assert (blocked["kind"], blocked["slug"], blocked["ranks"]) == ("PeerLost", "peer-lost", [1])
    # At once is a second, and more on a busy machine; this is a store's timeout of five minutes otherwise.
    assert blocked["over"] - killed < 1


@pytest.mark.usefixtures("fork_server")
def test_values_that_together_are_too_large_to_send() -> None:
    """A value that grew too large for a message is an error on the rank that reads it; the group still works."""
    [result] = launch(
        INIT
        + """
for name in ("a", "b"):
    store.set(name, bytes(33 * 2**20))
say(asked=attempt(store.multi_get, ["a", "b"]), one=len(store.get("a")))
dist.destroy_process_group()
""",
        1,
    )
    assert result["one"] == 33 * 2**20
    assert "AllhandsError" in result["asked"]["bases"]


@pytest.mark.usefixtures("fork_server")
def test_torch_builds_its_groups_on_it() -> None:
    """Gloo, object collectives and subgroups, made through our store, work as on torch's own."""
    results = fine(
        launch(
            INIT
            + """
x = torch.full((3,), float(rank + 1))
dist.all_reduce(x)
everyone = [None] * size
dist.all_gather_object(everyone, {"rank": rank, "deep": [1, (2,)]})
shared = [rank, "words"]
dist.broadcast_object_list(shared, src=1)
groups = [dist.new_group([0, 1]), dist.new_group([rank]), dist.new_group([1])]
y = torch.full((1,), float(rank))
dist.all_reduce(y, group=groups[0])
dist.destroy_process_group(groups[0])
again = dist.new_group(backend="gloo")
z = torch.ones(1)
dist.all_reduce(z, group=again)
say(x=x.tolist(), everyone=everyone, shared=shared, y=y.item(), z=z.item(), backend=dist.get_backend(again))
dist.destroy_process_group()
""",
            2,
        )
    )
    for result in results:
        assert result["x"] == [3.0, 3.0, 3.0]
        assert result["everyone"] == [{"rank": 0, "deep": [1, [2]]}, {"rank": 1, "deep": [1, [2]]}]
        assert result["shared"] == [1, "words"]
        assert (result["y"], result["z"], result["backend"]) == (1.0, 2.0, "gloo")


@pytest.mark.usefixtures("fork_server")
def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    """torch.distributed.checkpoint plans over object collectives on our group: what is saved is what is loaded."""
    results = fine(
        launch(
            INIT
            + """
import os
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(8.0)
saved = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "same": torch.ones(3), "step": 7}
checkpoint.save(saved, checkpoint_id=os.environ["FOLDER"])
found = {"sharded": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "same": torch.zeros(3), "step": 0}
checkpoint.load(found, checkpoint_id=os.environ["FOLDER"])
say(local=found["sharded"].to_local().tolist(), same=found["same"].tolist(), step=found["step"])
dist.destroy_process_group()
""",
            2,
            {"FOLDER": str(tmp_path / "checkpoint")},
        )
    )
    assert [result["local"] for result in results] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert all((result["same"], result["step"]) == ([1.0, 1.0, 1.0], 7) for result in results)
    assert (tmp_path / "checkpoint" / ".metadata").exists()
