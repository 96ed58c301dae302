"""Our DistributedDataParallel against torch's on Gloo, bit for bit with two ranks, and what torch's does not do."""

from __future__ import annotations

import pytest

from ranks import harness
from ranks.against_gloo import compare

pytestmark = pytest.mark.usefixtures("nursery")

# torch's class where the driver runs on Gloo, ours where it runs on our backend.
BEGIN = """
from collections import namedtuple
from dataclasses import dataclass
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint
import torch.nn.functional as F
import torch.nn.parallel

warnings.simplefilter("ignore", FutureWarning)

def DDP(*args, **kw):
    library = torch.nn.parallel if torch_dist.get_backend() == "gloo" else dist
    return library.DistributedDataParallel(*args, **kw)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 20)
        self.norm = nn.BatchNorm1d(20)
        self.spare = nn.Linear(20, 20)
        self.last = nn.Linear(20, 3)

    def forward(self, x, spare=True):
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.spare(x) if spare else x)

def train(ddp, steps=3, spare=lambda step: True, optimizer=None, keep=False, loss=lambda out: out.pow(2).mean()):
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=not keep)
        found = loss(ddp(torch.randn(8, 10), spare(step)))
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses, list(ddp.state_dict().values()), [p.grad for p in ddp.parameters() if p.grad is not None]
"""

