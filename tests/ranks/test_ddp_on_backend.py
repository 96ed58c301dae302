"""torch's data parallel training and its algorithms on our backend, compared with Gloo."""

from __future__ import annotations

import pytest

from ranks.against_gloo import compare

pytestmark = pytest.mark.usefixtures("nursery")

TRIALS = """from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

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

def train(ddp, steps=3, spare=lambda step: True, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 10), spare(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(ddp.state_dict().values())

def try_buffers_and_many_buckets():
    return train(DDP(Net(), bucket_cap_mb=0.001, gradient_as_bucket_view=True))

def try_unused_parameters():
    return train(DDP(Net(), find_unused_parameters=True), spare=lambda step: (step + rank) % 2 == 0)

def try_static_graph():
    return train(DDP(Net(), static_graph=True))

def try_no_sync():
    ddp = DDP(Net())
    torch.manual_seed(rank)
    with ddp.no_sync():
        ddp(torch.randn(4, 10)).sum().backward()
    alone = [p.grad.clone() for p in ddp.parameters()]
    ddp(torch.randn(4, 10)).sum().backward()
    return alone, [p.grad.clone() for p in ddp.parameters()], train(ddp)

def try_uneven_inputs():
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with ddp.join():
        for _ in range(2 + 2 * rank):
            ddp(torch.randn(4, 10)).pow(2).mean().backward()
            optimizer.step()
    return list(ddp.state_dict().values())

def try_subgroup_mesh_and_composable():
    found = []
    group, mesh = torch_dist.new_group([1, 0]), init_device_mesh("cpu", (size,))
    for spread in (lambda net: DDP(net, process_group=group), lambda net: DDP(net, device_mesh=mesh), replicate):
        torch.manual_seed(2)
        net = spread(nn.Linear(4, 4))
        net(torch.ones(2, 4) * rank).sum().backward()
        found.append([p.grad for p in net.parameters()])
    return found

def try_sparse_gradients():
    ddp = DDP(nn.Embedding(5, 3, sparse=True))
    ddp(torch.tensor([rank, 2])).sum().backward()
    return [p.grad.to_dense() for p in ddp.parameters()]

def hooked(hook, state=None, **kw):
    ddp = DDP(Net())
    ddp.register_comm_hook(state, hook)
    return train(ddp, **kw)

def try_fp16_hook():
    return hooked(default_hooks.fp16_compress_hook)

def try_bf16_hook():
    # Behind another name: under its own DDP refuses it without NCCL.
    return hooked(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))

def try_powersgd_hook():
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    found = hooked(powerSGD_hook.powerSGD_hook, state, steps=5)
    assert state.compression_stats()[0] > 1, "nothing was compressed"
    return found

def try_a_hook_of_our_own():
    def hook(state, bucket):
        work = torch_dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 4)
    return hooked(hook)

def try_zero_redundancy():
    ddp = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    found = train(ddp, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict()["state"].values() if rank == 0 else []
    return found, [value for state in states for value in state.values()]

def try_join_of_both():
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
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return train(ddp, steps=6, optimizer=PostLocalSGDOptimizer(inner, averager))

def try_averaged_models():
    torch.manual_seed(rank)
    net = nn.Linear(4, 4)
    net(torch.ones(4)).sum().backward()
    PeriodicModelAverager(period=2, warmup_steps=0).average_parameters(net.parameters())
    return list(net.parameters())
"""


def test_data_parallel_training_gives_what_gloo_gives() -> None:
    """DDP with each of its options and hooks, sharded optimisers, joins and averagers: bit for bit with two ranks."""
    found = compare(TRIALS, 2)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 15
