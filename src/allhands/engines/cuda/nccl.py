"""A GPU for each rank: collectives of CUDA tensors by NCCL, after comparing the calls. And NCCL's requirements.

NCCL moves and reduces; types and reductions that it lacks are exchanged as bytes and reduced here, in rank order.
16-bit floats are summed as NCCL sums them, which rounds at each step.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ... import _torch
from ...errors import fail
from .. import transport_errors
from ..compared import Tensors, as_bytes, sizes_of
from ..dtypes import REDUCTION_NAMES, reduce_rows
from .stream import Counters, StreamEngine

__all__ = ["NcclEngine", "check_shared_memory", "gpu"]

# What NCCL's shared-memory transport takes per rank with its default buffers, rounded down: with less it fails with
# "No space left on device" in the first collective.
_SHM_BYTES_PER_RANK = 8 * 1024 * 1024

# What NCCL reduces through torch.
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_NCCL_TYPES = frozenset(_FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64})
_NCCL_OPS = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})


class NcclEngine(StreamEngine):
    """One rank's end of a group with a GPU for each rank."""

    name = "nccl"

    def __init__(self, counters: Counters, nccl: Any, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__(counters, rank, ranks, device)
        self._nccl = nccl
        self._aborting: threading.Thread | None = None

    def abort(self, rank: int) -> None:
        """Release the stream. NCCL's kernels end only by its own abort, which may take seconds: not in this thread."""
        super().abort(rank)
        if self._aborting is None:
            self._aborting = threading.Thread(target=self._nccl.abort, name="allhands-nccl-abort", daemon=True)
            self._aborting.start()

    def close(self, within_s: float) -> None:
        """Shut NCCL down and free what is shared."""
        if self._aborting is None:
            self._nccl.shutdown()
        else:
            self._aborting.join(within_s)
        super().close(within_s)

    def _run(self, issue: Callable[..., Any], *args: Any) -> None:
        """Issue an operation on NCCL's own stream, and make this one wait for it."""
        try:
            issue(*args).wait()
        except RuntimeError as problem:
            failure = transport_errors.failure_of(problem)
            if failure is None:
                raise
            raise failure from problem

    # What ComparedEngine leaves to subclasses ----------------------------------------------------------------------

    def _reduce(self, data: torch.Tensor, reduction: int, root: int | None) -> None:
        op = _native(data.dtype, reduction)
        # NCCL may leave partial sums in the memory of the other ranks.
        mine = data if root in {None, self._rank} else data.clone()
        if op is None:
            mine.copy_(reduce_rows(self._gathered(data), reduction))
        elif data.numel() and root is None:
            self._run(self._nccl.allreduce, [mine], _torch.options(dist.AllreduceOptions, reduceOp=op))
        elif data.numel():
            self._run(self._nccl.reduce, [mine], _torch.options(dist.ReduceOptions, reduceOp=op, rootRank=root))

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        if data.numel():
            self._run(self._nccl.broadcast, [data], _torch.options(dist.BroadcastOptions, rootRank=root))

    def _all_gather(self, data: torch.Tensor, parts: Tensors) -> None:
        if len(set(sizes_of(parts))) == 1:
            for part, row in zip(parts, self._gathered(data), strict=True):
                part.copy_(row)
        else:
            self._all_to_all([data] * self._size, parts)

    def _reduce_scatter(self, parts: Tensors, mine: torch.Tensor, reduction: int) -> None:
        op = _native(mine.dtype, reduction)
        if op is None:
            came = torch.empty(self._size, mine.numel(), dtype=mine.dtype, device=self.device)
            self._all_to_all([as_bytes(part) for part in parts], [as_bytes(row) for row in came])
            mine.copy_(reduce_rows(came.unbind(), reduction))
        elif mine.numel():
            options = _torch.options(dist.ReduceScatterOptions, reduceOp=op)
            self._run(self._nccl.reduce_scatter, [mine], [list(parts)], options)

    def _all_to_all(self, given: Tensors, came: Tensors) -> None:
        gives, takes = sizes_of(given), sizes_of(came)
        whole = torch.empty(sum(takes), dtype=torch.uint8, device=self.device)
        self._run(self._nccl.alltoall_base, whole, torch.cat(list(given)), takes, gives, dist.AllToAllOptions())
        for part, piece in zip(came, torch.split(whole, takes), strict=True):
            part.copy_(piece)

    def _gathered(self, data: torch.Tensor) -> Tensors:
        """Return the data of each rank."""
        came = torch.empty(self._size, data.numel(), dtype=data.dtype, device=self.device)
        if data.numel():
            self._run(_torch.gather_flat, self._nccl, as_bytes(came), as_bytes(data), _torch.AllgatherOptions())
        return came.unbind()


def _native(kind: torch.dtype, reduction: int) -> Any:
    """Return torch's name of a reduction that NCCL has, None otherwise."""
    name = REDUCTION_NAMES[reduction].removeprefix("PREMUL_")
    return getattr(dist.ReduceOp, name) if kind in _NCCL_TYPES and name in _NCCL_OPS else None


def gpu(device: torch.device | None) -> str:
    """Return the UUID of the GPU that this rank uses with NCCL, "" where it is not known yet."""
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def check_shared_memory(local_ranks: int, rank: int, path: str = "/dev/shm") -> None:  # noqa: S108
    """Raise shm-too-small where NCCL on one host would run out of shared memory."""
    try:
        free = os.statvfs(path)
    except OSError:
        return  # No such mount: NCCL then uses other transports.
    have, need = free.f_bavail * free.f_frsize, local_ranks * _SHM_BYTES_PER_RANK
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
