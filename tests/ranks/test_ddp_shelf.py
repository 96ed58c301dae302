"""Gradients that two ranks average as they come: the same bits as when backward is over, whoever comes first."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("nursery")

SCRIPT = """
import time
import torch
from torch import nn
import allhands as dist
from allhands.engines import shm
from allhands.parallel import shelf

torch.set_num_threads(1)
# No core beside those of the ranks, which may look at each other or not.
shm.cores = lambda: CORES
# Small models, on any processor.
shelf._LEAST_BYTES = 1 << 20
swift = shelf._is_swift
shelf._is_swift = lambda group: True
DDP = dist.DistributedDataParallel

class Slow(torch.autograd.Function):
    \"\"\"Takes its time in backward.\"\"\"
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None

class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300, dtype=dtype) for _ in range(4))
        self.dtype = dtype
    def forward(self, x, pause=0.0):
        for layer in self.layers:
            x = Slow.apply(torch.tanh(layer(x)), pause)
        return x

def batch(ddp):
    return torch.randn(8, 300, dtype=ddp.module.dtype)

def by_hand(gradients):
    \"\"\"The averages of what both ranks have.\"\"\"
    found = []
    for gradient in gradients:
        parts = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(parts, gradient)
        wide = [part.double() if part.dtype is torch.float64 else part.float() for part in parts]
        found.append(((wide[0] + wide[1]) / 2).to(gradient.dtype))
    return found

def alone(ddp, x, backward=lambda loss: loss.backward()):
    ddp.zero_grad()
    with ddp.no_sync():
        backward(ddp(x).pow(2).mean())
    return [p.grad.clone() for p in ddp.parameters()]

def check(ddp, pause=0.0, passes=3):
    for _ in range(passes):
        x = batch(ddp)
        wanted = by_hand(alone(ddp, x))
        ddp.zero_grad()
        ddp(x, pause=pause).pow(2).mean().backward()
        for p, want in zip(ddp.parameters(), wanted, strict=True):
            assert torch.equal(p.grad, want)

def shelved(ddp):
    assert ddp.reducer._shelf.core is not None
    return ddp

def check_each_type():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check(DDP(Net(dtype)))

def check_it_is_the_shelf_that_averages():
    left = []
    meet = shelf.Shelf.meet
    def noted(*given):
        bundles = meet(*given)
        left.append(len(bundles))
        return bundles
    ddp = DDP(Net())
    check(ddp)
    shelf.Shelf.meet = noted
    try:
        check(shelved(ddp), pause=0.01 * rank, passes=5)
    finally:
        shelf.Shelf.meet = meet
    # A rank that loses its core in the middle leaves something to the end; not each time.
    assert 0 in left, left

def check_either_rank_is_late():
    for late in range(size):
        check(DDP(Net()), pause=0.01 * (rank == late))

def check_a_rank_that_is_far_behind():
    check(DDP(Net()), pause=0.2 * (rank == 1), passes=2)

