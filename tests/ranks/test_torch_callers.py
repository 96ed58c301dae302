"""What torch's own code does with the group beyond calling its collectives: limits, callbacks, handles, profilers."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

FORM = """
from datetime import timedelta
import time
import torch
import torch.distributed as dist
import allhands

torch.set_num_threads(1)
allhands.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's output if it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


def test_a_call_may_have_a_limit_of_its_own() -> None:
    """A call with a timeout of its own ends by that one, long before the group's."""
    results = harness.launch(
        FORM
        + """
dist.barrier()
if rank == 0:
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=0.3)
    say(found=attempt(lambda: dist.group.WORLD.barrier(options).wait()))
gate("seen")
""",
        2,
    )
    found = results[0]["found"]
    assert (found["slug"], found["ranks"]) == ("collective-timeout", [1])
    assert found["seconds"] < 10


def test_a_callback_may_wait_for_another_operation() -> None:
    """What follows on an operation may do another one and wait for it, as torch's PowerSGD hook does."""
    check(
        harness.launch(
            FORM
            + """
def again(future):
    twice = future.value()[0].clone()
    return dist.all_reduce(twice, async_op=True).get_future().wait()[0]

works = []
for step in range(20):
    big = torch.full((300_000,), float(step))
    works.append((step, dist.all_reduce(big, async_op=True).get_future().then(again), torch.full((7,), 1.0)))
    works[-1] += (dist.all_reduce(works[-1][2], async_op=True),)
for step, future, small, work in works:
    assert future.wait()[0].item() == step * size * size
    work.wait()
    assert small[0].item() == size
""",
            3,
        )
    )


def test_ddp_divides_by_the_ranks_that_still_have_data() -> None:
    """DDP may keep a handle between passes: with join it divides by the ranks that have not joined yet."""
    check(
        harness.launch(
            FORM
            + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
with model.join(divide_by_initial_world_size=False):
    for step in range(5 + rank):
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
        left = [each for each in range(size) if step < 5 + each]
        assert model.module.weight.grad.item() == sum(each + 1.0 for each in left) / len(left), (step, left)
""",
            3,
        )
    )


def test_reduce_scatter_takes_parts_of_different_sizes() -> None:
    """The tensors of reduce_scatter's list may differ in size; the given ones stay as they are."""
    check(
        harness.launch(
            FORM
            + """
for counts in ([1, 2, 3], [0, 5, 1], [100_000, 3, 50_001]):
    parts = [torch.arange(float(count)) * (rank + 1) for count in counts]
    before = [part.clone() for part in parts]
    mine = torch.empty(counts[rank])
    dist.reduce_scatter(mine, parts)
    assert torch.equal(mine, torch.arange(float(counts[rank])) * 6)
    assert all(torch.equal(part, kept) for part, kept in zip(parts, before))
problem = attempt(dist.reduce_scatter, torch.empty(9), parts)
assert problem["slug"] == "invalid-argument", problem
""",
            3,
        )
    )


def test_a_profiler_sees_the_operations() -> None:
    """Under a profiler each call is an event with its name, as long as its caller is in it."""
    check(
        harness.launch(
            FORM
            + """
x = torch.ones(1000)
for _ in range(3):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        dist.all_reduce(x)
        dist.broadcast(x, 0, async_op=True).wait()
        if rank == 0:
            time.sleep(1)  # the other rank is in its call for most of it, even if it is late
        dist.all_reduce(x)
    events = [event for event in seen.events() if event.name.startswith("allhands:")]
    names = [event.name for event in events]
    assert names == ["allhands:all_reduce", "allhands:broadcast", "allhands:all_reduce"], names
    if rank == 1:
        assert events[2].cpu_time_total > 200_000, events[2]
""",
            2,
        )
    )


def test_ctrl_c_in_ddp_is_a_keyboard_interrupt() -> None:
    """Ctrl-C while DDP's C++ code waits for a rank that does not come raises KeyboardInterrupt, and no RuntimeError."""
    results = harness.launch(
        FORM
        + """
import os, signal, threading, time

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
model(torch.ones(2, 3)).sum().backward()
if rank == 0:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        try:
            model(torch.ones(2, 3)).sum().backward()
        except RuntimeError:
            time.sleep(0)   # the next instruction in Python
            raise
    except KeyboardInterrupt:
        say(kind="KeyboardInterrupt")
        os._exit(0)
else:
    time.sleep(3)
""",
        2,
        timeout=20,
    )
    assert results[0]["kind"] == "KeyboardInterrupt"
