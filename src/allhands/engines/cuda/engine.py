"""One GPU, many ranks: collectives of CUDA tensors through memory of the GPU that all processes have mapped.

A `Card` has the methods of the C core's Segment, on addresses of the GPU, and does nothing itself: it puts copies,
reductions and waits for the other ranks into a stream, and returns. Ranks meet on the GPU, by numbers that a stream
writes and another waits for (`engines.flags`), never on the host.

Each call has a number, the same on every rank, and goes by rounds, as many as a rank has data for. Round ``r`` of call
``c`` is the number ``c * _STRIDE + r + 1``; the end of the call is ``(c + 1) * _STRIDE``. So a rank with fewer rounds
than another keeps nobody waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import Store

from ..gloo.reduce_rows import fold
from ..shm import engine as shm
from . import driver
from .buffers import Arena
from .flags import BROUGHT, FOLDED, LEFT, Flags
from .lane import Lane, at

__all__ = ["Card", "form"]

# Rounds that a call may have: more than the largest GPU has memory for.
_STRIDE = 1 << 20

# How often to look whether the others have let go of the memory.
_LOOK_S = 0.002

# Bytes of a piece end on such a line, so that each piece of any type begins on one.
_LINE = 256

# Reducing in two steps, each rank its part and then everyone all parts, reads fewer bytes than each rank reducing all
# of it, and makes the GPU switch between the processes once more: as long as it takes to move this many bytes.
_SWITCH_BYTES = 384 << 20

_TYPES = {code: dtype for dtype, code in shm.DTYPES.items()}
_SUMS = frozenset(shm.REDUCTION_NAMES.index(name) for name in ("SUM", "PREMUL_SUM"))
# What torch adds on a GPU as the C core does: 16-bit floats in 32 bits, rounded once.
_ADDED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64})

_Places = tuple[int, ...]


class Card(Lane):
    """One rank's end of a group on one GPU. One call at a time; addresses and sizes must be right.

    Each operation returns 0 once it stands in the stream, or raises: `Difference`, or what the driver raises.
    """

    def __init__(self, flags: Flags, arena: Arena, rank: int, ranks: int, device: torch.device) -> None:
        super().__init__(flags, rank, ranks, device)
        self._arena = arena
        # By turn of the rows: the number that everyone has written who has left what this rank put there last.
        self._need = [0, 0]

    # The operations of the core ----------------------------------------------------------------------------

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:
        """Reduce to everyone."""
        data = at(address, size, self.device)
        self._tell("all_reduce", limit_ns, size, dtype=dtype, reduction=reduction)
        self._make_room(size, limit_ns)
        apart = size * (self._ranks - 2) > _SWITCH_BYTES
        for number, piece in enumerate(_cut(data, self._arena.row_bytes)):
            rows = self._bring(number, [(0, piece)])
            self._wait(BROUGHT, number)
            if apart:
                self._reduce_apart(rows, piece, number, dtype, reduction)
            else:
                self._fold(rows[: self._ranks, : piece.numel()], piece, dtype, reduction)
            self._leave(number)
        return self._end()

    def _reduce_apart(self, rows: torch.Tensor, piece: torch.Tensor, number: int, dtype: int, reduction: int) -> None:
        """Reduce this rank's part of a piece for everyone, and take the parts that the others reduced."""
        size = piece.numel()
        each = -(-size // self._ranks // _LINE) * _LINE
        begin, end = min(size, self._rank * each), min(size, (self._rank + 1) * each)
        if end > begin:
            self._fold(rows[: self._ranks, begin:end], rows[self._ranks, begin:end], dtype, reduction)
        self._note(FOLDED, number)
        self._wait(FOLDED, number)
        piece.copy_(rows[self._ranks, :size])

    def reduce(self, address: int, size: int, dtype: int, reduction: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce to the root; the data of the others stays as it is."""
        data = at(address, size, self.device)
        self._tell("reduce", limit_ns, size, dtype=dtype, reduction=reduction, root=root)
        self._make_room(size, limit_ns)
        for number, piece in enumerate(_cut(data, self._arena.row_bytes)):
            rows = self._bring(number, [(0, piece)])
            if self._rank == root:
                self._wait(BROUGHT, number)
                self._fold(rows[: self._ranks, : piece.numel()], piece, dtype, reduction)
            self._leave(number)
        return self._end()

    def broadcast(self, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:
        """Give the root's data to everyone."""
        data = at(address, size, self.device)
        self._tell("broadcast", limit_ns, size, dtype=dtype, root=root)
        self._make_room(size, limit_ns)
        for number, piece in enumerate(_cut(data, self._arena.row_bytes)):
            if self._rank == root:
                self._bring(number, [(0, piece)])
            else:
                self._wait(BROUGHT, number, [root])
                piece.copy_(self._rows(number)[root, : piece.numel()])
            self._leave(number)
        return self._end()

    def all_gather(self, address: int, size: int, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give everyone's data to everyone."""
        data, parts = at(address, size, self.device), self._parts(out)
        takes = [part.numel() for part in parts]
        self._tell("all_gather", limit_ns, size, [size] * self._ranks, takes, dtype=dtype)
        self._make_room(max(takes), limit_ns)
        row = self._arena.row_bytes
        parts[self._rank].copy_(data)
        for number in range(_rounds(max(takes), row)):
            if number * row < size:
                self._bring(number, [(0, _piece(data, number, row))])
            self._take(number, [(rank, 0, part) for rank, part in enumerate(parts) if rank != self._rank], row)
            self._leave(number)
        return self._end()

    def gather(self, address: int, size: int, out: _Places | None, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give everyone's data to the root."""
        data, parts = at(address, size, self.device), self._parts(out)
        gives = [size if rank == root else 0 for rank in range(self._ranks)]
        takes = [part.numel() for part in parts] or [0] * self._ranks
        self._tell("gather", limit_ns, size, gives, takes, dtype=dtype, root=root)
        row = self._arena.row_bytes
        if self._rank == root:
            parts[root].copy_(data)
            for number in range(_rounds(max(takes), row)):
                self._take(number, [(rank, 0, part) for rank, part in enumerate(parts) if rank != root], row)
                self._leave(number)
        else:
            for number, piece in enumerate(_cut(data, row)):
                self._bring(number, [(0, piece)])
                self._leave(number)
        return self._end()

    def scatter(self, given: _Places | None, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give each rank its part of the root's data."""
        data, parts = at(address, size, self.device), self._parts(given)
        gives = [part.numel() for part in parts] or [0] * self._ranks
        takes = [size if rank == root else 0 for rank in range(self._ranks)]
        self._tell("scatter", limit_ns, size, gives, takes, dtype=dtype, root=root)
        share = self._share()
        if self._rank == root:
            data.copy_(parts[root])
            for number in range(_rounds(max(gives), share)):
                self._bring(number, _pieces(parts, number, share, but=root))
                self._leave(number)
        else:
            for number in range(_rounds(size, share)):
                self._take(number, [(root, self._rank * share, data)], share)
                self._leave(number)
        return self._end()

    def reduce_scatter(self, given: _Places, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce each part of everyone's data to the rank it is for."""
        data, parts = at(address, size, self.device), self._parts(given)
        self._tell("reduce_scatter", limit_ns, size, dtype=dtype, reduction=reduction)
        self._make_room(size * self._ranks, limit_ns)
        share = self._share()
        for number, piece in enumerate(_cut(data, share)):
            rows = self._bring(number, _pieces(parts, number, share))
            self._wait(BROUGHT, number)
            begin = self._rank * share
            self._fold(rows[: self._ranks, begin : begin + piece.numel()], piece, dtype, reduction)
            self._leave(number)
        return self._end()

    def all_to_all(self, given: _Places, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give each rank its part of everyone's data."""
        parts, came = self._parts(given), self._parts(out)
        gives, takes = [part.numel() for part in parts], [part.numel() for part in came]
        self._tell("all_to_all", limit_ns, sum(gives), gives, takes, dtype=dtype)
        share, own = self._share(), self._rank
        if gives[own] == takes[own]:
            came[own].copy_(parts[own])
        for number in range(_rounds(max(gives + takes), share)):
            pieces = _pieces(parts, number, share, but=own)
            if pieces:
                self._bring(number, pieces)
            mine = [(rank, own * share, part) for rank, part in enumerate(came) if rank != own]
            self._take(number, mine, share)
            self._leave(number)
        return self._end()

    # Room -----------------------------------------------------------------------------------------------

    def _make_room(self, size: int, limit_ns: int) -> None:
        """Make the rows larger where the call is: everyone makes the same call, so everyone comes here."""
        if self._arena.fits(size):
            return
        self._meet(limit_ns)
        self.stream.synchronize()
        if not self._arena.grow(size):
            self._need = [0, 0]

    # In the stream -----------------------------------------------------------------------------------------

    def _rows(self, number: int) -> torch.Tensor:
        return self._arena.rows[(self._call + number) % 2]

    def _share(self) -> int:
        """Return how much of a row there is for each rank."""
        return self._arena.row_bytes // self._ranks // _LINE * _LINE

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    def _bring(self, number: int, pieces: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Put ``pieces`` into this rank's row, once nobody reads what it had there, and say so; return the rows."""
        turn = (self._call + number) % 2
        need = self._need[turn]
        driver.order(self.stream.cuda_stream, waits=[(self.flags.address(LEFT, rank), need) for rank in self._others()])
        rows = self._arena.rows[turn]
        for begin, piece in pieces:
            rows[self._rank, begin : begin + piece.numel()].copy_(piece)
        self._need[turn] = self._value(number)
        self._note(BROUGHT, number)
        return rows

    def _take(self, number: int, parts: Sequence[tuple[int, int, torch.Tensor]], share: int) -> None:
        """Copy into each part what its rank has brought in this round, if there is so much: (rank, begin, part)."""
        wanted = [(rank, begin, _piece(part, number, share)) for rank, begin, part in parts]
        wanted = [each for each in wanted if each[2].numel()]
        if wanted:
            self._wait(BROUGHT, number, [rank for rank, _, _ in wanted])
        rows = self._rows(number)
        for rank, begin, piece in wanted:
            piece.copy_(rows[rank, begin : begin + piece.numel()])

    def _fold(self, rows: torch.Tensor, out: torch.Tensor, dtype: int, reduction: int) -> None:
        kind = _TYPES[dtype & ~shm.COMPLEX]
        given, made = rows.view(kind), out.view(kind)
        if reduction in _SUMS and kind in _ADDED:
            if self._ranks == 2:
                torch.add(given[0], given[1], out=made)
            else:
                torch.sum(given, 0, dtype=kind, out=made)
        else:
            made.copy_(fold(given.unbind(), reduction))

    def _value(self, number: int) -> int:
        return self._call * _STRIDE + number + 1

    def _note(self, kind: int, number: int) -> None:
        place = self.flags.address(kind, self._rank)
        driver.order(self.stream.cuda_stream, write=(place, self._value(number)))

    def _leave(self, number: int) -> None:
        self._note(LEFT, number)

    def _wait(self, kind: int, number: int, ranks: Sequence[int] | None = None) -> None:
        ranks = self._others() if ranks is None else ranks
        value = self._value(number)
        driver.order(self.stream.cuda_stream, waits=[(self.flags.address(kind, rank), value) for rank in ranks])

    def _end(self) -> int:
        code = super()._end()
        place = self.flags.address(LEFT, self._rank)
        driver.order(self.stream.cuda_stream, write=(place, self._call * _STRIDE))
        return code

    def close(self, within_s: float) -> None:
        """Let go of the GPU's memory, once the stream is empty.

        Rank 0, which has it, gives it back once the others have let go, or after ``within_s`` leaves it to the end of
        the process: memory that is freed under somebody's mapping is undefined.
        """
        driver.enter(self._context)
        self._arena.close()
        self.flags.go()
        until = time.monotonic() + within_s
        while self._rank == 0 and not self.flags.all_gone() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if self.flags.all_gone():
            self._arena.free()
        super().close(within_s)


def form(flags: Flags, store: Store, rank: int, ranks: int, device: torch.device) -> Card | str:
    """Make the memory that ranks on one ``device`` share. Every rank of the group calls this.

    Returns why it cannot be done here, the same on every rank, where the driver or the container does not allow it.
    """
    arena = Arena(store, rank, ranks, device)
    trouble = arena.grow(0)
    return trouble or Card(flags, arena, rank, ranks, device)


def _rounds(size: int, each: int) -> int:
    return -(-size // each)


def _piece(data: torch.Tensor, number: int, each: int) -> torch.Tensor:
    return data[number * each : (number + 1) * each]


def _cut(data: torch.Tensor, each: int) -> list[torch.Tensor]:
    return [_piece(data, number, each) for number in range(_rounds(data.numel(), each))]


def _pieces(
    parts: Sequence[torch.Tensor], number: int, share: int, but: int | None = None
) -> list[tuple[int, torch.Tensor]]:
    """Return where in a row the pieces of ``parts`` of this round go, those that there are."""
    found = [(rank * share, _piece(part, number, share)) for rank, part in enumerate(parts) if rank != but]
    return [each for each in found if each[1].numel()]
