"""A GPU for each rank: collectives of CUDA tensors by NCCL, after comparing the calls. And NCCL's requirements.

NCCL moves and reduces; types and reductions that it lacks are exchanged as bytes and reduced here, in rank order.
16-bit floats are summed as NCCL sums them, which rounds at each step.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import _torch
from ...errors import fail
from ..base import Parts
from ..dtypes import REDUCTION_NAMES, reduce_rows
from . import nccl_errors
from .stream import Counters, StreamEngine, at

__all__ = ["NcclEngine", "check_shared_memory", "gpu"]

# What NCCL's shared-memory transport takes per rank with its default buffers, rounded down: with less it fails with
# "No space left on device" in the first collective.
_SHM_BYTES_PER_RANK = 8 * 1024 * 1024

# What NCCL reduces through torch.
_NCCL_TYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
_NCCL_OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "PREMUL_SUM": dist.ReduceOp.SUM,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
}


class NcclEngine(StreamEngine):
    """One rank's end of a group with a GPU for each rank."""

    name = "nccl"

    def __init__(self, counters: Counters, nccl: Any, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__(counters, rank, ranks, device)
        self._nccl = nccl
        self._aborting: threading.Thread | None = None

    def all_reduce(self, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int) -> None:
        """Reduce in place."""
        data = self._typed(address, nbytes, dtype)
        self._post("all_reduce", timeout_ns, nbytes, dtype=dtype, reduction=reduction)
        op = _native(data.dtype, reduction)
        if op is None:
            data.copy_(reduce_rows(self._all_gather(data), reduction))
        elif nbytes:
            self._run(self._nccl.allreduce, [data], _torch.options(dist.AllreduceOptions, reduceOp=op))
        self._end()

    def reduce(self, address: int, nbytes: int, dtype: int, reduction: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Reduce in place on the root."""
        data = self._typed(address, nbytes, dtype)
        self._post("reduce", timeout_ns, nbytes, dtype=dtype, reduction=reduction, root=root)
        op = _native(data.dtype, reduction)
        # NCCL may leave partial sums in the memory of the other ranks.
        mine = data if self._rank == root else data.clone()
        if op is None:
            mine.copy_(reduce_rows(self._all_gather(data), reduction))
        elif nbytes:
            self._run(self._nccl.reduce, [mine], _torch.options(dist.ReduceOptions, reduceOp=op, rootRank=root))
        self._end()

    def broadcast(self, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:
        """Copy the root's memory to every rank."""
        data = at(address, nbytes, self.device)
        self._post("broadcast", timeout_ns, nbytes, dtype=dtype, root=root)
        if nbytes:
            self._run(self._nccl.broadcast, [data], _torch.options(dist.BroadcastOptions, rootRank=root))
        self._end()

    def all_gather(self, address: int, nbytes: int, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy every rank's memory to every rank."""
        data, parts = at(address, nbytes, self.device), self._parts(out)
        takes = [part.numel() for part in parts]
        self._post("all_gather", timeout_ns, nbytes, [nbytes] * self._ranks, takes, dtype=dtype)
        if len(set(takes)) == 1:
            for part, row in zip(parts, self._all_gather(data), strict=True):
                part.copy_(row)
        else:
            self._all_to_all([data] * self._ranks, parts)
        self._end()

    def gather(self, address: int, nbytes: int, out: Parts | None, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy every rank's memory to the root."""
        data, parts = at(address, nbytes, self.device), self._parts(out)
        empty = data[:0]
        given = [data if rank == root else empty for rank in range(self._ranks)]
        came = parts or [empty] * self._ranks
        self._post("gather", timeout_ns, nbytes, _sizes(given), _sizes(came), dtype=dtype, root=root)
        self._all_to_all(given, came)
        self._end()

    def scatter(self, given: Parts | None, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy each part of the root's memory to its rank."""
        data = at(address, nbytes, self.device)
        empty = data[:0]
        parts = self._parts(given) or [empty] * self._ranks
        came = [data if rank == root else empty for rank in range(self._ranks)]
        self._post("scatter", timeout_ns, nbytes, _sizes(parts), _sizes(came), dtype=dtype, root=root)
        self._all_to_all(parts, came)
        self._end()

    def reduce_scatter(  # noqa: PLR0917  # what the operation takes
        self, given: Parts, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int
    ) -> None:
        """Reduce each part to the rank that it is for."""
        data, parts = self._typed(address, nbytes, dtype), self._parts(given)
        self._post("reduce_scatter", timeout_ns, nbytes, dtype=dtype, reduction=reduction)
        op = _native(data.dtype, reduction)
        if op is None:
            came = torch.empty(self._ranks, data.numel(), dtype=data.dtype, device=self.device)
            self._all_to_all(parts, [_bytes(row) for row in came])
            data.copy_(reduce_rows(came.unbind(), reduction))
        elif nbytes:
            typed = [part.view(data.dtype) for part in parts]
            self._run(
                self._nccl.reduce_scatter, [data], [typed], _torch.options(dist.ReduceScatterOptions, reduceOp=op)
            )
        self._end()

    def all_to_all(self, given: Parts, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy each part to its rank."""
        parts, came = self._parts(given), self._parts(out)
        self._post("all_to_all", timeout_ns, sum(_sizes(parts)), _sizes(parts), _sizes(came), dtype=dtype)
        self._all_to_all(parts, came)
        self._end()

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
            failure = nccl_errors.failure_of(problem)
            if failure is None:
                raise
            raise failure from problem

    def _all_gather(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the data of each rank."""
        came = torch.empty(self._ranks, data.numel(), dtype=data.dtype, device=self.device)
        if data.numel():
            options = _torch.AllgatherOptions()
            self._run(_torch.gather_flat, self._nccl, _bytes(came), _bytes(data), options)
        return came.unbind()

    def _all_to_all(self, given: Sequence[torch.Tensor], came: Sequence[torch.Tensor]) -> None:
        """Send each rank its part, and receive from each."""
        whole = torch.empty(sum(_sizes(came)), dtype=torch.uint8, device=self.device)
        self._run(
            _torch.exchange,
            self._nccl,
            whole,
            torch.cat(list(given)),
            _sizes(came),
            _sizes(given),
            dist.AllToAllOptions(),
        )
        for part, piece in zip(came, torch.split(whole, _sizes(came)), strict=True):
            part.copy_(piece)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _sizes(parts: Sequence[torch.Tensor]) -> list[int]:
    return [part.numel() for part in parts]


def _native(kind: torch.dtype, reduction: int) -> Any:
    """Return torch's name of a reduction that NCCL has, None otherwise."""
    return _NCCL_OPS.get(REDUCTION_NAMES[reduction]) if kind in _NCCL_TYPES else None


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
