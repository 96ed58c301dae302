"""Averages that lie once in memory for all ranks: the same bits, and each rank's own as soon as it writes to them."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("nursery")

SCRIPT = """
import ctypes
import torch
from torch import nn
import allhands as dist
from allhands.engines.shm import engine as shm
from allhands.training import pool

torch.set_num_threads(1)
# No core beside those of the ranks.
shm.cores = lambda: 1
# Small models.
pool._LEAST_BYTES = 1 << 20
DDP = dist.DistributedDataParallel

class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300, dtype=dtype) for _ in range(4))
        self.dtype = dtype
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

def batch(ddp):
    return torch.randn(8, 300, dtype=ddp.module.dtype)

def by_hand(gradients):
    \"\"\"The averages of what all ranks have.\"\"\"
    found = []
    for gradient in gradients:
        parts = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(parts, gradient)
        total = parts[0].double() if gradient.dtype is torch.float64 else parts[0].float()
        for part in parts[1:]:
            total = total + part
        found.append((total / size).to(gradient.dtype))
    return found

def backward(ddp, x):
    ddp(x).pow(2).mean().backward()

def alone(ddp, x):
    ddp.zero_grad()
    with ddp.no_sync():
        backward(ddp, x)
    return [p.grad.clone() for p in ddp.parameters()]

def check(ddp, passes=3, rtol=0.0):
    for _ in range(passes):
        x = batch(ddp)
        wanted = by_hand(alone(ddp, x))
        ddp.zero_grad()
        backward(ddp, x)
        for p, want in zip(ddp.parameters(), wanted, strict=True):
            assert torch.allclose(p.grad, want, rtol=rtol, atol=rtol * 1e-3)

def core_of(ddp):
    return ddp.reducer._pool._core

def pooled(ddp):
    \"\"\"Whether its gradients lie in the pool now.\"\"\"
    inside = torch.tensor([core_of(ddp) is not None and not core_of(ddp).is_free()])
    told = [torch.empty_like(inside) for _ in range(size)]
    dist.all_gather(told, inside)
    assert len({bool(each) for each in told}) == 1, told
    return bool(inside)

def made(**kw):
    ddp = DDP(Net(**kw))
    check(ddp)
    assert pooled(ddp)
    return ddp

def check_each_type():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        made(dtype=dtype)

def check_unusual_gradients_on_one_rank():
    ddp = made()
    if rank:
        # In another order than its parameter's.
        def turn(p):
            p.grad = p.grad.t().contiguous().t()
        handle = ddp.module.layers[1].weight.register_post_accumulate_grad_hook(turn)
    check(ddp)
    assert not pooled(ddp)
    if rank:
        handle.remove()
    check(ddp)
    assert pooled(ddp)

def check_hooks_that_change_gradients():
    ddp = made()
    x = batch(ddp)
    wanted = [2 * each for each in by_hand(alone(ddp, x))]
    def double(p):
        p.grad.mul_(2)
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(double)
    ddp.zero_grad()
    backward(ddp, x)
    for p, want in zip(ddp.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, want)
    assert pooled(ddp)

def check_accumulation_over_passes():
    ddp = made()
    one, two = batch(ddp), batch(ddp)
    wanted = by_hand([a + b for a, b in zip(alone(ddp, one), alone(ddp, two), strict=True)])
    alone(ddp, one)
    backward(ddp, two)
    for p, want in zip(ddp.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, want)

def check_gradients_that_are_never_set_back():
    # Each pass adds to the averages of the last one, which is this rank's own doing until they are averaged again.
    ddp = made()
    ddp.zero_grad()
    one = batch(ddp)
    first = by_hand(alone(ddp, one))
    ddp.zero_grad()
    backward(ddp, one)
    two = batch(ddp)
    with torch.no_grad():
        held = [p.grad.clone() for p in ddp.parameters()]
    second = [a + b for a, b in zip(held, alone_beside(ddp, two), strict=True)]
    wanted = by_hand(second)
    backward(ddp, two)
    for p, want in zip(ddp.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, want)
    assert all(torch.equal(a, b) for a, b in zip(held, first, strict=True))

def alone_beside(ddp, x):
    \"\"\"Gradients of one batch, beside those that there are.\"\"\"
    return torch.autograd.grad(ddp.module(x).pow(2).mean(), list(ddp.module.parameters()))

