"""Features of our DistributedDataParallel that torch's does not have, on our backend and on torch's own."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

# Cases that torch's class does not support, or that fail without an error there.
OURS = """
import copy, gc, io, warnings, weakref
import torch
import torch.distributed as torch_dist
import torch.nn.parallel
from torch import nn
import allhands as dist
from allhands.engines.shm import engine as shm
from torch.distributed.optim import _apply_optimizer_in_backward

warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
shm.cores = lambda: CORES
DDP = dist.DistributedDataParallel

def everywhere(tensor):
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.detach().contiguous())
    return parts

def alike(tensors):
    return all(torch.equal(part, tensor) for tensor in tensors for part in everywhere(tensor.detach()))

def net():
    return nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2))

def step(model, optimizer=None):
    model.zero_grad()
    model(torch.randn(4, 6)).pow(2).sum().backward()
    if optimizer:
        optimizer.step()

def check_state_dicts_are_interchangeable_with_torchs():
    ours, theirs = DDP(net()), torch.nn.parallel.DistributedDataParallel(net())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, torch.nn.parallel.DistributedDataParallel)

def check_parameters_of_rank_0_are_broadcast():
    torch.manual_seed(rank)
    ddp = DDP(net())
    assert alike(ddp.parameters())

def check_buckets_in_the_segment_take_the_fast_path():
    ddp = DDP(nn.Sequential(*(nn.Linear(200, 200) for _ in range(3))), gradient_as_bucket_view=True)
    before = torch_dist.group.WORLD.segment.window_calls
    ddp(torch.randn(2, 200)).sum().backward()
    assert ddp.reducer.in_segment
    assert torch_dist.group.WORLD.segment.window_calls > before
    assert alike(p.grad for p in ddp.parameters())

def check_buckets_follow_the_order_of_use():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        def forward(self, x):
            return self.a(self.b(self.c(x)))
    ddp = DDP(Backwards(), bucket_cap_mb=0.0001)
    for _ in range(3):
        step(ddp)
    assert ddp.reducer.rebuilt
    order = [ddp.reducer.names[part.position] for bucket in ddp.reducer.buckets for part in bucket.parts]
    assert [name[0] for name in order] == list("aabbcc"), order

def check_reductions_overlap_with_backward_if_a_core_is_free():
    seen = []
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, grad):
            seen.append(ddp.reducer._now.launched)
            return grad
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        def forward(self, x):
            return self.b(Look.apply(self.a(x)))
    ddp = DDP(Deep(), bucket_cap_mb=0.0001)
    torch.manual_seed(rank)
    step(ddp)
    step(ddp)
    assert (seen[-1] >= 1) == (BACKEND == "gloo" or CORES > size), seen
    assert alike(p.grad for p in ddp.parameters())

