"""Estimate pi with as many ranks as there are."""

import torch

import allhands as dist

with dist.process_group():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    inside = (torch.rand(1_000_000, 2).norm(dim=1) < 1).sum()
    dist.all_reduce(inside)
    if rank == 0:
        print(f"pi is about {4 * inside.item() / (size * 1_000_000):.4f}; world size {size}")