TRIALS = (
    BEGIN
    + """
def try_plain():
    return train(DDP(Net()))

def try_adam_and_many_buckets():
    ddp = DDP(Net(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
    return train(ddp, steps=5, optimizer=torch.optim.Adam(ddp.parameters()))

def try_views_that_stay():
    return train(DDP(Net(), gradient_as_bucket_view=True), steps=4, keep=True)

def try_unused_parameters():
    return train(DDP(Net(), find_unused_parameters=True), steps=4, spare=lambda step: (step + rank) % 2 == 0)

def try_parameters_nobody_uses():
    ddp = DDP(Net(), find_unused_parameters=True, gradient_as_bucket_view=True)
    found = train(ddp, spare=lambda step: False)
    assert ddp.module.spare.weight.grad is None
    return found

def try_static_graph():
    return train(DDP(Net(), static_graph=True), spare=lambda step: False)

def try_static_graph_that_differs_between_ranks():
    return train(DDP(Net(), static_graph=True), steps=4, spare=lambda step: rank == 0)

def try_accumulation():
    ddp = DDP(Net())
    torch.manual_seed(rank)
    with ddp.no_sync():
        ddp(torch.randn(4, 10)).sum().backward()
    alone = [p.grad.clone() for p in ddp.parameters()]
    ddp(torch.randn(4, 10)).sum().backward()
    return alone, [p.grad.clone() for p in ddp.parameters()], train(ddp)

def try_two_forwards_and_one_backward():
    ddp = DDP(nn.Linear(10, 3))
    torch.manual_seed(rank)
    (ddp(torch.randn(4, 10)).sum() + ddp(torch.randn(4, 10)).pow(2).sum()).backward()
    return [p.grad for p in ddp.parameters()]

def try_uneven_inputs():
    found = []
    for initial in (True, False):
        ddp = DDP(Net(), bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        torch.manual_seed(rank)
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(2 + 3 * rank):
                optimizer.zero_grad()
                ddp(torch.randn(4, 10)).pow(2).mean().backward()
                optimizer.step()
        found.append(list(ddp.state_dict().values()))
    return found

def try_uneven_inputs_and_unused_parameters():
    ddp = DDP(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with ddp.join():
        for step in range(5 - 3 * rank):
            optimizer.zero_grad()
            ddp(torch.randn(4, 10), spare=step % 2 == 0).pow(2).mean().backward()
            optimizer.step()
    return list(ddp.state_dict().values())

def try_subgroup_and_mesh():
    found = []
    group, mesh = torch_dist.new_group([1, 0]), init_device_mesh("cpu", (size,))
    for kw in ({"process_group": group}, {"device_mesh": mesh}):
        torch.manual_seed(2)
        net = DDP(nn.Linear(4, 4), **kw)
        net(torch.ones(2, 4) * rank).sum().backward()
        found.append([p.grad for p in net.parameters()])
    return found

def try_sparse_gradients():
    ddp = DDP(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))
    found = []
    for step in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([rank, 2 + step])).sum().backward()
        found.append([p.grad.to_dense() for p in ddp.parameters()])
    return found

def try_types_and_shared_parameters():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6).double(), nn.Linear(6, 6).bfloat16()
            self.d = self.a
            self.e = nn.Linear(6, 6)
            self.e.weight = self.a.weight
        def forward(self, x, _):
            x = self.e(self.d(self.a(x[:, :6])))
            return self.c(self.b(x.double()).bfloat16()).float()
    return train(DDP(Mixed(), bucket_cap_mb=0.0001))

def try_channels_last():
    ddp = DDP(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), gradient_as_bucket_view=True)
    torch.manual_seed(rank)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    assert ddp.module.weight.grad.stride() == ddp.module.weight.stride()
    return [p.grad for p in ddp.parameters()]

def try_checkpointing():
    class Deep(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.layers, self.reentrant = nn.ModuleList(nn.Linear(10, 10) for _ in range(3)), reentrant
        def forward(self, x, _):
            x = x.requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return x
    return [train(DDP(Deep(reentrant), bucket_cap_mb=0.0001)) for reentrant in (False, True)]

def try_checkpointing_twice_with_a_static_graph():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(10, 10)
        def forward(self, x, _):
            x = x.requires_grad_()
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x
    return train(DDP(Twice(), static_graph=True))

def try_gradients_of_gradients():
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    torch.manual_seed(rank)
    x = torch.randn(3, 4, requires_grad=True)
    out = ddp(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.sum() + slope.pow(2).sum()).backward()
    return [p.grad for p in ddp.parameters()]

def try_ignored_parameters():
    net = Net()
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["spare.weight"])
    torch.manual_seed(rank)
    nn.init.normal_(net.spare.weight)
    return train(DDP(net))

def try_nested_outputs():
    @dataclass
    class Found:
        value: torch.Tensor
    Pair = namedtuple("Pair", "a b")
    class Nest(Net):
        def forward(self, x, _):
            return {"list": [Found(super().forward(x))], "pair": Pair(x, None)}
    return train(DDP(Nest()), loss=lambda out: out["list"][0].value.pow(2).mean())

def hooked(hook, state=None, cap=0.001, **kw):
    ddp = DDP(Net(), bucket_cap_mb=cap)
    ddp.register_comm_hook(state, hook)
    return train(ddp, **kw)

def try_hooks_of_torch():
    # Behind another name: torch's class refuses it without NCCL.
    def bf16(state, bucket):
        return default_hooks.bf16_compress_hook(state, bucket)
    return [hooked(hook) for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, bf16,
                                      default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))]

def try_powersgd_hook():
    if torch.cuda.is_available():
        return ["where there is a GPU torch's hook waits for it, wherever its tensors are, and fails"]
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    # One bucket: callbacks of several call into Gloo in an order of their own on each rank, and it hangs.
    found = hooked(powerSGD_hook.powerSGD_hook, state, cap=25, steps=5)
    assert state.compression_stats()[0] > 1, "nothing was compressed"
    return found

def try_a_hook_that_makes_another_tensor():
    def hook(state, bucket):
        assert len(bucket.gradients()) == len(bucket.parameters()) and bucket.index() >= 0
        work = torch_dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 4)
    return hooked(hook)

def try_zero_redundancy_and_join():
    ddp = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, parameters_as_bucket_view=True)
    torch.manual_seed(rank)
    with Join([ddp, optimizer]):
        for _ in range(1 + rank):
            optimizer.zero_grad()
            ddp(torch.randn(4, 10)).pow(2).mean().backward()
            optimizer.step()
    return list(ddp.state_dict().values())

def try_local_sgd():
    alone = torch_dist.new_subgroups(1)[0]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    ddp = DDP(Net())
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    return train(ddp, steps=6, optimizer=PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager))
"""
)


def test_training_gives_what_torchs_gives_on_gloo() -> None:
    """Losses, parameters and gradients with each option, hook, join and kind of model: the same bits with two ranks."""
    found = compare(TRIALS, 2)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 25


