"""Several tensors reduced as one, and gradients that are reduced in place."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

RANDOM = """
import random
import torch
import allhands as dist

dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
choose = random.Random(7)
for case in range(60):
    dtype = choose.choice([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.complex64])
    sizes = [choose.choice([0, 1, 3, 17, 1000, 5001, 70000]) for _ in range(choose.randint(1, 9))]
    torch.manual_seed(case)
    given = [[torch.randint(0, 5, (each,)).to(dtype) for each in sizes] for _ in range(size)]
    mine = given[rank]
    if case % 3 == 1:
        # With gaps in memory, on one rank only: the call is the same.
        mine = [torch.stack([each, each], 1)[:, 0] for each in mine] if rank == 0 else mine
    later = case % 3 == 2
    total = [sum(parts) for parts in zip(*[[each.clone() for each in rank_] for rank_ in given])]
    pending = dist.all_reduce_coalesced(mine, async_op=later)
    if later:
        pending.wait()
    assert all(torch.equal(*pair) for pair in zip(mine, total)), (case, dtype, sizes)
say(done=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensor_lists_of_any_number_and_size(ranks: int) -> None:
    """Each is the sum over ranks for any sizes, dtype and strides, synchronous or not."""
    for result in harness.launch(RANDOM, ranks, timeout=60):
        assert result.returncode == 0, result.stderr
        assert result["done"]


def test_tensor_list_is_one_call_without_buckets() -> None:
    """Counted by the sequence number of calls; tensors that share memory are reduced one after the other."""
    script = """
    import torch
    import allhands as dist

    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
    segment = dist.group.WORLD.segment
    begun = segment.sequence()
    dist.all_reduce_coalesced([torch.ones(5), torch.ones(50_000), torch.ones(7)])
    once = segment.sequence() - begun
    one = torch.ones(6)
    dist.all_reduce_coalesced([one, one])
    halves = torch.ones(8)
    dist.all_reduce_coalesced([halves[:6], halves[2:]])
    say(once=once, one=one.tolist(), halves=halves.tolist())
    dist.destroy_process_group()
    """
    for result in harness.launch(script, 2):
        assert result.returncode == 0, result.stderr
        assert result["once"] == 1
        assert result["one"] == [4.0] * 6
        assert result["halves"] == [2.0] * 2 + [4.0] * 4 + [2.0] * 2


def test_sizes_with_the_same_sum_are_a_mismatch() -> None:
    """10 and 20 elements are not 20 and 10."""
    script = """
    import torch
    import allhands as dist

    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
    sizes = (10, 20) if rank else (20, 10)
    say(**attempt(dist.all_reduce_coalesced, [torch.ones(each) for each in sizes]))
    """
    for result in harness.launch(script, 2):
        assert result["slug"] == "collective-mismatch", result.stderr
        assert "digest of their sizes" in result["text"]
        assert "float32 x 30" in result["text"]


# Gradients with an unusual layout on one rank or on both.
ODD = """
import torch
from torch import nn
import allhands as dist
from allhands.engines.shm import engine as shm

torch.set_num_threads(1)
shm.cores = lambda: CORES
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 300)
        self.bias = nn.Parameter(torch.randn(300))
        self.wide = nn.Parameter(torch.randn(300, dtype=torch.float64))
    def forward(self, x):
        return self.b(self.a(x).mean((2, 3))) * self.bias + self.wide.float()

def both(way, passes=3, net=Net):
    "The gradients of passes reduced in place, and of the same passes in buckets."
    found = []
    for views in (False, True):
        ddp = dist.DistributedDataParallel(net(), gradient_as_bucket_view=views, bucket_cap_mb=0.004)
        torch.manual_seed(10 + rank)
        for _ in range(passes):
            ddp.zero_grad()
            way(ddp, ddp(torch.randn(2, 3, 6, 6)))
            found.append([p.grad.clone() for p in ddp.parameters()])
        assert ddp.reducer.in_segment == views, views
    half = len(found) // 2
    for mine, other in zip(found[:half], found[half:]):
        for one, another in zip(mine, other):
            assert torch.equal(one, another)
    for gradient in found[half - 1]:
        parts = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(parts, gradient)
        assert torch.equal(*parts)

def plain(ddp, output):
    output.pow(2).sum().backward()

def hooked(change):
    "Change what has come of the gradient before it is counted."
    def way(ddp, output):
        handles = [p.register_hook(change) for p in (ddp.module.a.weight, ddp.module.b.weight)]
        plain(ddp, output)
        for handle in handles:
            handle.remove()
    return way

both(plain)
both(hooked(lambda g: g.transpose(0, 1).contiguous().transpose(0, 1)))
both(hooked(lambda g: g.transpose(0, 1).contiguous().transpose(0, 1) if rank else g))
both(plain, net=lambda: Net().to(memory_format=torch.channels_last))

def check_gradients_that_share_memory():
    ddp = dist.DistributedDataParallel(Net())
    alone = Net()
    torch.manual_seed(10 + rank)
    inputs = torch.randn(2, 3, 6, 6)
    shared = []
    for model, output in ((alone, alone(inputs)), (ddp.module, ddp(inputs))):
        shared.append(torch.ones(300))
        model.bias.grad, model.b.bias.grad = shared[-1], shared[-1].view(300)
        plain(None, output)
    dist.all_reduce(shared[0], op=dist.ReduceOp.AVG)
    assert torch.equal(*shared)

def check_frozen_parameter_keeps_its_gradient():
    ddp = dist.DistributedDataParallel(Net())
    for _ in range(2):
        ddp.module.bias.grad = torch.full((300,), float(rank))
        ddp.module.bias.requires_grad_(False)
        plain(ddp, ddp(torch.randn(2, 3, 6, 6)))
        assert torch.equal(ddp.module.bias.grad, torch.full((300,), float(rank)))

def check_hook_gets_buckets_in_shared_memory():
    ddp = dist.DistributedDataParallel(Net())
    def hook(state, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        plain(ddp, ddp(torch.randn(2, 3, 6, 6)))
    assert ddp.reducer.in_segment

def check_buckets_use_no_memory():
    def held():
        lines = open("/proc/self/status").read().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) >> 10
    model = nn.Linear(4000, 4000, bias=False)
    ddp = dist.DistributedDataParallel(model)
    before = held()
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(1, 4000)).sum().backward()
    more = held() - before
    # 61 MiB of gradients; buckets would need as much again.
    assert 55 < more < 90, more

for name, check in [(name, value) for name, value in globals().items() if name.startswith("check_")]:
    say(begins=name)
    check()
say(done=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("cores", [1, 64])
def test_gradients_are_the_same_in_place_as_in_buckets(cores: int) -> None:
    """For any strides and dtypes, on every rank or on one; at the end of backward and during it."""
    for result in harness.launch(f"CORES = {cores}\n" + ODD, 2, timeout=60):
        assert result.returncode == 0, result.stderr
        assert result["done"]
