"""Tensors of a GPU on the backend `allhands`: they go through the memory of the host, with the same checks."""

from __future__ import annotations

import pytest
import torch

from ranks import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda finds no GPU on this machine"),
]

ENGINES = pytest.mark.parametrize("engine", ["shm", "gloo"])

FORM = """
import torch
import allhands as dist

torch.cuda.set_device(0)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=60)
"""


def run(source: str, engine: str) -> list[harness.Result]:
    """Run ``source`` on two ranks that share the first GPU."""
    ways = {"ALLHANDS_ENGINE": engine, "ALLHANDS_CUDA": "host"}
    results = harness.launch(FORM + source, 2, ways, fresh=True, timeout=180)
    for result in results:
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return results


@ENGINES
def test_collectives_of_gpu_tensors(engine: str) -> None:
    """Each collective agrees on CUDA tensors, contiguous or not, and on the CPU; results stay on the GPU."""
    run(
        """
for count in (3, 100_003):
    x = torch.full((count,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    assert x.is_cuda and torch.equal(x, torch.full_like(x, 3.0))
    grid = torch.zeros(count, 2, device="cuda")
    grid[:, 1] = rank
    dist.broadcast(grid[:, 1], 1)
    assert grid[:, 1].eq(1).all() and grid[:, 0].eq(0).all()
    got = [torch.empty(count, device="cuda") for _ in range(size)]
    dist.all_gather(got, torch.full((count,), float(rank), device="cuda"))
    assert [each[0].item() for each in got] == [0.0, 1.0]
    part = torch.empty(count, device="cuda")
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * count, device="cuda"))
    assert torch.equal(part, 2 * torch.arange(2.0 * count, device="cuda")[rank * count : (rank + 1) * count])
    came = torch.empty(2 * count, device="cuda")
    dist.all_to_all_single(came, torch.full((2 * count,), float(rank), device="cuda"))
    assert came[0].item() == 0.0 and came[-1].item() == 1.0
    # Gathered to rank 0 from a tensor that is no result of this rank's.
    work = dist.gather(x, got if rank == 0 else None, 0, async_op=True)
    work.wait()
    assert rank or all(torch.equal(each, x) for each in got)
""",
        engine,
    )


@ENGINES
def test_several_gpu_tensors_as_one(engine: str) -> None:
    """all_reduce_coalesced sums each tensor, contiguous or not, waited for at once or later."""
    run(
        """
for count in (3, 100_003):
    whole = torch.full((count,), rank + 1.0, device="cuda")
    grid = torch.zeros(count, 2, device="cuda")
    grid[:, 1] = rank + 2.0
    several = [whole, grid[:, 1]]
    dist.all_reduce_coalesced(several)
    assert all(each.is_cuda for each in several)
    assert whole.eq(3).all() and grid[:, 1].eq(5).all() and grid[:, 0].eq(0).all()
    whole.fill_(rank + 7.0)
    grid[:, 1] = rank - 4.0
    dist.all_reduce_coalesced(several, op=dist.ReduceOp.MAX, async_op=True).wait()
    assert whole.eq(8).all() and grid[:, 1].eq(-3).all() and grid[:, 0].eq(0).all()
""",
        engine,
    )


@ENGINES
def test_a_call_waits_for_the_stream_that_it_was_issued_on(engine: str) -> None:
    """A kernel that is still to run on the caller's stream is waited for; afterwards every stream sees the sum."""
    run(
        """
side = torch.cuda.Stream()
for _ in range(3):
    x = torch.zeros(1_000_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(300_000_000)
        x += rank + 1
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(x, torch.full_like(x, 3.0)), x[:3]
""",
        engine,
    )


@ENGINES
def test_a_mismatch_of_gpu_tensors(engine: str) -> None:
    """Tensors of different sizes on a GPU: every rank raises collective-mismatch."""
    results = run(
        "say(found=attempt(lambda: dist.all_reduce(torch.ones(3 + rank, device='cuda'))))",
        engine,
    )
    assert [result["found"]["slug"] for result in results] == ["collective-mismatch"] * 2


@ENGINES
def test_ddp_on_a_gpu(engine: str) -> None:
    """A model on the GPU trains the same on both ranks, as it would on one with both batches."""
    results = run(
        """
torch.manual_seed(3)
model = torch.nn.Linear(20, 3).cuda()
alone = torch.nn.Linear(20, 3).cuda()
alone.load_state_dict(model.state_dict())
ddp = torch.nn.parallel.DistributedDataParallel(model)
data = torch.randn(8, 20, device="cuda")
ddp(data[rank * 4 : rank * 4 + 4]).pow(2).mean().backward()
alone(data).pow(2).mean().backward()
assert torch.allclose(model.weight.grad, alone.weight.grad, atol=1e-5)
say(grad=model.weight.grad.sum().item())
""",
        engine,
    )
    assert results[0]["grad"] == results[1]["grad"]