MORE_RANKS = (
    BEGIN
    + """
def try_plain():
    return train(DDP(Net(), bucket_cap_mb=0.001))

def try_unused_parameters():
    return train(DDP(Net(), find_unused_parameters=True), spare=lambda step: (step + rank) % 2 == 0)

def try_uneven_inputs():
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with ddp.join():
        for _ in range(1 + rank):
            ddp(torch.randn(4, 10)).pow(2).mean().backward()
            optimizer.step()
    return list(ddp.state_dict().values())
"""
)


def test_training_on_three_ranks_is_torchs_within_rounding() -> None:
    """Beyond two ranks a sum may be rounded in another order."""
    found = compare(MORE_RANKS, 3, close=1e-5)
    assert found == dict.fromkeys(found, "")


# What torch's class does not do, or does in silence; each returns nothing and asserts.
OURS = """
import copy, gc, io, warnings, weakref
import torch
import torch.distributed as torch_dist
import torch.nn.parallel
from torch import nn
import allhands as dist
from torch.distributed.optim import _apply_optimizer_in_backward

warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
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

def check_state_dicts_fit_both_ways():
    ours, theirs = DDP(net()), torch.nn.parallel.DistributedDataParallel(net())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, torch.nn.parallel.DistributedDataParallel)

def check_rank_0_gives_its_parameters():
    torch.manual_seed(rank)
    ddp = DDP(net())
    assert alike(ddp.parameters())

def check_buckets_lie_in_the_segment_and_take_the_direct_way():
    ddp = DDP(nn.Sequential(*(nn.Linear(200, 200) for _ in range(3))), gradient_as_bucket_view=True)
    before = torch_dist.group.WORLD.segment.direct
    ddp(torch.randn(2, 200)).sum().backward()
    assert ddp.reducer.in_segment
    assert torch_dist.group.WORLD.segment.direct > before
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
    order = [ddp.reducer.names[slot.position] for bucket in ddp.reducer.buckets for slot in bucket.slots]
    assert [name[0] for name in order] == list("aabbcc"), order

def check_reduction_begins_while_backward_goes_on():
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
    step(ddp)
    step(ddp)
    assert seen[-1] >= 1, seen

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
    model = net()
    model[0].requires_grad_(False)
    ddp = DDP(model, gradient_as_bucket_view=True)
    torch.manual_seed(rank)
    step(ddp)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    for _ in range(3):
        step(ddp)
        assert model[2].weight.grad is None
        assert alike(p.grad for p in ddp.parameters() if p.requires_grad)
    model[2].requires_grad_(True)
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

def check_gradients_that_nobody_announced():
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

def check_a_pass_that_failed_before_anything_was_reduced():
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

def check_functional_calls_and_gradients_of_nothing():
    ddp = DDP(nn.Linear(2, 2), find_unused_parameters=True)
    weight = torch.ones(2, 2, requires_grad=True)
    torch.func.functional_call(ddp, {"module.weight": weight}, torch.ones(1, 2)).sum().backward()
    assert weight.grad is not None and ddp.module.weight.grad is None
    ddp.zero_grad()
    torch._C._functions.UndefinedGrad()(ddp(torch.ones(1, 2)).sum()).backward()
    assert ddp.module.weight.grad is None
    ddp(torch.ones(1, 2)).sum().backward()
    assert alike(p.grad for p in ddp.parameters())

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

def check_it_goes_when_nobody_holds_it():
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

def check_what_is_refused():
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
    if BACKEND == "allhands" or "segment" not in name:
        torch.manual_seed(1)
        say(begins=name)
        check()
say(done=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["allhands", "gloo"])
def test_what_torchs_does_not_do(backend: str) -> None:
    """Unfreezing, second passes, hidden outputs, unwrapped models and the rest, on our backend and on torch's own."""
    results = harness.launch(f"BACKEND = {backend!r}\n" + OURS, 2, timeout=60)
    for result in results:
        assert result.returncode == 0, f"{result.stdout[-500:]}\n{result.stderr}"
        assert result["done"]


def test_no_room_in_shared_memory() -> None:
    """Where the segment has no room the buckets lie in ordinary memory, and all goes on."""
    script = """
    import allhands as dist
    import torch
    from allhands.engines import handing, shm
    from allhands.errors import fail

    def none(size, what):
        raise fail("shm-too-small", "there is no room", who="rank 0 of the group")

    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
    shm.require_room = none
    ddp = dist.DistributedDataParallel(torch.nn.Linear(300, 300))
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
