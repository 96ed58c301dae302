"""Collectives through shared memory, with real processes: right, the same on every rank, and never a hang."""

from __future__ import annotations

import pytest

from conformance.engines import FORM, check
from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
@pytest.mark.parametrize(
    "call", ["all_reduce(x)", "broadcast(x, 1)", "barrier()", "all_gather([x.clone() for _ in range(size)], x)"]
)
def test_a_rank_that_falls_in_a_collective_ends_it_for_the_others(how: str, call: str) -> None:
    """Survivors that wait in shared memory for a rank that dies or raises get the error within a second."""
    end = {"kill": "os.kill(os.getpid(), 9)", "exit": "os._exit(3)", "raise": "raise ValueError('bad batch')"}[how]
    results = harness.launch(
        FORM
        + f"""
import os, time
x = torch.ones(1000)
dist.all_reduce(x)
if rank == 1:
    time.sleep(0.3)
    say(fell=time.time())
    {end}
found = attempt(lambda: dist.{call})
say(found=found, told=time.time())
""",
        3,
    )
    fell = results[1]["fell"]
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == ("peer-failed" if how == "raise" else "peer-lost")
        assert result["found"]["ranks"] == [1]
        assert result["told"] - fell < 1.0


def test_groups_that_end_give_their_descriptors_back() -> None:
    """Forming and destroying groups on shared memory does not use up file descriptors."""
    results = harness.launch(
        """
import gc, os
import torch
import allhands as dist

def held():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

counts = []
for _ in range(6):
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    counts.append(held())
say(counts=counts)
""",
        2,
    )
    check(results)
    for result in results:
        assert result["counts"][-1] <= result["counts"][1], result["counts"]


@pytest.mark.parametrize("kib", ["64", "4096"])
def test_the_segment_is_as_large_as_asked(kib: str) -> None:
    """Rank 0's ALLHANDS_SLOT_KIB sets the slot size of the group, and results do not depend on it."""
    results = harness.launch(
        FORM
        + """
tensor = torch.arange(700_001.0) + rank
dist.all_reduce(tensor)
assert torch.equal(tensor, 2 * torch.arange(700_001.0) + 1)
parts = [torch.full((70_000,), 10.0 * rank + each) for each in range(size)]
got = [torch.empty(70_000) for _ in range(size)]
dist.all_to_all(got, parts)
assert [each[-1].item() for each in got] == [10.0 * each + rank for each in range(size)]
say(bytes=dist.group.WORLD.engine.segment_nbytes)
dist.destroy_process_group()
""",
        2,
        each={0: {"ALLHANDS_SLOT_KIB": kib}},
    )
    check(results)
    slots = 2 * 4 * int(kib) * 1024
    assert {slots <= result["bytes"] < slots + (6 << 20) for result in results} == {True}


def test_a_slot_that_is_too_small_is_refused_on_all_ranks() -> None:
    """An invalid size is an error on every rank before memory is shared."""
    results = harness.launch(
        """
import allhands as dist
try:
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
except dist.ArgumentError as problem:
    say(text=str(problem))
""",
        2,
        each={0: {"ALLHANDS_SLOT_KIB": "8"}},
    )
    check(results)
    assert all("ALLHANDS_SLOT_KIB=8" in result["text"] for result in results)


def test_ranks_that_cannot_share_memory_use_gloo() -> None:
    """Where one machine's ranks refuse each other's credentials, all use Gloo, and results are right."""
    results = harness.well(
        harness.launch(
            """
import torch
import allhands as dist
from allhands.engines.shm import fd_passing
fd_passing.peer_credentials = lambda sock: (1, 12345 if rank == 1 else 0)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
x = torch.ones(3)
dist.all_reduce(x)
say(engine=dist.group.WORLD.engine.name, sum=x.tolist())
dist.destroy_process_group()
""",
            3,
        )
    )
    assert [(result["engine"], result["sum"]) for result in results] == [("gloo", [3.0] * 3)] * 3