def check_gradients_that_are_set_to_zero():
    ddp = made()
    for _ in range(3):
        x = batch(ddp)
        wanted = by_hand(alone_beside(ddp, x))
        ddp.zero_grad(set_to_none=False)
        backward(ddp, x)
        for p, want in zip(ddp.parameters(), wanted, strict=True):
            assert torch.equal(p.grad, want)

def check_what_one_rank_writes_nobody_else_sees():
    for behind in (False, True):
        ddp = made()
        x = batch(ddp)
        wanted = by_hand(alone(ddp, x))
        ddp.zero_grad()
        backward(ddp, x)
        assert pooled(ddp)
        if rank == size - 1:
            for p in ddp.parameters():
                if behind:
                    ctypes.memset(p.grad.data_ptr(), 255, p.grad.nbytes)
                else:
                    p.grad.mul_(3)
        dist.barrier()
        for p, want in zip(ddp.parameters(), wanted, strict=True):
            if rank < size - 1:
                assert torch.equal(p.grad, want)
            elif not behind:
                assert torch.equal(p.grad, want * 3)
        check(ddp, passes=4)
        # Once may have been an accident.
        assert pooled(ddp)

def check_clipping_in_every_pass():
    # Writing to pages that are shared costs more than copying them: after two passes they are not any more.
    ddp = made()
    went = []
    for _ in range(8):
        x = batch(ddp)
        wanted = by_hand(alone(ddp, x))
        ddp.zero_grad()
        backward(ddp, x)
        went.append(pooled(ddp))
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        for p, want in zip(ddp.parameters(), wanted, strict=True):
            assert torch.allclose(p.grad, want * (1e-3 / (norm + 1e-6)).clamp(max=1), rtol=1e-5)
    assert went[-4:] == [False] * 4, went
    for _ in range(pool._MOST_IDLE):
        ddp.zero_grad()
        backward(ddp, batch(ddp))
    assert core_of(ddp) is None
    check(ddp)