def check_unusual_gradients_on_one_rank():
    ddp = DDP(Net())
    check(ddp)
    if rank:
        # In another order than its parameter's, so that it goes at the end here; and one that another hook looks at.
        ddp.module.layers[1].weight.register_hook(lambda grad: grad.t().contiguous().t())
        ddp.module.layers[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    check(shelved(ddp))

def check_hooks_that_change_gradients_do_so_on_every_rank():
    ddp = DDP(Net())
    check(ddp)
    x = batch(ddp)
    wanted = [2 * each for each in by_hand(alone(ddp, x))]
    def double(p):
        p.grad.mul_(2)
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(double)
    ddp.zero_grad()
    ddp(x).pow(2).mean().backward()
    for p, want in zip(ddp.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, want)

def check_accumulation_over_passes():
    ddp = DDP(Net())
    check(ddp)
    one, two = batch(ddp), batch(ddp)
    first = alone(ddp, one)
    second = alone(ddp, two)
    wanted = by_hand([a + b for a, b in zip(first, second, strict=True)])
    alone(ddp, one)
    ddp(two).pow(2).mean().backward()
    for p, want in zip(ddp.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, want)

def check_frozen_on_one_rank_and_again_trained():
    ddp = DDP(Net())
    check(ddp)
    ddp.module.layers[0].weight.requires_grad_(False)
    for _ in range(2):
        ddp.zero_grad()
        ddp(batch(ddp)).pow(2).mean().backward()
        assert ddp.module.layers[0].weight.grad is None
        parts = [torch.empty(300, 300) for _ in range(size)]
        dist.all_gather(parts, ddp.module.layers[3].weight.grad)
        assert torch.equal(*parts)
    ddp.module.layers[0].weight.requires_grad_(True)
    check(ddp)

def check_inputs_that_one_rank_runs_out_of():
    for initial in (True, False):
        ddp = DDP(Net())
        check(ddp)
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(2 + rank):
                ddp.zero_grad()
                x = batch(ddp)
                ddp(x).pow(2).mean().backward()
        check(ddp)

def check_a_hook_that_comes_later_takes_all():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    ddp = DDP(Net())
    check(ddp)
    shelved(ddp).register_comm_hook(None, allreduce_hook)
    check(ddp)

def check_large_gradients_and_few_bytes_have_none():
    for features in (40, 800):
        ddp = DDP(nn.Linear(features, features))
        for _ in range(2):
            ddp(torch.randn(2, features)).sum().backward()
        assert ddp.reducer._shelf.core is None

def check_processors_where_it_does_not_pay_have_none():
    for pays in (False, True):
        shelf._is_swift = lambda group: pays
        ddp = DDP(Net())
        check(ddp, passes=2)
        assert (ddp.reducer._shelf.core is not None) is pays
    assert swift(torch.distributed.group.WORLD) is bool(torch.distributed.group.WORLD.engine.segment.swift)

def check_models_that_go_give_their_memory_back():
    import gc, os
    def windows():
        return sum("allhands-window" in line for line in open("/proc/self/maps"))
    gc.collect()
    before = windows()
    ddp = DDP(Net())
    check(ddp)
    assert windows() > before
    del ddp
    gc.collect()
    assert windows() == before

dist.init_process_group("allhands", rank=rank, world_size=size, timeout=60)
for name, value in [(name, value) for name, value in globals().items() if name.startswith("check_")]:
    torch.manual_seed(0)
    say(begins=name)
    torch.manual_seed(rank)
    value()
say(done=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("cores", [1, 2])
def test_gradients_are_averaged_as_they_come(cores: int) -> None:
    """Types, late ranks, unusual gradients, hooks of users, accumulation, frozen parameters, uneven inputs."""
    for result in harness.launch(f"CORES = {cores}\n" + SCRIPT, 2, timeout=60):
        assert result.returncode == 0, f"{result.stdout[-300:]}\n{result.stderr}"
        assert result["done"]


def test_no_room_for_it() -> None:
    """Where there is no shared memory for it all goes on without."""
    script = """
    import resource
    import torch
    import allhands as dist
    from allhands.engines import shm
    from allhands.parallel import shelf

    shm.cores = lambda: 1
    shelf._is_swift = lambda group: True
    shelf._LEAST_BYTES = 1 << 20
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
    ddp = dist.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4))))
    # The kernel gives no file of this process more than 64 KiB now, as on a machine whose memory is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    torch.manual_seed(rank)
    for _ in range(3):
        ddp(torch.randn(4, 300)).sum().backward()
    parts = [torch.empty(300, 300) for _ in range(size)]
    dist.all_gather(parts, ddp.module[0].weight.grad)
    say(same=torch.equal(*parts), without=ddp.reducer._shelf.core is None)
    dist.destroy_process_group()
    """
    for result in harness.launch(script, 2):
        assert result.returncode == 0, result.stderr
        assert result["same"]
        assert result["without"]