def check_a_second_backward_is_averaged_too():
    ddp = DDP(nn.Linear(6, 2))
    torch.manual_seed(rank)
    loss = ddp(torch.randn(4, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert alike(p.grad for p in ddp.parameters())

def check_passes_inside_and_outside_no_sync_do_not_mix():
    ddp = DDP(nn.Linear(6, 2))
    torch.manual_seed(rank)
    outside = ddp(torch.randn(4, 6)).sum()
    with ddp.no_sync():
        inside = ddp(torch.randn(4, 6)).sum()
    inside.backward()
    assert not alike(p.grad for p in list(ddp.parameters())[:1])
    outside.backward()
    assert alike(p.grad for p in ddp.parameters())

def check_frozen_and_unfrozen_parameters():
    for views in (True, False):
        model = net()
        model[0].requires_grad_(False)
        ddp = DDP(model, gradient_as_bucket_view=views)
        torch.manual_seed(rank)
        step(ddp)
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
        for _ in range(3):
            step(ddp)
            assert model[2].weight.grad is None
            assert alike(p.grad for p in ddp.parameters() if p.requires_grad)
        model[2].requires_grad_(True)
        # In the second pass the core counts the unfrozen parameter again.
        for _ in range(2):
            step(ddp)
            assert alike(p.grad for p in ddp.parameters())

def check_parameters_frozen_in_the_middle_of_a_pass():
    model = net()
    ddp = DDP(model)
    torch.manual_seed(rank)
    step(ddp)
    ddp.zero_grad()
    output = ddp(torch.randn(4, 6))
    model[2].requires_grad_(False)
    output.pow(2).mean().backward()
    # autograd computes no gradient for it any more, and none is missing.
    assert model[2].weight.grad is None
    assert alike(p.grad for p in ddp.parameters() if p.requires_grad)
    model[2].requires_grad_(True)
    for _ in range(2):
        step(ddp)
        assert alike(p.grad for p in ddp.parameters())

def check_optimizers_in_backward():
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = net()
        if fused:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        ddp = DDP(model)
        optimizer = None if fused else torch.optim.SGD(ddp.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(3):
            step(ddp, optimizer)
        found.append(list(ddp.parameters()))
        assert not fused or all(p.grad is None for p in ddp.parameters())
    assert all(map(torch.equal, *found))

def check_post_accumulate_hooks_of_users():
    model, calls = net(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    step(DDP(model))
    assert calls == [1]

def check_gradients_without_a_watched_output():
    class Hidden:
        pass
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(6, 2)
        def forward(self, x):
            found = Hidden()
            found.value = self.part(x)
            return found
    ddp = DDP(Odd())
    torch.manual_seed(rank)
    ddp(torch.randn(3, 6)).value.sum().backward()
    assert alike(p.grad for p in ddp.parameters())

def check_average_gradients():
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": net(), "spare": nn.Linear(2, 2), "never": nn.Linear(2, 2)})
    torch.manual_seed(rank)
    loss = model["net"](torch.randn(4, 6)).sum()
    (loss + (model["spare"](torch.ones(2)).sum() if rank == 0 else 0)).backward()
    mine = [p.grad.clone() for p in model["net"].parameters()]
    wanted = [sum(everywhere(grad)) / size for grad in mine]
    dist.average_gradients(model)
    assert all(torch.allclose(a.grad, b) for a, b in zip(model["net"].parameters(), wanted))
    assert torch.allclose(model["spare"].bias.grad, torch.full((2,), 1 / size))
    assert model["never"].weight.grad is None

def check_sync_gradients():
    torch.manual_seed(0)
    model = net()
    hooks = dist.sync_gradients(model, bucket_cap_mb=0.001)
    torch.manual_seed(rank)
    for _ in range(3):
        step(model)
        assert alike(p.grad for p in model.parameters())
    with hooks.no_sync():
        step(model)
    assert not alike([model[0].weight.grad])
    step(model)
    assert alike(p.grad for p in model.parameters())
    hooks.remove()
    step(model)
    assert not alike([model[0].weight.grad])

def check_pass_that_failed_before_the_first_reduction():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, grad):
            raise KeyError("in backward")
    torch.manual_seed(0)
    model = net()
    with dist.sync_gradients(model):
        torch.manual_seed(rank)
        try:
            model[2:](Fails.apply(model[:2](torch.randn(4, 6)))).sum().backward()
        except KeyError:
            pass
        step(model)
        assert alike(p.grad for p in model.parameters())

def check_functional_calls_and_empty_gradients():
    ddp = DDP(nn.Linear(2, 2), find_unused_parameters=True)
    weight = torch.ones(2, 2, requires_grad=True)
    torch.func.functional_call(ddp, {"module.weight": weight}, torch.ones(1, 2)).sum().backward()
    assert weight.grad is not None and ddp.module.weight.grad is None
    ddp.zero_grad()
    torch._C._functions.UndefinedGrad()(ddp(torch.ones(1, 2)).sum()).backward()
    assert ddp.module.weight.grad is None
    ddp(torch.ones(1, 2)).sum().backward()
    assert alike(p.grad for p in ddp.parameters())

# Buffers of several dtypes, one of which is not contiguous.
class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 2)
        self.register_buffer("factor", torch.full((2,), rank + 1.0))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("flags", torch.tensor([rank > 0, True, rank > 1]))
        self.register_buffer("across", torch.zeros(3, 2).t() + rank)

    def forward(self, x):
        return self.line(x) * self.factor

def check_buffers_of_any_kind():
    for across in (True, False):
        model = Kept()
        if not across:
            del model.across
        ddp = DDP(model)
        for turn in range(3):
            for each in model.buffers():
                each.add_(rank) if each.dtype is not torch.bool else each.fill_(bool(rank))
            if turn == 1:  # the same tensor with other memory
                model.factor.data = torch.full((2,), rank + 5.0)
            expected = [each.clone() for each in model.buffers()]
            for each in expected:
                dist.broadcast(each, 0)
            step(ddp)
            assert alike(model.buffers())
            assert all(torch.equal(each, want) for each, want in zip(model.buffers(), expected))
        # The version counters change, so that autograd detects writes to tensors that it saved.
        version = model.factor._version
        step(ddp)
        assert (model.factor._version > version) == (rank > 0)

def check_copies_and_pickles():
    ddp = DDP(net())
    step(ddp)
    buffer = io.BytesIO()
    torch.save(ddp, buffer)
    buffer.seek(0)
    torch.manual_seed(rank)
    for other in (copy.deepcopy(ddp), torch.load(buffer, weights_only=False)):
        step(other)
        assert alike(p.grad for p in other.parameters())

def check_hooks_are_removed_with_the_last_reference():
    model = net()
    ddp = DDP(model)
    step(ddp)
    gone = weakref.ref(ddp.reducer)
    del ddp
    gc.collect()
    assert gone() is None
    torch.manual_seed(rank)
    step(model)
    assert not alike([model[0].weight.grad])

def check_unsupported_arguments():
    for kw, words in (({"mixed_precision": object()}, "mixed_precision"), ({"device_ids": [0]}, "device_ids"),
                      ({"delay_all_reduce_named_params": []}, "delay_all_reduce_named_params")):
        found = attempt(DDP, net(), **kw)
        assert found["slug"] == "invalid-argument" and words in found["text"], found
    frozen = net().requires_grad_(False)
    assert "not needed" in attempt(DDP, frozen)["text"]

def check_evaluation_in_between():
    ddp = DDP(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    torch.manual_seed(rank)
    for _ in range(2):
        step(ddp)
        ddp.eval()
        with torch.no_grad():
            ddp(torch.randn(2, 6))
        ddp(torch.randn(2, 6))
        ddp.train()
    ddp(torch.randn(4, 6)).sum().backward()
    assert alike(p.grad for p in ddp.parameters())

dist.init_process_group(BACKEND, rank=rank, world_size=size, timeout=60)
for name, check in [(name, value) for name, value in globals().items() if name.startswith("check_")]:
    # Only our own backend has a segment.
    if BACKEND == "allhands" or "segment" not in name:
        torch.manual_seed(1)
        say(begins=name)
        check()
say(done=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("backend", "cores"), [("allhands", 1), ("allhands", 64), ("gloo", 64)])
def test_features_beyond_torchs_class(backend: str, cores: int) -> None:
    """Unfreezing, second passes, hidden outputs, unwrapped models and the rest, on our backend and on torch's own.

    With more cores than ranks buckets are reduced during backward, otherwise after it.
    """
    results = harness.launch(f"BACKEND, CORES = {backend!r}, {cores}\n" + OURS, 2, timeout=60)
    for result in results:
        assert result.returncode == 0, f"{result.stdout[-500:]}\n{result.stderr}"
        assert result["done"]


def test_buckets_without_shared_memory() -> None:
    """Without shared memory for them, buckets are in ordinary memory, and training continues."""
    script = """
    import resource
    import allhands as dist
    import torch

    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
    # The kernel limits files of this process to 64 KiB, as if /dev/shm were full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    ddp = dist.DistributedDataParallel(torch.nn.Linear(300, 300), gradient_as_bucket_view=True)
    torch.manual_seed(rank)
    ddp(torch.randn(4, 300)).sum().backward()
    parts = [torch.empty(300, 300) for _ in range(size)]
    dist.all_gather(parts, ddp.module.weight.grad)
    say(in_segment=ddp.reducer.in_segment, same=torch.equal(*parts))
    dist.destroy_process_group()
    """
    for result in harness.launch(script, 2):
        assert result.returncode == 0, result.stderr
        assert result["same"]
        assert not result["in_segment"]


def test_ranks_with_different_numbers_of_cores() -> None:
    """They agree on when buckets are reduced, also if SyncBatchNorm issues collectives in backward."""
    script = """
    import torch
    from torch import nn
    import allhands as dist
    from allhands.engines.shm import engine as shm

    torch.set_num_threads(1)
    shm.cores = lambda: 64 if rank else 1
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)]
    model = dist.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers))
    ddp = dist.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    torch.manual_seed(rank)
    for _ in range(3):
        ddp(torch.randn(4, 6)).pow(2).sum().backward()
    parts = [torch.empty(6, 6) for _ in range(size)]
    dist.all_gather(parts, ddp.module[0].weight.grad)
    say(same=torch.equal(*parts))
    dist.destroy_process_group()
    """
    for result in harness.launch(script, 2):
        assert result.returncode == 0, result.stderr
        assert result["same"]
