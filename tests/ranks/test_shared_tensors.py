"""Tensors in memory that all ranks share: right results without copies, in any mixture with other tensors."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)

def reduced(tensor, direct=None, **kw):
    before = dist.group.WORLD.segment.window_calls
    made = torch.Generator().manual_seed(rank)
    tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=made))
    dist.all_reduce(tensor, **kw)
    if direct is not None:
        assert dist.group.WORLD.segment.window_calls - before == int(direct)
    want = sum(torch.randint(-9, 9, tensor.shape, generator=torch.Generator().manual_seed(each))
               for each in range(size))
    assert torch.equal(tensor, want.to(tensor.dtype)), (tensor.shape, tensor.dtype)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's output if it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_are_right_however_tensors_are_placed(ranks: int) -> None:
    """At equal and different offsets, on some ranks only, in parts, small and large, sync and async."""
    results = harness.launch(
        FORM
        + """
shared = dist.empty(300_001)
other = dist.empty((500, 700), dtype=torch.float64)
assert shared.shape == (300_001,) and other.dtype is torch.float64 and other.shape == (500, 700)
plain = torch.empty(300_001)
alone = size == 1
reduced(shared, direct=True)
reduced(other, direct=True)
reduced(shared[:100], direct=False)                  # small: through the payloads
reduced(shared[1000:251_001], direct=True)
reduced(shared if rank == 0 else plain, direct=alone)          # some in a window, some not
reduced(plain if rank == 0 else shared, direct=False)
reduced(shared[rank * 10:200_000 + rank * 10], direct=alone)   # at different places of one window
mine = dist.empty(300_001)
reduced(shared if rank == 0 else mine, direct=alone)           # in different windows
reduced(plain, direct=False)
made = torch.full((300_001,), float(rank))
shared.copy_(made)
works = [dist.all_reduce(shared, async_op=True), dist.all_reduce(plain, async_op=True)]
for work in works:
    work.wait()
assert shared[0].item() == sum(range(size))
shared.fill_(1.0)
torch_dist.all_reduce(shared, op=torch_dist.ReduceOp.AVG)
assert shared.eq(1.0).all()
reduced(other, op=dist.ReduceOp.SUM)
half = dist.empty(100_000, dtype=torch.bfloat16)
reduced(half)
dist.broadcast(shared, 0)
assert dist.empty(0).shape == (0,) and dist.empty(()).shape == ()
dist.destroy_process_group()
""",
        ranks,
    )
    check(results)


def test_registering_keeps_the_tensor() -> None:
    """A registered parameter is the same object with the same values, and its gradient is reduced where it is."""
    results = harness.launch(
        FORM
        + """
import os
layer = torch.nn.Linear(300, 400)
with torch.no_grad():
    layer.weight.fill_(2.0)
before = layer.weight
assert dist.register(layer.weight) is before is layer.weight
assert isinstance(layer.weight, torch.nn.Parameter) and layer.weight.eq(2.0).all() and layer.weight.requires_grad
layer(torch.ones(2, 300)).sum().backward()
dist.register(layer.weight.grad)
layer.weight.grad.fill_(rank)
dist.all_reduce(layer.weight.grad)
assert layer.weight.grad.eq(sum(range(size))).all()
scalar = torch.tensor(float(rank))
dist.all_reduce(dist.register(scalar))
assert scalar.item() == sum(range(size))
gloo = dist.new_group(backend="gloo")
assert dist.empty(3, group=gloo).shape == (3,)
try:
    dist.register(torch.ones(2).to_sparse())
except dist.ArgumentError as problem:
    assert "sparse" in str(problem)
else:
    raise AssertionError
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_memory_is_freed_with_the_tensor() -> None:
    """Windows are unmapped when their tensors are gone, and no descriptor stays open."""
    results = harness.launch(
        FORM
        + """
import gc, os
from pathlib import Path

def windows():
    return Path("/proc/self/maps").read_text().count("allhands-window")

descriptors = len(os.listdir("/proc/self/fd"))
kept = dist.empty(10_000)
for _ in range(20):
    tensor = dist.empty(100_000)
    view = tensor[5:]
    dist.all_reduce(tensor)
    del tensor
    assert windows() == 2
    del view
gc.collect()
assert windows() == 1, windows()
assert len(os.listdir("/proc/self/fd")) == descriptors
reduced(kept)
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_different_sizes_are_refused_on_all_ranks() -> None:
    """Different sizes are an error on all ranks, which names the sizes and ranks; the group still works."""
    results = harness.launch(
        FORM
        + """
try:
    dist.empty(100 + rank)
except dist.ArgumentError as problem:
    say(text=str(problem))
dist.all_reduce(torch.ones(3))
reduced(dist.empty(50_000))
dist.destroy_process_group()
""",
        2,
    )
    check(results)
    for result in results:
        assert "rank 0 400, rank 1 404" in result["text"]


def test_too_little_memory_is_an_error_on_all_ranks() -> None:
    """If the kernel refuses the memory, every rank gets the error at once, and the group still works."""
    results = harness.launch(
        FORM
        + """
import time
started = time.monotonic()
try:
    dist.empty(1 << 50, dtype=torch.uint8)
except dist.ResourceError as problem:
    say(slug=problem.slug, took=time.monotonic() - started)
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
""",
        2,
    )
    check(results)
    assert {result["slug"] for result in results} == {"shm-too-small"}
    assert max(result["took"] for result in results) < 10
