"""What can be measured: how each operation is written, what its bus bandwidth means, and how many bytes it moves.

Calls are kept as the text that a user writes, because they are timed as such (`timeit`), from outside the package.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "COPIES",
    "LEAST_JUDGED",
    "OPERATIONS",
    "Operation",
    "bus_bandwidth",
    "copied_bytes",
    "copy_speed",
    "floor_s",
]

# All ranks' data together: up to this much all_reduce goes in one shot (ONE_SHOT_BYTES in csrc/all_reduce.c).
_ONE_SHOT = 64 << 10


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. S is its size as nccl-tests counts it, n the number of ranks.

    ``torch`` and ``mpi`` are the calls: one for all ranks, or one each for rank 0 and rank 1 while the others are
    idle. They find these names: ``whole`` and ``other`` (S bytes), ``parts`` and ``others`` (the same memory in n
    equal parts), ``part`` (one part), ``give`` and ``take`` (what MPI's Reduce wants of this rank). ``{group}``
    stands for the group.
    """

    torch: tuple[str, ...]
    mpi: tuple[str, ...]
    # The tensors that it needs; with ``rooted``, those of S bytes on rank 0 only.
    buffers: tuple[str, ...]
    # What the bus bandwidth is, for people and as the factor of S/t.
    bus: str
    factor: Callable[[int], float]
    # What the busiest rank loads and stores in the staged scheme, for people and as a function of S and n.
    staged: str
    moved: Callable[[int, int], float]
    rooted: bool = False
    # Calls in one of ``torch``: a round trip holds two.
    trips: int = 1

    @property
    def divided(self) -> bool:
        """Whether S is made of one part for each rank."""
        return "part" in self.buffers or "other" in self.buffers

    def size(self, wanted: int, ranks: int) -> int:
        """Return the least possible size in bytes that is not below ``wanted``: whole numbers of float32."""
        if not self.buffers:
            return 0
        unit = 4 * ranks if self.divided else 4
        return max(1, -(-wanted // unit)) * unit

    def held(self, size: int, ranks: int) -> float:
        """Return how many bytes of tensors a rank holds for one of ``size`` bytes (the root's, where they differ)."""
        return sum(size / ranks if name == "part" else size for name in self.buffers)


def _reduced(size: int, ranks: int) -> float:
    return (ranks + 3) * size if ranks * size <= _ONE_SHOT else (5 - 2 / ranks) * size


_REDUCED = "(5 - 2/n) S, (n + 3) S where n S is at most 64 KiB"
_SHARE = "(n-1)/n S/t"


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(_: int) -> float:
    return 1.0


def _twice(size: int, _: int) -> float:
    return 2.0 * size


_GATHERED = {
    "buffers": ("part", "whole"),
    "bus": _SHARE,
    "factor": _share,
    "staged": "(2 + 2/n) S",
    "moved": lambda size, ranks: (2 + 2 / ranks) * size,
}
_SCATTERED = {
    "buffers": ("part", "whole"),
    "bus": _SHARE,
    "factor": _share,
    "staged": "(3 - 1/n) S",
    "moved": lambda size, ranks: (3 - 1 / ranks) * size,
}
_EXCHANGED = {
    "buffers": ("whole", "other"),
    "bus": _SHARE,
    "factor": _share,
    "staged": "4 S",
    "moved": lambda size, _: 4.0 * size,
}

OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        torch=("dist.all_reduce(whole{group})",),
        mpi=("comm.Allreduce(MPI.IN_PLACE, whole)",),
        buffers=("whole",),
        bus="2 (n-1)/n S/t",
        factor=lambda ranks: 2 * _share(ranks),
        staged=_REDUCED,
        moved=_reduced,
    ),
    "reduce": Operation(
        torch=("dist.reduce(whole, dst=0{group})",),
        mpi=("comm.Reduce(give, take, root=0)",),
        buffers=("whole",),
        bus="S/t",
        factor=_one,
        staged=_REDUCED,
        moved=_reduced,
    ),
    "broadcast": Operation(
        torch=("dist.broadcast(whole, src=0{group})",),
        mpi=("comm.Bcast(whole, root=0)",),
        buffers=("whole",),
        bus="S/t",
        factor=_one,
        staged="2 S",
        moved=_twice,
    ),
    "all_gather": Operation(
        torch=("dist.all_gather(parts, part{group})",),
        mpi=("comm.Allgather(part, whole)",),
        **_GATHERED,  # type: ignore[arg-type]  # a dict of mixed values
    ),
    "all_gather_into_tensor": Operation(
        torch=("dist.all_gather_into_tensor(whole, part{group})",),
        mpi=("comm.Allgather(part, whole)",),
        **_GATHERED,  # type: ignore[arg-type]
    ),
    "gather": Operation(
        torch=("dist.gather(part, parts, dst=0{group})",),
        mpi=("comm.Gather(part, whole, root=0)",),
        buffers=("part", "whole"),
        bus=_SHARE,
        factor=_share,
        staged="2 S",
        moved=_twice,
        rooted=True,
    ),
    "scatter": Operation(
        torch=("dist.scatter(part, parts, src=0{group})",),
        mpi=("comm.Scatter(whole, part, root=0)",),
        buffers=("part", "whole"),
        bus=_SHARE,
        factor=_share,
        staged="2 S",
        moved=_twice,
        rooted=True,
    ),
    "reduce_scatter": Operation(
        torch=("dist.reduce_scatter(part, parts{group})",),
        mpi=("comm.Reduce_scatter_block(whole, part)",),
        **_SCATTERED,  # type: ignore[arg-type]
    ),
    "reduce_scatter_tensor": Operation(
        torch=("dist.reduce_scatter_tensor(part, whole{group})",),
        mpi=("comm.Reduce_scatter_block(whole, part)",),
        **_SCATTERED,  # type: ignore[arg-type]
    ),
    "all_to_all": Operation(
        torch=("dist.all_to_all(others, parts{group})",),
        mpi=("comm.Alltoall(whole, other)",),
        **_EXCHANGED,  # type: ignore[arg-type]
    ),
    "all_to_all_single": Operation(
        torch=("dist.all_to_all_single(other, whole{group})",),
        mpi=("comm.Alltoall(whole, other)",),
        **_EXCHANGED,  # type: ignore[arg-type]
    ),
    "send_recv": Operation(
        torch=(
            "dist.send(whole, dst=1{group}); dist.recv(whole, src=1{group})",
            "dist.recv(whole, src=0{group}); dist.send(whole, dst=0{group})",
        ),
        mpi=(
            "comm.Send(whole, dest=1); comm.Recv(whole, source=1)",
            "comm.Recv(whole, source=0); comm.Send(whole, dest=0)",
        ),
        buffers=("whole",),
        bus="S/t",
        factor=_one,
        staged="2 S",
        moved=_twice,
        trips=2,
    ),
    "barrier": Operation(
        torch=("dist.barrier({group})",),
        mpi=("comm.Barrier()",),
        buffers=(),
        bus="none: it moves no data",
        factor=lambda _: 0.0,
        staged="none: it moves no data",
        moved=lambda _size, _ranks: 0.0,
    ),
}


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes per second, as nccl-tests defines it."""
    return OPERATIONS[operation].factor(ranks) * size / seconds


# Floor ------------------------------------------------------------------------------------------------------

# The two copies that are timed, and whether all ranks that take part make them at the same time (STREAM's way) or
# rank 0 alone.
COPIES = {"memcpy": False, "stream": True}

# Below this a copy is mostly the call of it, so its speed is that of a copy of this size, which every core's cache
# holds twice.
_LEAST_COPIED = 64 << 10

# Below this an operation is mostly meetings and calls: how many times the floor it takes says nothing.
LEAST_JUDGED = 64 << 10


def copied_bytes(size: int) -> int:
    """Return how many bytes a copy moves from one place to another to find the floor of ``size`` bytes."""
    return max(size, _LEAST_COPIED)


def copy_speed(size: int, seconds: float) -> float:
    """Return what a copy in ``seconds`` loads and stores, in bytes per second: each byte counts twice."""
    return 2 * copied_bytes(size) / seconds


def floor_s(operation: str, ranks: int, size: int, stream_s: float) -> float:
    """Return the floor in seconds, where ``ranks`` copies at the same time took ``stream_s`` each."""
    return OPERATIONS[operation].moved(size, ranks) / copy_speed(size, stream_s)
