"""One GPU, many ranks: collectives of CUDA tensors through memory of the GPU that all processes have mapped (CUDA IPC).

`CudaIpcEngine` puts copies, reductions and waits for the other ranks into a stream, and returns. Ranks meet on the
GPU, by counters that one stream writes and another waits for (`stream.Counters`), never on the host.

Each call has a number, the same on every rank, and takes rounds, as many as the rank's data needs. Round ``r`` of call
``c`` has the value ``c * _STRIDE + r + 1``; the end of the call ``(c + 1) * _STRIDE``. So a rank with fewer rounds than
another does not delay it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import Store

from ..compared import Tensors, as_bytes, sizes_of
from ..dtypes import REDUCTION_NAMES, reduce_rows
from . import driver
from .stream import BROUGHT, CONSUMED, REDUCED, Counters, StreamEngine, at, first_problem

__all__ = ["CudaIpcEngine", "form"]

# The maximum of rounds of a call: more than the largest GPU has memory for.
_STRIDE = 1 << 20

# How often rank 0 polls whether the others have unmapped the memory.
_POLL_S = 0.002

# Pieces are multiples of this many bytes, so that a piece of any type is aligned.
_LINE = 256

# Reducing in two steps, each rank its slice and then a copy of all slices, reads fewer bytes than reducing everything
# on each rank, and makes the GPU switch between processes once more, which takes as long as moving this many bytes.
_SWITCH_BYTES = 384 << 20

_SUMS = frozenset(REDUCTION_NAMES.index(name) for name in ("SUM", "PREMUL_SUM"))
# Types that torch.sum adds as the C core does: 16-bit floats in 32 bits, rounded once.
_ADDED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64})

# The first size of a row: enough for most models, and 72 MiB in all for eight ranks.
_MIN_ROW_BYTES = 4 << 20

# Larger rows are not faster: the GPU switches between processes in some 0.1 ms, as long as it takes to move this much.
_MAX_ROW_BYTES = 256 << 20

# All rows of a group take at most this fraction (1/n) of the GPU's memory: the rest is the model's.
_SHARE = 32

# Two sets of rows alternate, so that data of the next call is written while other ranks still read the last.
_SETS = 2


class _Rows:
    """Memory of the GPU with a row per rank and one for the result. Rank 0 allocates it, the others map it."""

    def __init__(self, store: Store, rank: int, ranks: int, device: torch.device) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._number = 0
        self._address = 0
        # On rank 0: memory that was replaced, which other ranks may still have mapped.
        self._outgrown: list[int] = []
        self.row_bytes = 0
        self.rows: list[torch.Tensor] = []
        self._most = min(_MAX_ROW_BYTES, torch.cuda.get_device_properties(device).total_memory // _SHARE // ranks)

    def fits(self, size: int) -> bool:
        """Return whether a row holds ``size`` bytes, or cannot grow."""
        return size <= self.row_bytes or self.row_bytes >= self._most

    def grow(self, size: int) -> str:
        """Replace the rows by ones that hold ``size`` bytes, or the maximum. Every rank calls this with the same size.

        Returns why that failed on some rank, the same on all ranks; the rows do not change then.
        """
        wanted = max(_MIN_ROW_BYTES, 1 << max(0, size - 1).bit_length())
        row_bytes = min(wanted, self._most) // 256 * 256
        total = row_bytes * (self._ranks + 1) * _SETS
        self._number += 1
        address, problem_text = 0, ""
        try:
            address = self._map(total)
        except (driver.DriverError, RuntimeError) as problem:
            problem_text = str(problem) or type(problem).__name__
        problem_text = first_problem(self._store, f"rows/{self._number}/rank", self._rank, self._ranks, problem_text)
        if problem_text:
            # Not tried again.
            self._most = self.row_bytes
            if address:
                self._unmap(address)
            return problem_text
        if self._address:
            self._unmap(self._address)
        self._address, self.row_bytes = address, row_bytes
        whole = at(address, total, self._device).view(_SETS, self._ranks + 1, row_bytes)
        self.rows = list(whole.unbind())
        return ""

    def _map(self, total: int) -> int:
        key = f"rows/{self._number}"
        if self._rank:
            handle = bytes.fromhex(self._store.get(key).decode())
            if not handle:
                raise driver.DriverError("rank 0 has no memory")  # Its own problem is the first, and reported.
            return driver.open_handle(handle)
        address, handle = 0, b""
        try:
            address = driver.allocate(total)
            handle = driver.export_handle(address)
        except driver.DriverError:
            if address:
                driver.free(address)
            raise
        finally:
            self._store.set(key, handle.hex())
        return address

    def _unmap(self, address: int) -> None:
        if self._rank:
            driver.close_handle(address)
        else:
            self._outgrown.append(address)

    def close(self) -> None:
        """Unmap the memory, once this rank's stream is empty. Rank 0 still owns it (`free`)."""
        self.rows = []
        if self._address:
            self._unmap(self._address)
        self._address = 0

    def free(self) -> None:
        """Free the memory, on rank 0, once all ranks have unmapped it."""
        while self._outgrown:
            driver.free(self._outgrown.pop())


