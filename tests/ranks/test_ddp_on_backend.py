"""torch's data parallel training and its algorithms on our backend, compared with Gloo."""

from __future__ import annotations

import pytest

from ranks.against_gloo import compare
from ranks.training import HOOKS, TORCHS

pytestmark = pytest.mark.usefixtures("fork_server")

TRIALS = (
    TORCHS
    + HOOKS
    + """
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

def try_16_bit_hooks():
    return [hooked(hook) for hook in (default_hooks.fp16_compress_hook, bf16)]

def try_zero_redundancy():
    ddp = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    found = train(ddp, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict()["state"].values() if rank == 0 else []
    return found, [value for state in states for value in state.values()]

def try_averaged_models():
    torch.manual_seed(rank)
    net = nn.Linear(4, 4)
    net(torch.ones(4)).sum().backward()
    PeriodicModelAverager(period=2, warmup_steps=0).average_parameters(net.parameters())
    return list(net.parameters())
"""
)


def test_data_parallel_training_equals_gloo() -> None:
    """DDP with each of its options and hooks, sharded optimisers, joins and averagers: bit for bit with two ranks."""
    found = compare(TRIALS, 2)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 14
