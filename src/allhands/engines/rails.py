"""Collectives of ranks on several hosts, some with several ranks: shared memory inside a host, Gloo between hosts.

Each call is told and compared as in a `Relay`, and its data cut into pieces. A piece is first brought together inside
each host, in shared memory; then each of its slices goes across by a *rail*, a Gloo group with one rank of every host;
then it is spread inside each host. So a byte crosses between two hosts once, however many ranks they have. While one
piece is on its way between hosts, the next is brought together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .. import _torch
from ..errors import AllhandsError
from . import neighbours, shm
from .fold import fold
from .relay import Relay, flat, together

__all__ = ["Rails", "form"]

# What is moved at a time. A piece fits into the caches with what it is added to, and is large enough for its messages
# not to count.
_PIECE = 4 << 20

# Up to this one rail carries all: more messages would cost more than they carry.
_FEW = 16 << 10

_U8 = shm.DTYPES[torch.uint8]
_SUM = shm.REDUCTIONS[dist.ReduceOp.SUM]
_SUMS = frozenset({"SUM", "AVG", "PREMUL_SUM"})

# What must be rounded once, after all ranks' values are together. The least and the largest are never rounded.
_HALVES = frozenset({torch.float16, torch.bfloat16})
_EXACT = frozenset({"MIN", "MAX"})

# A step of a piece: the work to wait for before the next one, None for none.
_Steps = Iterator[Any]


def form(
    store: Store, gloo: Any, rank: int, ranks: Sequence[int], *, timeout: timedelta, check: Callable[[], None]
) -> shm.Shm | Relay:
    """Find out which ranks share memory, and make what fits: one segment, rails, or a relay where nobody shares any.

    Every rank of the group calls this. ``gloo`` has all of them; ``check`` raises where the group is over.
    """
    hosts = neighbours.find(store, rank, len(ranks))
    if max(map(len, hosts)) > shm.MOST_RANKS or len(hosts) == len(ranks) > 1:
        return Relay(gloo, rank, ranks)
    number = next(number for number, host in enumerate(hosts) if rank in host)
    here = hosts[number]
    local, words = None, ""
    if len(here) > 1 or len(hosts) == 1:
        sub = PrefixStore(f"host/{here[0]}/", store)
        try:
            local = shm.form(sub, here.index(rank), len(here), timeout.total_seconds(), check)
        except AllhandsError as problem:
            if len(hosts) == 1 or problem.slug != "shm-too-small":
                raise
            words = problem.slug
    if len(hosts) == 1 and local is not None:
        return local
    store.set(f"formed/{rank}", words)
    if any(store.multi_get([f"formed/{each}" for each in range(len(ranks))])):
        return Relay(gloo, rank, ranks)  # One host has no room; its ranks go the slow way, and so all do.
    place, rail = here.index(rank), None
    if place < min(map(len, hosts)):
        rail = _torch.gloo(PrefixStore(f"rail/{place}/", store), number, len(hosts), timeout)
    return Rails(gloo, rank, ranks, hosts=hosts, local=local, rail=rail)


class Rails(Relay):
    """One rank's end of a group on several hosts. There are as many rails as the smallest host has ranks."""

    def __init__(
        self, gloo: Any, rank: int, ranks: Sequence[int], *, hosts: list[list[int]], local: shm.Shm | None, rail: Any
    ) -> None:
        super().__init__(gloo, rank, ranks)
        self._hosts = hosts
        self._host = next(number for number, host in enumerate(hosts) if rank in host)
        self._place = hosts[self._host].index(rank)
        self._mates = len(hosts[self._host])
        self._most = max(map(len, hosts))
        self._rails = min(map(len, hosts))
        self._local = local
        self._shared = local.segment if local is not None else None
        self._rail = rail
        if rail is not None:
            self._gloos.append(rail)
        if self._shared is not None:
            # A wait here is mostly one for the network, whose threads need the core.
            self._shared.patience(0, 50)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host, by the group's numbering."""
        return self._hosts

    @property
    def size_bytes(self) -> int:
        """The shared memory of this host."""
        return self._local.size_bytes if self._local is not None else 0

    def end(self, rank: int) -> None:
        """The group is over: whoever waits in shared memory or for Gloo wakes."""
        super().end(rank)
        if self._shared is not None:
            self._shared.end(self._place)

    def close(self) -> None:
        """Say that this rank makes no further call."""
        if self._shared is not None:
            self._shared.depart()
        if self._rail is not None:
            self._rail.shutdown()

    # What the relay asks for ---------------------------------------------------------------------------------------

    def _reduce(self, data: torch.Tensor, rows: torch.Tensor | None, reduction: int, root: int | None = None) -> None:
        if rows is not None:
            super()._reduce(data, rows, reduction, root)
            return
        carriers = self._carriers(data.nbytes)
        self._flow(self._reducing(piece, reduction, carriers, root) for piece in _cut(data, carriers))

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        carriers = self._carriers(data.nbytes)
        self._flow(self._casting(piece, root, carriers) for piece in _cut(data, carriers) if data.numel())

    def _gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        own = flat(mine)
        rows = flat(whole).view(self._size, own.numel())
        carriers = self._carriers(own.numel() * self._most)
        each = max(1, _PIECE // self._most)
        spans = [slice(at, min(at + each, own.numel())) for at in range(0, own.numel(), each)]
        self._flow(self._gathering(rows[:, span], own[span], carriers) for span in spans)

    def _reduce_parts(self, parts: Sequence[torch.Tensor], mine: torch.Tensor, reduction: int) -> None:
        carriers = self._carriers(mine.nbytes * self._most)
        each = max(1, _PIECE // self._size // mine.element_size())
        spans = [slice(at, min(at + each, mine.numel())) for at in range(0, mine.numel(), each)]
        self._flow(self._scattering([part[span] for part in parts], mine[span], reduction, carriers) for span in spans)

    def _swap(
        self, parts: Sequence[torch.Tensor], came: Sequence[torch.Tensor], gives: list[int], takes: list[int]
    ) -> None:
        """Give and take inside the host through shared memory, and at the same time the rest through Gloo.

        What goes between hosts is different for each pair of ranks: it crosses once in any case.
        """
        if self._empty:
            return
        near = self._hosts[self._host]
        with together(parts, back=False) as given, together(came) as taken:
            out, back = torch.split(given, gives), torch.split(taken, takes)
            far = [rank for rank in range(self._size) if rank not in near]
            gone = torch.cat([out[rank] for rank in far])
            got = torch.empty(sum(takes[rank] for rank in far), dtype=torch.uint8)
            sizes = [[0 if rank in near else each[rank] for rank in range(self._size)] for each in (takes, gives)]
            work = self._gloo.alltoall_base(got, gone, *sizes, self._options(dist.AllToAllOptions))
            try:
                if self._shared is None:
                    back[self._rank].copy_(out[self._rank])
                self._inside(
                    "all_to_all", shm.parts([out[rank] for rank in near]), shm.parts([back[rank] for rank in near]), _U8
                )
            except BaseException:
                self._keep()
                raise
            self._wait(work)
            for rank, piece in zip(far, torch.split(got, [takes[rank] for rank in far]), strict=True):
                back[rank].copy_(piece)

    # The pieces ----------------------------------------------------------------------------------------------------

    def _carriers(self, size: int) -> int:
        """Return how many rails carry something of ``size`` bytes."""
        return 1 if size <= _FEW else self._rails

    def _flow(self, pieces: Iterable[_Steps]) -> None:
        """Do the steps of ``pieces``: the first of one before the second of the one before it, and so on.

        The order is the same on every rank, in shared memory and on each rail.
        """
        flying: deque[tuple[_Steps, Any]] = deque()
        try:
            for piece in pieces:
                flying.append((piece, next(piece)))
                for _ in range(len(flying) - 1):
                    self._step(flying)
                # The newest came to the front by that: it goes to the end again.
                flying.rotate(-1)
            while flying:
                self._step(flying)
        except BaseException:
            if any(work is not None and not work.is_completed() for _, work in flying):
                self._keep()
            raise

    def _step(self, flying: deque[tuple[_Steps, Any]]) -> None:
        """Do the next step of the oldest piece, once what it waits for is there."""
        piece, work = flying[0]
        if work is not None:
            self._wait(work)
        flying.popleft()
        for step in piece:
            flying.append((piece, step))
            break

    def _reducing(self, piece: torch.Tensor, reduction: int, carriers: int, root: int | None) -> _Steps:
        """Reduce ``piece`` in place: to everyone, or to the host of ``root`` only."""
        name = shm.REDUCTION_NAMES[reduction]
        step = _SUM if name in _SUMS else reduction
        rounded = piece.dtype in _HALVES and name not in _EXACT
        block = piece.to(torch.float32) if rounded else piece
        target = None if root is None else self._host_of(root)
        mine = self._bring(block, step, carriers)
        place = piece[self._span(piece.numel(), carriers)]
        hosts, largest = len(self._hosts), -(-piece.nbytes // carriers)
        # In one step everyone gets all of it, which with two hosts is no more than half of it twice.
        if not rounded and (hosts == 2 or largest <= _FEW):
            rows = torch.empty(hosts, mine.numel(), dtype=mine.dtype)
            yield self._across(rows, mine, target)
            if mine.numel() and target in {None, self._host}:
                self._divide(fold(rows.unbind(), step, out=place), name)
        else:
            each = -(-mine.numel() // hosts)
            came = torch.empty(hosts, each, dtype=mine.dtype)
            yield self._exchange(came, _padded(mine, each * hosts))
            one = self._divide(fold(came.unbind(), step), name).to(piece.dtype)
            whole = torch.empty(hosts, each, dtype=piece.dtype)
            yield self._across(whole, one, target)
            if target in {None, self._host}:
                place.copy_(whole.view(-1)[: place.numel()])
        if target in {None, self._host}:
            self._spread(piece, carriers)

    def _casting(self, piece: torch.Tensor, root: int, carriers: int) -> _Steps:
        """Give the root's ``piece`` to everyone."""
        home = self._host_of(root)
        if self._host == home:
            self._inside("broadcast", piece.data_ptr(), piece.numel(), _U8, self._hosts[home].index(root))
        mine = piece[self._span(piece.numel(), carriers)]
        options = self._options(dist.BroadcastOptions, rootRank=home)
        yield self._rail.broadcast([mine], options) if mine.numel() else None
        if self._host != home:
            self._spread(piece, carriers)

    def _gathering(self, rows: torch.Tensor, mine: torch.Tensor, carriers: int) -> _Steps:
        """Put everyone's ``mine`` into ``rows``, one for each rank."""
        hosts, most, each = len(self._hosts), self._most, mine.numel()
        # Of a host's ranks one after the other each rail carries a part; where each carries one rank, its own.
        part = -(-most * each // carriers)
        given = mine
        if carriers != self._mates or carriers != most:
            block = torch.zeros(carriers * part, dtype=torch.uint8)
            self._collect(mine, [block[at * each : (at + 1) * each] for at in range(self._mates)])
            given = block[self._place * part : (self._place + 1) * part]
        carries = self._place < carriers
        got = torch.empty(hosts, part if carries else 0, dtype=torch.uint8)
        yield self._across(got, given, None) if carries else None
        everything = torch.empty(carriers, hosts, part, dtype=torch.uint8)
        self._collect(flat(got), [flat(row) for row in everything])
        blocks = everything.transpose(0, 1).reshape(hosts, -1)
        for host, block in zip(self._hosts, blocks, strict=True):
            for at, rank in enumerate(host):
                rows[rank].copy_(block[at * each : (at + 1) * each])

    def _scattering(self, parts: list[torch.Tensor], mine: torch.Tensor, reduction: int, carriers: int) -> _Steps:
        """Reduce everyone's ``parts``, one for each rank, and put this rank's into ``mine``."""
        name = shm.REDUCTION_NAMES[reduction]
        step = _SUM if name in _SUMS else reduction
        work = torch.float32 if mine.dtype in _HALVES and name not in _EXACT else mine.dtype
        # For each host what its ranks are to get, and the slice of it that this rank's rail carries.
        blocks = [torch.cat([parts[rank] for rank in host]).to(work) for host in self._hosts]
        slices = [self._bring(each, step, carriers) for each in blocks]
        block = torch.empty(self._mates * mine.numel(), dtype=mine.dtype)
        place = block[self._span(block.numel(), carriers)]
        came = torch.empty(len(self._hosts), place.numel(), dtype=work)
        yield self._exchange(came, torch.cat(slices), [each.nbytes for each in slices])
        if place.numel():
            place.copy_(self._divide(fold(came.unbind(), step), name))
        self._spread(block, carriers)
        mine.copy_(block[self._place * mine.numel() : (self._place + 1) * mine.numel()])

    def _divide(self, total: torch.Tensor, name: str) -> torch.Tensor:
        return total.div_(self._size) if name == "AVG" else total

    def _host_of(self, rank: int) -> int:
        return next(number for number, host in enumerate(self._hosts) if rank in host)

    # Between hosts: nothing where this rank is not on a rail that carries some of it --------------------------------

    def _across(self, rows: torch.Tensor, mine: torch.Tensor, target: int | None) -> Any:
        """Begin to give ``mine`` to the rail's other ranks, or to the one on the host ``target``."""
        if not mine.numel():
            return None
        if target is None:
            options = self._options(_torch.AllgatherOptions)
            return _torch.gather_flat(self._rail, flat(rows), flat(mine), options)
        gives = [mine.nbytes if host == target else 0 for host in range(len(self._hosts))]
        takes = [mine.nbytes if self._host == target else 0] * len(self._hosts)
        options = self._options(dist.AllToAllOptions)
        taken = flat(rows) if self._host == target else torch.empty(0, dtype=torch.uint8)
        return self._rail.alltoall_base(taken, flat(mine), takes, gives, options)

    def _exchange(self, came: torch.Tensor, given: torch.Tensor, gives: list[int] | None = None) -> Any:
        """Begin to give each of the rail's ranks its part of ``given``, of one size or of ``gives`` bytes."""
        if not given.numel():
            return None
        takes = [came[0].nbytes] * len(self._hosts)
        options = self._options(dist.AllToAllOptions)
        return self._rail.alltoall_base(flat(came), flat(given), takes, gives or takes, options)

    # Inside the host -----------------------------------------------------------------------------------------------

    def _span(self, count: int, carriers: int, place: int | None = None) -> slice:
        """Return which elements of ``count`` this rank carries across, or the one at ``place`` of its host."""
        each = -(-count // carriers)
        place = self._place if place is None else place
        return slice(min(place * each, count), min((place + 1) * each, count))

    def _spans(self, block: torch.Tensor, carriers: int) -> list[torch.Tensor]:
        """Return what each of this host's ranks carries of ``block``."""
        return [block[self._span(block.numel(), carriers, place)] for place in range(self._mates)]

    def _bring(self, block: torch.Tensor, reduction: int, carriers: int) -> torch.Tensor:
        """Reduce ``block`` over the ranks of this host, in place; return the slice that this rank has of it."""
        spans, code = self._spans(block, carriers), shm.DTYPES[block.dtype]
        mine = spans[self._place]
        if carriers == self._mates and spans[0].numel() == spans[-1].numel():
            self._inside("reduce_scatter", shm.parts(spans), mine.data_ptr(), mine.nbytes, code, reduction)
        else:
            for place, span in enumerate(spans[:carriers]):
                if span.numel():
                    self._inside("reduce", span.data_ptr(), span.nbytes, code, reduction, place)
        return mine

    def _spread(self, block: torch.Tensor, carriers: int) -> None:
        """Give everyone on this host each slice of ``block`` from the rank that has it."""
        data = flat(block)
        if carriers == 1:
            self._inside("broadcast", data.data_ptr(), data.numel(), _U8, 0)
            return
        spans = [flat(span) for span in self._spans(block, carriers)]
        mine = spans[self._place]
        self._inside("all_gather", mine.data_ptr(), mine.numel(), shm.parts(spans), _U8)

    def _collect(self, mine: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Put what each rank of this host has into ``parts``; those for whom there is none have nothing."""
        if self._shared is None:
            parts[0].copy_(mine)
            return
        places = shm.parts(parts) + (0, 0) * (self._mates - len(parts))
        self._inside("all_gather", mine.data_ptr(), mine.numel(), places, _U8)

    def _inside(self, name: str, *args: Any) -> None:
        """Do a call of the segment; a host with one rank has none, and nothing to do."""
        if self._shared is None:
            return
        left_ns = max(1, int((self._until - time.monotonic()) * 1e9))
        code = getattr(self._shared, name)(*args, left_ns)
        if code:
            how, culprit = shm.CODES[code], self._numbers[self._hosts[self._host][self._shared.culprit()]]
            # In the words that transports use, for `Session.explain` to find out what is behind it.
            late = f"Timed out waiting for rank {culprit}"
            raise RuntimeError(late if how == "timeout" else f"connection closed: rank {culprit} is {how}")


def _cut(data: torch.Tensor, carriers: int) -> list[torch.Tensor]:
    """Return ``data`` in pieces that can be cut evenly among the carriers, but for the last."""
    each = max(1, _PIECE // data.element_size() // carriers) * carriers
    return list(torch.split(data, each))


def _padded(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``data`` with ``count`` elements; the last ones are of no account."""
    if data.numel() == count:
        return data
    made = torch.zeros(count, dtype=data.dtype)
    made[: data.numel()] = data
    return made