class CudaIpcEngine(StreamEngine):
    """One rank's end of a group on one GPU."""

    name = "cuda_ipc"

    def __init__(self, counters: Counters, rows: _Rows, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__(counters, rank, ranks, device)
        self._buffers = rows
        # By set: the CONSUMED value that every other rank must reach before this rank overwrites its row.
        self._need = [0, 0]

    # What ComparedEngine leaves to subclasses ----------------------------------------------------------------------

    def _reduce(self, data: torch.Tensor, reduction: int, root: int | None) -> None:
        self._grow(data.nbytes)
        apart = root is None and data.nbytes * (self._size - 2) > _SWITCH_BYTES
        for number, piece in enumerate(_cut(as_bytes(data), self._buffers.row_bytes)):
            rows = self._bring(number, [(0, piece)])
            if root in {None, self._rank}:
                self._wait(BROUGHT, number)
                if apart:
                    self._reduce_apart(rows, piece, number, data.dtype, reduction)
                else:
                    self._reduce_into(rows[: self._size, : piece.numel()], piece, data.dtype, reduction)
            self._signal(CONSUMED, number)

    def _reduce_apart(
        self, rows: torch.Tensor, piece: torch.Tensor, number: int, kind: torch.dtype, reduction: int
    ) -> None:
        """Reduce this rank's slice of a piece, and copy the slices that the other ranks reduced."""
        size = piece.numel()
        each = -(-size // self._size // _LINE) * _LINE
        begin, end = min(size, self._rank * each), min(size, (self._rank + 1) * each)
        if end > begin:
            self._reduce_into(rows[: self._size, begin:end], rows[self._size, begin:end], kind, reduction)
        self._signal(REDUCED, number)
        self._wait(REDUCED, number)
        piece.copy_(rows[self._size, :size])

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        self._grow(data.nbytes)
        for number, piece in enumerate(_cut(data, self._buffers.row_bytes)):
            if self._rank == root:
                self._bring(number, [(0, piece)])
            else:
                self._wait(BROUGHT, number, [root])
                piece.copy_(self._rows(number)[root, : piece.numel()])
            self._signal(CONSUMED, number)

    def _all_gather(self, data: torch.Tensor, parts: Tensors) -> None:
        self._grow(max(sizes_of(parts)))
        parts[self._rank].copy_(data)
        self._exchange([(0, data)], [(rank, 0, part) for rank, part in enumerate(parts)], self._buffers.row_bytes)

    def _gather(self, given: Tensors, came: Tensors, root: int) -> None:
        mine = self._rank == root
        if mine:
            came[root].copy_(given[root])
        takes = [(rank, 0, part) for rank, part in enumerate(came)]
        self._exchange([] if mine else [(0, given[root])], takes, self._buffers.row_bytes)

    def _reduce_scatter(self, parts: Tensors, mine: torch.Tensor, reduction: int) -> None:
        self._grow(mine.nbytes * self._size)
        share = self._share()
        for number, piece in enumerate(_cut(as_bytes(mine), share)):
            rows = self._bring(
                number, [(rank * share, _piece(as_bytes(part), number, share)) for rank, part in enumerate(parts)]
            )
            self._wait(BROUGHT, number)
            begin = self._rank * share
            self._reduce_into(rows[: self._size, begin : begin + piece.numel()], piece, mine.dtype, reduction)
            self._signal(CONSUMED, number)

    def _all_to_all(self, given: Tensors, came: Tensors) -> None:
        share, own = self._share(), self._rank
        if given[own].numel() == came[own].numel():
            came[own].copy_(given[own])
        gives = [(rank * share, part) for rank, part in enumerate(given) if rank != own]
        self._exchange(gives, [(rank, own * share, part) for rank, part in enumerate(came)], share)

    def _exchange(
        self, gives: Sequence[tuple[int, torch.Tensor]], takes: Sequence[tuple[int, int, torch.Tensor]], each: int
    ) -> None:
        """Bring ``gives`` (place in the row, data) and copy ``takes`` (rank, place in its row, data) of other ranks.

        In rounds, of at most ``each`` bytes of each.
        """
        takes = [take for take in takes if take[0] != self._rank]
        parts = [part for _, part in gives] + [part for _, _, part in takes]
        for number in range(_rounds(max(sizes_of(parts), default=0), each)):
            pieces = [(begin, _piece(part, number, each)) for begin, part in gives]
            pieces = [piece for piece in pieces if piece[1].numel()]
            if pieces:
                self._bring(number, pieces)
            wanted = [(rank, begin, _piece(part, number, each)) for rank, begin, part in takes]
            wanted = [piece for piece in wanted if piece[2].numel()]
            if wanted:
                self._wait(BROUGHT, number, [rank for rank, _, _ in wanted])
            rows = self._rows(number)
            for rank, begin, piece in wanted:
                piece.copy_(rows[rank, begin : begin + piece.numel()])
            self._signal(CONSUMED, number)

    # Room -----------------------------------------------------------------------------------------------

    def _grow(self, size: int) -> None:
        """Grow the rows for a larger call: every rank makes the same call, so every rank grows them."""
        if self._buffers.fits(size):
            return
        self._meet()
        self.stream.synchronize()
        if not self._buffers.grow(size):
            self._need = [0, 0]

    # In the stream -----------------------------------------------------------------------------------------

    def _rows(self, number: int) -> torch.Tensor:
        return self._buffers.rows[(self._sequence + number) % 2]

    def _share(self) -> int:
        """Return the bytes of a row for each rank."""
        return self._buffers.row_bytes // self._size // _LINE * _LINE

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _bring(self, number: int, pieces: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Copy ``pieces`` into this rank's row, once no rank reads its old content, and signal it; return the rows."""
        index = (self._sequence + number) % 2
        need = self._need[index]
        driver.batch_memory_ops(
            self.stream.cuda_stream, waits=[(self.counters.address(CONSUMED, rank), need) for rank in self._others()]
        )
        rows = self._buffers.rows[index]
        for begin, piece in pieces:
            rows[self._rank, begin : begin + piece.numel()].copy_(piece)
        self._need[index] = self._value(number)
        self._signal(BROUGHT, number)
        return rows

    def _reduce_into(self, rows: torch.Tensor, out: torch.Tensor, kind: torch.dtype, reduction: int) -> None:
        given, made = rows.view(kind), out.view(kind)
        if reduction in _SUMS and kind in _ADDED:
            if self._size == 2:
                torch.add(given[0], given[1], out=made)
            else:
                torch.sum(given, 0, dtype=kind, out=made)
        else:
            made.copy_(reduce_rows(given.unbind(), reduction))

    def _value(self, number: int) -> int:
        return self._sequence * _STRIDE + number + 1

    def _signal(self, counter: int, number: int) -> None:
        place = self.counters.address(counter, self._rank)
        driver.batch_memory_ops(self.stream.cuda_stream, write=(place, self._value(number)))

    def _wait(self, counter: int, number: int, ranks: Sequence[int] | None = None) -> None:
        ranks = self._others() if ranks is None else ranks
        value = self._value(number)
        driver.batch_memory_ops(
            self.stream.cuda_stream, waits=[(self.counters.address(counter, rank), value) for rank in ranks]
        )

    def _end(self) -> None:
        super()._end()
        place = self.counters.address(CONSUMED, self._rank)
        driver.batch_memory_ops(self.stream.cuda_stream, write=(place, self._sequence * _STRIDE))

    def close(self, within_s: float) -> None:
        """Free the memory of the GPU, once the stream is empty.

        Rank 0 frees it once the others have unmapped it; after ``within_s`` it leaves that to the end of the process,
        because freeing memory that another process has mapped is undefined.
        """
        driver.enter(self._context)
        self._buffers.close()
        self.counters.mark_closed()
        until = time.monotonic() + within_s
        while self._rank == 0 and not self.counters.all_closed() and time.monotonic() < until:
            time.sleep(_POLL_S)
        if self.counters.all_closed():
            self._buffers.free()
        super().close(within_s)


def form(counters: Counters, store: Store, rank: int, ranks: int, device: torch.device) -> CudaIpcEngine | str:
    """Create the memory that ranks on one ``device`` share. Every rank of the group calls this.

    Returns why that is not possible, the same on every rank, where the driver or the container does not allow it.
    """
    rows = _Rows(store, rank, ranks, device)
    return rows.grow(0) or CudaIpcEngine(counters, rows, rank, ranks, device)


def _rounds(size: int, each: int) -> int:
    return -(-size // each)


def _piece(data: torch.Tensor, number: int, each: int) -> torch.Tensor:
    return data[number * each : (number + 1) * each]


def _cut(data: torch.Tensor, each: int) -> list[torch.Tensor]:
    return [_piece(data, number, each) for number in range(_rounds(data.numel(), each))]
