"""Source of scripts that compare DistributedDataParallel with torch's: models, training loop, cases with hooks."""

from __future__ import annotations

__all__ = ["BEGIN", "HOOKS", "TORCHS"]

_IMPORTS = """
from collections import namedtuple
from dataclasses import dataclass
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint
import torch.nn.functional as F
import torch.nn.parallel
from allhands.engines.shm import engine as shm

warnings.simplefilter("ignore", FutureWarning)
"""

_TRAINING = """
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

# torch's class on Gloo, ours on our backend.
BEGIN = (
    _IMPORTS
    + """
made = []

def DDP(*args, **kw):
    # In turn with free cores and without: buckets are reduced during backward or after it.
    made.append(64 if len(made) % 2 else 1)
    shm.cores = lambda: made[-1]
    library = torch.nn.parallel if torch_dist.get_backend() == "gloo" else dist
    return library.DistributedDataParallel(*args, **kw)
"""
    + _TRAINING
)

# torch's class on both.
TORCHS = _IMPORTS + "DDP = torch.nn.parallel.DistributedDataParallel\n" + _TRAINING

# Communication hooks and distributed optimizers, for either.
HOOKS = """
def hooked(hook, state=None, cap_mb=None, **kw):
    ddp = DDP(Net(), bucket_cap_mb=cap_mb)
    ddp.register_comm_hook(state, hook)
    return train(ddp, **kw)

# Wrapped: torch's class rejects bf16_compress_hook without NCCL.
def bf16(state, bucket):
    return default_hooks.bf16_compress_hook(state, bucket)

def try_powersgd_hook():
    if torch.cuda.is_available():
        return ["with a GPU torch's hook synchronizes it even for CPU tensors, and fails"]
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    # One bucket: with several, callbacks call Gloo in a different order on each rank, which hangs.
    found = hooked(powerSGD_hook.powerSGD_hook, state, steps=5)
    assert state.compression_stats()[0] > 1, "nothing was compressed"
    return found

def try_hook_that_returns_another_tensor():
    def hook(state, bucket):
        assert len(bucket.gradients()) == len(bucket.parameters()) and bucket.index() >= 0
        work = torch_dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 4)
    return hooked(hook), hooked(hook, cap_mb=0.001)

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
