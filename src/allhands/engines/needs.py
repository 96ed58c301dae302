"""What a backend needs on this machine, and the diagnosis where it is not here."""

from __future__ import annotations

import difflib
import os
import resource
import socket

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
    who = f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"
    try:
        for name in _names(backend):
            _check(name, world_size, who, rank)
        _check_device(device, who, rank)
        _check_descriptors(world_size, who, rank)
    except AllhandsError as problem:
        return problem.diagnosis
    return None


def _names(backend: str) -> list[str]:
    """Split ``cpu:gloo,cuda:nccl`` into the names of its backends."""
    return [part.rpartition(":")[2].strip().lower() for part in backend.split(",") if part.strip()]


def _check(name: str, world_size: int, who: str, rank: int) -> None:
    parts = {"who": who, "ranks": (rank,), "hosts": (socket.gethostname(),)}
    if name not in dist.Backend.backend_list:
        known = [known for known in dist.Backend.backend_list if known not in {"undefined", "fake"}]
        near = difflib.get_close_matches(name, known, n=1)
        raise fail(
            "backend-unknown",
            f"there is no backend {name!r}",
            why=f"this torch knows {', '.join(known)}",
            fix=f"did you mean {near[0]!r}? Pass it as backend=" if near else "pass one of these as backend=",
            **parts,
        )
    if name == "nccl":
        if not dist.is_nccl_available():
            raise fail(
                "nccl-missing",
                "nccl was asked for, but this torch was built without NCCL",
                why=f"torch {torch.__version__} has no NCCL in it (CPU and macOS builds do not)",
                fix="install a CUDA build of torch, or use backend='gloo'",
                **parts,
            )
        if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise fail(
                "gpu-missing",
                "nccl was asked for, but this process sees no GPU",
                why=f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "torch.cuda finds no device",
                fix="run where nvidia-smi shows a GPU (in a container: --gpus all), or use backend='gloo'",
                **parts,
            )
    if name == "mpi":
        why, fix = library.unavailable(world_size)
        if why:
            raise library.missing(why, who, fix, (rank,), (socket.gethostname(),))
    if name in {"ucc", "xccl"} and not dist.is_backend_available(name):
        raise fail(
            "backend-unknown",
            f"{name} was asked for, but this torch was built without it",
            why=f"torch {torch.__version__} has no {name} in it",
            fix="use backend='gloo' or 'nccl'",
            **parts,
        )


def _check_device(device: torch.device | None, who: str, rank: int) -> None:
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
        who=who,
        why=f"CUDA_VISIBLE_DEVICES={visible}"
        if visible is not None
        else f"torch.cuda finds {seen or 'no'} device" + "s" * (seen > 1),
        fix="run where nvidia-smi shows that GPU (in a container: --gpus all), or leave device_id= out and use "
        "backend='gloo'",
        ranks=(rank,),
        hosts=(socket.gethostname(),),
    )


def _enough(need: int) -> int:
    # A power of two as people write it; where the limit was lowered, systems have at least the first of them to give.
    return max(1024, 1 << (need - 1).bit_length())


def _check_descriptors(world_size: int, who: str, rank: int) -> None:
    """Every rank holds a connection to every other (Gloo's full mesh)."""
    need = world_size + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > hard != resource.RLIM_INFINITY:
        raise fail(
            "fd-limit",
            f"{world_size} ranks need {need} file descriptors in each process, the limit is {hard}",
            who=who,
            why=f"ulimit -Hn is {hard}; each rank keeps a connection to every other",
            fix=f"raise the limit before the job starts: ulimit -n {_enough(need)} (LimitNOFILE= in a service)",
            ranks=(rank,),
            hosts=(socket.gethostname(),),
        )
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
