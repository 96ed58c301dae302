"""What the comparisons of our DistributedDataParallel with torch's begin with: the models, and how they are trained."""

from __future__ import annotations

__all__ = ["BEGIN"]

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
from allhands.engines import shm

warnings.simplefilter("ignore", FutureWarning)

made = []

def DDP(*args, **kw):
    # In turn with cores to spare and without: buckets go while backward runs, or when it is over.
    made.append(64 if len(made) % 2 else 1)
    shm.cores = lambda: made[-1]
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
