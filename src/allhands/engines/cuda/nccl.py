"""A GPU for each rank: collectives of CUDA tensors by NCCL, after telling everyone what is called.

`Rings` has the methods of the C core's Segment, on addresses of the GPU. NCCL moves and reduces; types and reductions
that it lacks are exchanged as bytes and reduced here, in rank order. 16-bit floats are summed as NCCL sums them, which
rounds at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import _torch
from ..gloo.reduce_rows import fold
from ..shm import engine as shm
from .flags import Flags
from .lane import Lane, at

__all__ = ["Rings"]

_TYPES = {code: dtype for dtype, code in shm.DTYPES.items()}

# What NCCL reduces itself, through torch.
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

_Places = tuple[int, ...]


class Rings(Lane):
    """One rank's end of a group with a GPU for each rank. One call at a time; addresses and sizes must be right.

    Each operation returns 0 once it stands in the stream, or raises: `Difference`, or what NCCL raises.
    """

    def __init__(self, flags: Flags, nccl: Any, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__(flags, rank, ranks, device)
        self._nccl = nccl
        self._aborted = False

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:
        """Reduce to everyone."""
        data = self._typed(address, size, dtype)
        self._tell("all_reduce", limit_ns, size, dtype=dtype, reduction=reduction)
        op = _native(data.dtype, reduction)
        if op is None:
            data.copy_(fold(self._everyones(data), reduction))
        elif size:
            self._do(self._nccl.allreduce, [data], _options(dist.AllreduceOptions, reduceOp=op))
        return self._end()

    def reduce(self, address: int, size: int, dtype: int, reduction: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce to the root; the data of the others stays as it is."""
        data = self._typed(address, size, dtype)
        self._tell("reduce", limit_ns, size, dtype=dtype, reduction=reduction, root=root)
        op = _native(data.dtype, reduction)
        # NCCL may leave sums of some ranks in the tensors of the others.
        mine = data if self._rank == root else data.clone()
        if op is None:
            mine.copy_(fold(self._everyones(data), reduction))
        elif size:
            self._do(self._nccl.reduce, [mine], _options(dist.ReduceOptions, reduceOp=op, rootRank=root))
        return self._end()

    def broadcast(self, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:
        """Give the root's data to everyone."""
        data = at(address, size, self.device)
        self._tell("broadcast", limit_ns, size, dtype=dtype, root=root)
        if size:
            self._do(self._nccl.broadcast, [data], _options(dist.BroadcastOptions, rootRank=root))
        return self._end()

    def all_gather(self, address: int, size: int, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give everyone's data to everyone."""
        data, parts = at(address, size, self.device), self._parts(out)
        takes = [part.numel() for part in parts]
        self._tell("all_gather", limit_ns, size, [size] * self._ranks, takes, dtype=dtype)
        if len(set(takes)) == 1:
            for part, row in zip(parts, self._everyones(data), strict=True):
                part.copy_(row)
        else:
            self._swap([data] * self._ranks, parts)
        return self._end()

    def gather(self, address: int, size: int, out: _Places | None, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give everyone's data to the root."""
        data, parts = at(address, size, self.device), self._parts(out)
        empty = data[:0]
        given = [data if rank == root else empty for rank in range(self._ranks)]
        came = parts or [empty] * self._ranks
        self._tell("gather", limit_ns, size, _sizes(given), _sizes(came), dtype=dtype, root=root)
        self._swap(given, came)
        return self._end()

    def scatter(self, given: _Places | None, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give each rank its part of the root's data."""
        data = at(address, size, self.device)
        empty = data[:0]
        parts = self._parts(given) or [empty] * self._ranks
        came = [data if rank == root else empty for rank in range(self._ranks)]
        self._tell("scatter", limit_ns, size, _sizes(parts), _sizes(came), dtype=dtype, root=root)
        self._swap(parts, came)
        return self._end()

    def reduce_scatter(self, given: _Places, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce each part of everyone's data to the rank it is for."""
        data, parts = self._typed(address, size, dtype), self._parts(given)
        self._tell("reduce_scatter", limit_ns, size, dtype=dtype, reduction=reduction)
        op = _native(data.dtype, reduction)
        if op is None:
            came = torch.empty(self._ranks, data.numel(), dtype=data.dtype, device=self.device)
            self._swap(parts, [_bytes(row) for row in came])
            data.copy_(fold(came.unbind(), reduction))
        elif size:
            typed = [part.view(data.dtype) for part in parts]
            self._do(self._nccl.reduce_scatter, [data], [typed], _options(dist.ReduceScatterOptions, reduceOp=op))
        return self._end()

    def all_to_all(self, given: _Places, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give each rank its part of everyone's data."""
        parts, came = self._parts(given), self._parts(out)
        self._tell("all_to_all", limit_ns, sum(_sizes(parts)), _sizes(parts), _sizes(came), dtype=dtype)
        self._swap(parts, came)
        return self._end()

    def release(self) -> None:
        """Let go whatever waits in the stream: NCCL's kernels end no other way."""
        super().release()
        if not self._aborted:
            self._aborted = True
            self._nccl.abort()

    def close(self, within_s: float) -> None:
        """End NCCL's part, and let go of what is shared."""
        if not self._aborted:
            self._nccl.shutdown()
        super().close(within_s)

    # Inside ------------------------------------------------------------------------------------------------

    def _typed(self, address: int, size: int, dtype: int) -> torch.Tensor:
        return at(address, size, self.device).view(_TYPES[dtype & ~shm.COMPLEX])

    def _do(self, issue: Any, *args: Any) -> None:
        """Let NCCL do it on its own stream, and this one wait for that."""
        issue(*args).wait()

    def _everyones(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return everyone's data, by rank."""
        came = torch.empty(self._ranks, data.numel(), dtype=data.dtype, device=self.device)
        if data.numel():
            options = _torch.AllgatherOptions()
            self._do(_torch.gather_flat, self._nccl, _bytes(came), _bytes(data), options)
        return came.unbind()

    def _swap(self, given: Sequence[torch.Tensor], came: Sequence[torch.Tensor]) -> None:
        """Give each rank its part, and take what each has for this one."""
        whole = torch.empty(sum(_sizes(came)), dtype=torch.uint8, device=self.device)
        self._do(
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
    """Return torch's name for a reduction that NCCL does, None for one that it does not."""
    return _NCCL_OPS.get(shm.REDUCTION_NAMES[reduction]) if kind in _NCCL_TYPES else None


def _options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made
