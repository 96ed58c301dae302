"""What a backend needs on this machine, and the diagnosis where it is not here."""

from __future__ import annotations

import difflib
import os
import resource
import socket
from typing import Any

import torch
import torch.distributed as dist

from ..diagnosis import Diagnosis
from ..errors import AllhandsError, fail
from .mpi import library

__all__ = ["needs"]

# Descriptors that an ordinary Python process with torch has open besides its connections.
_SPARE_DESCRIPTORS = 64


def needs(backend: str, world_size: int, rank: int, device: torch.device | None = None) -> Diagnosis | None:
    """Return what ``backend`` (in torch's spelling) or ``device`` lacks on this machine, None where nothing is."""
    here: dict[str, Any] = {
        "who": f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
        "ranks": (rank,),
        "hosts": (socket.gethostname(),),
    }
    try:
        # Of ``cpu:gloo,cuda:nccl`` the names.
        for part in filter(str.strip, backend.split(",")):
            _check(part.rpartition(":")[2].strip().lower(), world_size, here)
        _check_device(device, here)
        _check_descriptors(world_size, here)
    except AllhandsError as problem:
        return problem.diagnosis
    return None


def _check(name: str, world_size: int, here: dict[str, Any]) -> None:
    if name not in dist.Backend.backend_list:
        known = [known for known in dist.Backend.backend_list if known not in {"undefined", "fake"}]
        near = difflib.get_close_matches(name, known, n=1)
        raise fail(
            "backend-unknown",
            f"there is no backend {name!r}",
            why=f"this torch knows {', '.join(known)}",
            fix=f"did you mean {near[0]!r}? Pass it as backend=" if near else "pass one of these as backend=",
            **here,
        )
    if name == "nccl":
        if not dist.is_nccl_available():
            raise fail(
                "nccl-missing",
                "nccl was asked for, but this torch was built without NCCL",
                why=f"torch {torch.__version__} has no NCCL in it (CPU and macOS builds do not)",
                fix="install a CUDA build of torch, or use backend='gloo'",
                **here,
            )
        if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise fail(
                "gpu-missing",
                "nccl was asked for, but this process sees no GPU",
                why=f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "torch.cuda finds no device",
                fix="run where nvidia-smi shows a GPU (in a container: --gpus all), or use backend='gloo'",
                **here,
            )
    if name == "mpi":
        why, fix = library.unavailable(world_size)
        if why:
            raise library.missing(why, fix, **here)
    if name in {"ucc", "xccl"} and not dist.is_backend_available(name):
        raise fail(
            "backend-unknown",
            f"{name} was asked for, but this torch was built without it",
            why=f"torch {torch.__version__} has no {name} in it",
            fix="use backend='gloo' or 'nccl'",
            **here,
        )


def _check_device(device: torch.device | None, here: dict[str, Any]) -> None:
    """A GPU that was asked for by device_id= must be there; torch itself looks only after every rank has come."""
    if device is None or device.type != "cuda":
        return
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) < seen:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise fail(
        "gpu-missing",
        f"device_id={device} was asked for, but this process sees {f'only {seen} GPUs' if seen else 'no GPU'}",
        why=f"CUDA_VISIBLE_DEVICES={visible}"
        if visible is not None
        else f"torch.cuda finds {seen or 'no'} device" + "s" * (seen > 1),
        fix="run where nvidia-smi shows that GPU (in a container: --gpus all), or leave device_id= out and use "
        "backend='gloo'",
        **here,
    )


def _check_descriptors(world_size: int, here: dict[str, Any]) -> None:
    """Every rank holds a connection to every other (Gloo's full mesh)."""
    need = world_size + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > hard != resource.RLIM_INFINITY:
        # A power of two as people write it; where the limit was lowered, systems have at least 1024 to give.
        enough = max(1024, 1 << (need - 1).bit_length())
        raise fail(
            "fd-limit",
            f"{world_size} ranks need {need} file descriptors in each process, the limit is {hard}",
            why=f"ulimit -Hn is {hard}; each rank keeps a connection to every other",
            fix=f"raise the limit before the job starts: ulimit -n {enough} (LimitNOFILE= in a service)",
            **here,
        )
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
