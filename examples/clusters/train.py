"""Train a small network on any number of ranks. Every recipe here starts this script, unchanged."""

import socket

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import allhands as dist

# No rank, address or port: allhands reads them from the environment of the launcher.
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()

# Each rank generates different points; the initial network is the same on all.
torch.set_num_threads(1)
torch.manual_seed(rank)
points = torch.rand(256, 2) * 2 - 1
wanted = torch.sin(3 * points[:, :1]) * points[:, 1:]
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

losses = []
for _ in range(60):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(points), wanted)
    loss.backward()
    optimizer.step()
    everyone = loss.detach().clone()
    dist.all_reduce(everyone)
    losses.append(everyone.item() / size)

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
found = [None] * size
dist.all_gather_object(found, (socket.gethostname(), weights.sum().item()))
hosts, sums = zip(*found, strict=True)
if len(set(sums)) != 1 or losses[-1] > losses[0] / 2:
    raise SystemExit(f"rank {rank}: this did not train: losses {losses[0]:.4f} to {losses[-1]:.4f}, weights {sums}")
if rank == 0:
    print(
        f"trained: {size} ranks on {len(set(hosts))} hosts, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
        f"the same weights on every rank, backend {dist.get_backend()}"
    )
dist.destroy_process_group()