def check_gradients_that_are_kept():
    ddp = made()
    kept = [p.grad for p in ddp.parameters()]
    copies = [each.clone() for each in kept]
    check(ddp)
    assert not any(p.grad is each for p, each in zip(ddp.parameters(), kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    del kept
    check(ddp)
    assert pooled(ddp)

def check_kept_on_one_rank_only():
    ddp = made()
    kept = [p.grad for p in ddp.parameters()] if rank == 0 else []
    ddp.zero_grad()
    backward(ddp, batch(ddp))
    # Asked of everyone at once: nobody's lies in the pool, but rank 0 still has some of the pass before.
    assert core_of(ddp).is_free() is (rank != 0)

def check_frozen_and_again_trained():
    ddp = made()
    ddp.module.layers[0].weight.requires_grad_(False)
    for _ in range(2):
        ddp.zero_grad()
        backward(ddp, batch(ddp))
        assert ddp.module.layers[0].weight.grad is None
        parts = [torch.empty(300, 300) for _ in range(size)]
        dist.all_gather(parts, ddp.module.layers[3].weight.grad)
        assert all(torch.equal(parts[0], part) for part in parts)
    ddp.module.layers[0].weight.requires_grad_(True)
    check(ddp)
    assert pooled(ddp)

def check_inputs_that_one_rank_runs_out_of():
    for initial in (True, False):
        ddp = made()
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(2 + rank):
                ddp.zero_grad()
                backward(ddp, batch(ddp))
        # Since then each rank divides what it has, and not the sum.
        check(ddp, rtol=1e-5)
        assert pooled(ddp)

def check_a_hook_that_comes_later_takes_all():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    ddp = made()
    ddp.register_comm_hook(None, allreduce_hook)
    for _ in range(3):
        x = batch(ddp)
        wanted = by_hand(alone(ddp, x))
        ddp.zero_grad()
        backward(ddp, x)
        for p, want in zip(ddp.parameters(), wanted, strict=True):
            assert torch.allclose(p.grad, want, rtol=1e-5, atol=1e-8)

def check_weights_in_another_order():
    model = nn.Sequential(nn.Conv2d(64, 128, 3), nn.Conv2d(128, 256, 3)).to(memory_format=torch.channels_last)
    ddp = DDP(model)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(2, 64, 8, 8)).pow(2).mean().backward()
        for p in model.parameters():
            assert p.grad.stride() == p.stride()
            parts = [torch.empty_like(p.grad) for _ in range(size)]
            dist.all_gather(parts, p.grad)
            assert all(torch.equal(parts[0], part) for part in parts)
    assert pooled(ddp)

def check_several_types():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.dtype = torch.float32
            self.wide, self.narrow = nn.Linear(300, 300, dtype=torch.float64), nn.Linear(300, 900)
        def forward(self, x):
            return self.narrow(self.wide(x.double()).float())
    check(DDP(Mixed()))

def check_two_models_have_one_each():
    one, two = made(), made()
    for _ in range(3):
        x, y = batch(one), batch(two)
        wanted = by_hand(alone(one, x)), by_hand(alone(two, y))
        one.zero_grad()
        two.zero_grad()
        (one(x).pow(2).mean() + two(y).pow(2).mean()).backward()
        for ddp, want in zip((one, two), wanted, strict=True):
            assert all(torch.equal(p.grad, each) for p, each in zip(ddp.parameters(), want, strict=True))
    assert pooled(one) and pooled(two)

def check_few_bytes_have_none():
    ddp = DDP(nn.Linear(40, 40))
    for _ in range(3):
        ddp(torch.randn(2, 40)).sum().backward()
    assert core_of(ddp) is None

def check_training_as_without_it():
    found = []
    for least in (1 << 20, 1 << 40):
        pool._LEAST_BYTES = least
        torch.manual_seed(1)
        ddp = DDP(Net())
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        torch.manual_seed(rank)
        for _ in range(6):
            optimizer.zero_grad()
            backward(ddp, batch(ddp))
            optimizer.step()
        found.append([p.detach() for p in ddp.parameters()])
    pool._LEAST_BYTES = 1 << 20
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

def check_models_that_go_give_their_memory_back():
    import gc
    def windows():
        return sum("allhands-window" in line for line in open("/proc/self/maps"))
    gc.collect()
    before = windows()
    ddp = made()
    assert windows() > before
    kept = ddp.module.layers[0].weight.grad
    copied = kept.clone()
    del ddp
    gc.collect()
    # One that somebody has is still there.
    assert windows() == before + 1
    assert torch.equal(kept, copied)
    del kept
    assert windows() == before

dist.init_process_group("allhands", rank=rank, world_size=size, timeout=60)
for name, value in [(name, value) for name, value in globals().items() if name.startswith("check_")]:
    torch.manual_seed(0)
    say(begins=name)
    torch.manual_seed(rank)
    value()
ddp = made()
gradient = ddp.module.layers[0].weight.grad
copied = gradient.clone()
dist.destroy_process_group()
assert torch.equal(gradient, copied)
say(done=True)
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_in_the_pool(ranks: int) -> None:
    """Types, unusual and kept gradients, hooks, accumulation, clipping, frozen parameters, uneven inputs, the end."""
    for result in harness.launch(SCRIPT, ranks, timeout=90):
        assert result.returncode == 0, f"{result.stdout[-300:]}\n{result.stderr}"
        assert result["done"]


NO_ROOM = """
import resource
import torch
import allhands as dist
from allhands.engines.shm import engine as shm
from allhands.training import pool

shm.cores = lambda: 1
pool._LEAST_BYTES = 1 << 20
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
ddp = dist.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4))))
PREPARE
torch.manual_seed(rank)
for _ in range(3):
    ddp(torch.randn(4, 300)).sum().backward()
parts = [torch.empty(300, 300) for _ in range(size)]
dist.all_gather(parts, ddp.module[0].weight.grad)
say(same=torch.equal(*parts), without=ddp.reducer._pool._core is None)
dist.destroy_process_group()
"""

# The kernel gives no file of this process more than 64 KiB now, as on a machine whose memory is full.
FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))"

# One rank cannot look at its pages, as where /proc is not there.
BLIND = """
from allhands import _core
if rank == 1:
    class Pool:
        bytes_for = _core.Pool.bytes_for
        def __new__(cls, *given):
            raise OSError("no pagemap here")
    _core.Pool = Pool
"""


@pytest.mark.parametrize("prepare", [FULL, BLIND], ids=["full", "blind"])
def test_no_pool_to_be_had(prepare: str) -> None:
    """Where there is no memory for it, or one rank cannot look at its pages, all goes on without."""
    for result in harness.launch(NO_ROOM.replace("PREPARE", prepare), 2):
        assert result.returncode == 0, result.stderr
        assert result["same"]
        assert result["without"]
