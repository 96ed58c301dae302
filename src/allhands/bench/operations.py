"""The operations: the call of each in torch and MPI, its bus bandwidth, and the bytes that it moves. Needs no torch.

A call is kept as the text that a user writes, because `timeit` compiles it: no function of this package is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "COPIES",
    "LEAST_JUDGED",
    "OPERATIONS",
    "Formula",
    "Operation",
    "bus_bandwidth",
    "copied_bytes",
    "copy_speed",
    "floor_s",
]

# Up to this many bytes of all ranks together every rank reads all data (ONE_SHOT_BYTES in
# csrc/collectives/all_reduce.c).
_ONE_SHOT = 64 << 10


class Formula(NamedTuple):
    """Bytes as a function of S and n: for people, and to compute with. A bus bandwidth is its value over t."""

    text: str
    value: Callable[[int, int], float]


class Operation(NamedTuple):
    """One operation. S is its size as nccl-tests counts it, n the number of ranks.

    ``torch`` and ``mpi`` are the calls. Their names: ``whole`` and ``other`` (S bytes), ``parts`` and ``others`` (the
    same memory in n equal parts), ``part`` (one part), ``give`` and ``take`` (the buffers of MPI's Reduce on this
    rank), ``{group}`` (the argument that selects the group).
    """

    torch: str
    mpi: str
    # The tensors: the input first, the output last.
    buffers: tuple[str, ...]
    bus: Formula
    # What the busiest rank loads and stores in the staged scheme.
    staged: Formula
    # The output is the "sum" of all inputs, the input of the "root", or a part of "each" rank's input.
    result: str
    # How many ranks, from rank 0 on, have an output; 0: all.
    receivers: int = 0
    # Tensors of S bytes are on rank 0 only.
    rooted: bool = False
    # The calls of rank 1 in torch and MPI in a round trip between ranks 0 and 1; the other ranks are idle.
    replies: tuple[str, str] | None = None

    @property
    def divided(self) -> bool:
        """Whether S is made of one part for each rank."""
        return "part" in self.buffers or "other" in self.buffers

    @property
    def trips(self) -> int:
        """The number of messages in one call: two in a round trip."""
        return 2 if self.replies else 1

    def calls(self, rank: int) -> tuple[str, str]:
        """Return the calls of ``rank`` in torch and MPI; "" where it is idle."""
        if self.replies is None or rank == 0:
            return self.torch, self.mpi
        return self.replies if rank == 1 else ("", "")

    def size(self, wanted: int, ranks: int) -> int:
        """Return the smallest possible size in bytes that is not below ``wanted``: whole numbers of float32."""
        if not self.buffers:
            return 0
        unit = 4 * ranks if self.divided else 4
        return max(1, -(-wanted // unit)) * unit

    def held(self, size: int, ranks: int) -> float:
        """Return the bytes of a rank's tensors for one call of ``size`` bytes (the root's, where they differ)."""
        return sum(size / ranks if name == "part" else size for name in self.buffers)


_NONE = Formula("none: it moves no data", lambda _size, _n: 0.0)
_PLAIN = Formula("S/t", lambda size, _: 1.0 * size)
_SHARE = Formula("(n-1)/n S/t", lambda size, n: (n - 1) / n * size)
_TWO_SHARES = Formula("2 (n-1)/n S/t", lambda size, n: 2 * (n - 1) / n * size)

_TWICE = Formula("2 S", lambda size, _: 2.0 * size)
_GATHERED = Formula("(2 + 2/n) S", lambda size, n: (2 + 2 / n) * size)
_SCATTERED = Formula("(3 - 1/n) S", lambda size, n: (3 - 1 / n) * size)
_EXCHANGED = Formula("4 S", lambda size, _: 4.0 * size)
_REDUCED = Formula(
    "(5 - 2/n) S, (n + 3) S where n S is at most 64 KiB",
    lambda size, n: (n + 3) * size if n * size <= _ONE_SHOT else (5 - 2 / n) * size,
)

# Buffers, bus bandwidth, staged bytes, result.
_ALL_GATHER = (("part", "whole"), _SHARE, _GATHERED, "each")
_REDUCE_SCATTER = (("whole", "part"), _SHARE, _SCATTERED, "sum")
_ALL_TO_ALL = (("whole", "other"), _SHARE, _EXCHANGED, "each")
_GATHER = (("part", "whole"), _SHARE, _TWICE, "each")
_SCATTER = (("whole", "part"), _SHARE, _TWICE, "root")
_ALL_REDUCE = (("whole",), _TWO_SHARES, _REDUCED, "sum")
_REDUCE = (("whole",), _PLAIN, _REDUCED, "sum")
_BROADCAST = (("whole",), _PLAIN, _TWICE, "root")

OPERATIONS = {
    "all_reduce": Operation("dist.all_reduce(whole{group})", "comm.Allreduce(MPI.IN_PLACE, whole)", *_ALL_REDUCE),
    "reduce": Operation("dist.reduce(whole, dst=0{group})", "comm.Reduce(give, take, root=0)", *_REDUCE, receivers=1),
    "broadcast": Operation("dist.broadcast(whole, src=0{group})", "comm.Bcast(whole, root=0)", *_BROADCAST),
    "all_gather": Operation("dist.all_gather(parts, part{group})", "comm.Allgather(part, whole)", *_ALL_GATHER),
    "all_gather_into_tensor": Operation(
        "dist.all_gather_into_tensor(whole, part{group})", "comm.Allgather(part, whole)", *_ALL_GATHER
    ),
    "gather": Operation(
        "dist.gather(part, parts, dst=0{group})", "comm.Gather(part, whole, root=0)", *_GATHER, rooted=True
    ),
    "scatter": Operation(
        "dist.scatter(part, parts, src=0{group})", "comm.Scatter(whole, part, root=0)", *_SCATTER, rooted=True
    ),
    "reduce_scatter": Operation(
        "dist.reduce_scatter(part, parts{group})", "comm.Reduce_scatter_block(whole, part)", *_REDUCE_SCATTER
    ),
    "reduce_scatter_tensor": Operation(
        "dist.reduce_scatter_tensor(part, whole{group})", "comm.Reduce_scatter_block(whole, part)", *_REDUCE_SCATTER
    ),
    "all_to_all": Operation("dist.all_to_all(others, parts{group})", "comm.Alltoall(whole, other)", *_ALL_TO_ALL),
    "all_to_all_single": Operation(
        "dist.all_to_all_single(other, whole{group})", "comm.Alltoall(whole, other)", *_ALL_TO_ALL
    ),
    "send_recv": Operation(
        "dist.send(whole, dst=1{group}); dist.recv(whole, src=1{group})",
        "comm.Send(whole, dest=1); comm.Recv(whole, source=1)",
        *_BROADCAST,
        receivers=2,
        replies=(
            "dist.recv(whole, src=0{group}); dist.send(whole, dst=0{group})",
            "comm.Recv(whole, source=0); comm.Send(whole, dest=0)",
        ),
    ),
    "barrier": Operation("dist.barrier({group})", "comm.Barrier()", (), _NONE, _NONE, "none"),
}


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes per second, as nccl-tests defines it."""
    return OPERATIONS[operation].bus.value(size, ranks) / seconds


# Floor ------------------------------------------------------------------------------------------------------

# The two copies that are timed: name -> whether all ranks that take part copy at the same time (as STREAM does) or
# rank 0 alone.
COPIES = {"memcpy": False, "stream": True}

# A smaller copy measures the call of memcpy; one of this size is in the caches of every core, both ends of it.
_LEAST_COPIED = 64 << 10

# A smaller operation consists mostly of synchronisation and calls, so its ratio to the floor is not printed.
LEAST_JUDGED = 64 << 10


def copied_bytes(size: int) -> int:
    """Return the size of the copy that is timed for the floor of ``size`` bytes."""
    return max(size, _LEAST_COPIED)


def copy_speed(size: int, seconds: float) -> float:
    """Return the bytes per second that a copy in ``seconds`` loads and stores: each byte counts twice."""
    return 2 * copied_bytes(size) / seconds


def floor_s(operation: str, ranks: int, size: int, stream_s: float) -> float:
    """Return the floor in seconds, where ``ranks`` copies at the same time took ``stream_s`` each."""
    return OPERATIONS[operation].staged.value(size, ranks) / copy_speed(size, stream_s)
