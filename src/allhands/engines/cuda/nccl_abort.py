"""NCCL: which GPU this rank would use, and whether its shared memory suffices."""

from __future__ import annotations

import os
import socket

import torch

from ...errors import fail

__all__ = ["check_shared_memory", "duplicate", "gpu"]

# What NCCL's shared-memory transport takes for one rank with its default buffers, rounded down: below this
# it fails with "No space left on device" in the middle of the first collective.
_BYTES_PER_RANK = 8 * 1024 * 1024


def gpu(device: torch.device | None) -> str:
    """Return what identifies the GPU that this rank uses with NCCL, "" where that is not settled yet."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def duplicate(problem: BaseException) -> str:
    """Return NCCL's words where it refused because ranks use one GPU, "" where ``problem`` is something else."""
    return next((line.strip() for line in str(problem).splitlines() if "Duplicate GPU detected" in line), "")


def check_shared_memory(local_ranks: int, rank: int, path: str = "/dev/shm") -> None:  # noqa: S108
    """Raise shm-too-small where NCCL on one host would run out of shared memory."""
    try:
        free = os.statvfs(path)
    except OSError:
        return  # No such mount: NCCL then uses other transports.
    have, need = free.f_bavail * free.f_frsize, local_ranks * _BYTES_PER_RANK
    if have >= need:
        return
    raise fail(
        "shm-too-small",
        f"{path} has {have / 2**20:.0f} MiB free, {local_ranks} ranks need {need / 2**20:.0f} MiB",
        who=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
        why=f"NCCL passes data between ranks of one host through {path}; containers give it 64 MiB by default",
        fix=f"start the container with --shm-size=1g (Kubernetes: an emptyDir with medium Memory on {path}), or "
        "remove what earlier jobs left there",
        ranks=(rank,),
        hosts=(socket.gethostname(),),
    )
