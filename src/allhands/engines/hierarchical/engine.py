"""Collectives of ranks on several hosts, some with several ranks: shared memory inside a host, rails between hosts.

Each call is told and compared as in a `Relay`, and its data cut into pieces. A piece is first brought together inside
each host, in shared memory; then each of its slices goes across by a *rail*, which has one rank on every host; then it
is spread inside each host. So a byte crosses between two hosts once, however many ranks they have. While one piece is
on its way between hosts, the next is brought together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...errors import AllhandsError
from ..gloo.engine import SHEET, Relay, flat, memory, together
from ..gloo.reduce_rows import fold
from ..shm import engine as shm
from ..shm import same_host
from .tcp import Exchange, Rail, join

__all__ = ["Rails", "form"]

# What is moved at a time. A piece fits into the caches with what it is added to, and is large enough for its messages
# not to count.
_PIECE = 2 << 20

# Up to this one rail carries all: more messages would cost more than they carry.
_FEW = 32 << 10

_U8 = shm.DTYPES[torch.uint8]
_SUM = shm.REDUCTIONS[dist.ReduceOp.SUM]
_SUMS = frozenset({"SUM", "AVG", "PREMUL_SUM"})

# What must be rounded once, after all ranks' values are together. The least and the largest are never rounded.
_HALVES = frozenset({torch.float16, torch.bfloat16})
_EXACT = frozenset({"MIN", "MAX"})

# The steps of a piece; each but the last yields what to wait for before the next.
_Steps = Iterator[Exchange | None]
_Rows = Sequence[torch.Tensor]


def form(
    store: Store,
    gloo: Any,
    rank: int,
    ranks: Sequence[int],
    *,
    address: str,
    timeout_s: float,
    check: Callable[[], None],
) -> shm.Shm | Relay:
    """Find out which ranks share memory, and make what fits: one segment, rails, or a relay where nobody shares any.

    Every rank of the group calls this. ``gloo`` has all of them, ``address`` is this rank's on the network between
    them, "" on one host; ``check`` raises where the group is over.
    """
    deadline = time.monotonic() + timeout_s
    hosts = same_host.find(store, rank, len(ranks))
    if max(map(len, hosts)) > shm.MOST_RANKS or len(hosts) == len(ranks) > 1:
        return Relay(gloo, rank, ranks)
    number = next(number for number, host in enumerate(hosts) if rank in host)
    here = hosts[number]
    local, words = None, ""
    if len(here) > 1 or len(hosts) == 1:
        sub = PrefixStore(f"host/{here[0]}/", store)
        try:
            local = shm.form(sub, here.index(rank), len(here), timeout_s, check)
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
        sub = PrefixStore(f"rail/{place}/", store)
        far = [ranks[host[place]] for host in hosts]
        rail = join(sub, number, far, address=address or "127.0.0.1", deadline=deadline, check=check)
    return Rails(gloo, rank, ranks, hosts=hosts, local=local, rail=rail)


class Rails(Relay):
    """One rank's end of a group on several hosts. There are as many rails as the smallest host has ranks."""

    def __init__(
        self,
        gloo: Any,
        rank: int,
        ranks: Sequence[int],
        *,
        hosts: list[list[int]],
        local: shm.Shm | None,
        rail: Rail | None,
    ) -> None:
        super().__init__(gloo, rank, ranks)
        self._hosts = hosts
        self._host = self._host_of(rank)
        self._place = hosts[self._host].index(rank)
        self._mates = len(hosts[self._host])
        self._most = max(map(len, hosts))
        self._rails = min(map(len, hosts))
        self._local = local
        self._shared = local.segment if local is not None else None
        self._rail = rail
        # Memory for what comes from other hosts, kept from one piece to the next.
        self._spare: list[torch.Tensor] = []
        self._lay_out()
        if self._shared is not None:
            # A wait here is mostly one for the network; whoever does it needs the core.
            self._shared.patience(0, 50)

    def _lay_out(self) -> None:
        """Prepare the table of everyone's sheets: a block for each host, with room for as many as the largest has."""
        block = self._most * SHEET
        self._sheets = torch.zeros(len(self._hosts) * self._most, SHEET, dtype=torch.uint8)
        self._read = memory(self._sheets)
        self._blocks = [self._read[at * block : (at + 1) * block] for at in range(len(self._hosts))]
        places = {
            rank: number * self._most + place
            for number, host in enumerate(self._hosts)
            for place, rank in enumerate(host)
        }
        order = [places[rank] for rank in range(self._size)]
        self._starts = [place * SHEET for place in order]
        self._order = None if order == list(range(len(self._sheets))) else torch.tensor(order)
        mine = self._sheets[self._host * self._most :][: self._mates]
        self._near = shm.parts(list(mine)) if self._place == 0 else None

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host, by the group's numbering."""
        return self._hosts

    @property
    def size_bytes(self) -> int:
        """The shared memory of this host."""
        return self._local.size_bytes if self._local is not None else 0

    def end(self, rank: int) -> None:
        """The group is over: whoever waits in shared memory, for a rail or for Gloo wakes."""
        super().end(rank)
        if self._shared is not None:
            self._shared.end(self._place)
        if self._rail is not None:
            self._rail.end()

    def close(self) -> None:
        """Say that this rank makes no further call."""
        if self._shared is not None:
            self._shared.depart()
        if self._rail is not None:
            self._rail.close()

    # What the relay asks for ---------------------------------------------------------------------------------------

    def _show(self) -> None:
        if self._shared is None:
            self._blocks[self._host][:SHEET] = self._written
        else:
            self._inside("gather", self._sheet.data_ptr(), SHEET, self._near, _U8, 0)
        if self._place == 0 and self._rail is not None:
            own = self._blocks[self._host]
            self._rail.finish(self._rail.begin([own] * len(self._hosts), self._blocks), self._until)
        self._inside("broadcast", self._sheets.data_ptr(), len(self._read), _U8, 0)

    def _rows(self, size: int) -> torch.Tensor:
        rows = super()._rows(size)
        return rows if self._order is None else rows[self._order]

    def _reduce(self, data: torch.Tensor, rows: torch.Tensor | None, reduction: int, root: int | None = None) -> None:
        if rows is not None:
            super()._reduce(data, rows, reduction, root)
            return
        carriers = self._carriers(data.nbytes)
        if data.numel():
            self._flow(self._reducing(piece, reduction, carriers, root) for piece in _cut(data, carriers))

    def _broadcast(self, data: torch.Tensor, root: int) -> None:
        carriers = self._carriers(data.nbytes)
        self._flow(self._casting(piece, root, carriers) for piece in _cut(data, carriers) if data.numel())

    def _gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        own = flat(mine)
        rows = flat(whole).view(self._size, own.numel())
        carriers = self._carriers(own.numel() * self._most)
        spans = _spans(own.numel(), _PIECE // self._most)
        self._flow(self._gathering(rows[:, span], own[span], carriers) for span in spans)

    def _reduce_parts(self, parts: _Rows, mine: torch.Tensor, reduction: int) -> None:
        carriers = self._carriers(mine.nbytes * self._most)
        spans = _spans(mine.numel(), _PIECE // self._size // mine.element_size())
        self._flow(self._scattering([part[span] for part in parts], mine[span], reduction, carriers) for span in spans)

    def _swap(self, parts: _Rows, came: _Rows, gives: list[int], takes: list[int]) -> None:
        """Give and take inside the host through shared memory, and at the same time the rest through Gloo.

        What goes between hosts is different for each pair of ranks: it crosses once in any case.
        """
        if self._empty:
            return
        near = self._hosts[self._host]
        far = [rank for rank in range(self._size) if rank not in near]
        with together(parts, back=False) as given, together(came) as taken:
            out, back = torch.split(given, gives), torch.split(taken, takes)
            gone = torch.cat([out[rank] for rank in far])
            got = torch.empty(sum(takes[rank] for rank in far), dtype=torch.uint8)
            sizes = [[0 if rank in near else each[rank] for rank in range(self._size)] for each in (takes, gives)]
            work = self._gloo.alltoall_base(got, gone, *sizes, self._options(dist.AllToAllOptions))
            try:
                if self._shared is None:
                    back[self._rank].copy_(out[self._rank])
                ours = shm.parts([out[rank] for rank in near]), shm.parts([back[rank] for rank in near])
                self._inside("all_to_all", *ours, _U8)
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
        flying: deque[tuple[_Steps, Exchange | None]] = deque()
        for piece in pieces:
            older = len(flying)
            flying.append((piece, next(piece)))
            for _ in range(older):
                self._step(flying)
            # Those came behind the newest.
            flying.rotate(-1)
        while flying:
            self._step(flying)

    def _step(self, flying: deque[tuple[_Steps, Exchange | None]]) -> None:
        """Do the next step of the oldest piece, once what it waits for is there."""
        piece, exchange = flying.popleft()
        if exchange is not None and self._rail is not None:
            self._rail.finish(exchange, self._until)
        for following in piece:
            flying.append((piece, following))
            break

    def _reducing(self, piece: torch.Tensor, reduction: int, carriers: int, root: int | None) -> _Steps:
        """Reduce ``piece`` in place: to everyone, or to the host of ``root`` only."""
        name = shm.REDUCTION_NAMES[reduction]
        step = _SUM if name in _SUMS else reduction
        rounded = piece.dtype in _HALVES and name not in _EXACT
        target = None if root is None else self._host_of(root)
        mine = self._bring(piece.to(torch.float32) if rounded else piece, step, carriers)
        place = piece[self._span(piece.numel(), carriers)]
        hosts, largest = len(self._hosts), -(-piece.nbytes // carriers)
        # In one step everyone gets all of it, which with two hosts is no more than half of it twice.
        if not rounded and (hosts == 2 or largest <= _FEW):
            rows = self._borrow(mine)
            yield self._across(rows, target)
            if mine.numel() and target in {None, self._host}:
                self._divide(fold(rows, step, out=place) if hosts == 2 else place.copy_(fold(rows, step)), name)
            self._give_back(rows)
        else:
            each = -(-mine.numel() // hosts)
            given = _padded(mine, each * hosts).view(hosts, each)
            came = self._borrow(given[self._host])
            yield self._exchange(list(given), came)
            one = self._divide(fold(came, step), name).to(piece.dtype)
            self._give_back(came)
            rows = self._borrow(one)
            yield self._across(rows, target)
            if target in {None, self._host}:
                place.copy_(torch.cat(list(rows))[: place.numel()])
            self._give_back(rows)
        if target in {None, self._host}:
            self._spread(piece, carriers)

    def _casting(self, piece: torch.Tensor, root: int, carriers: int) -> _Steps:
        """Give the root's ``piece`` to everyone."""
        home = self._host_of(root)
        if self._host == home:
            self._inside("broadcast", piece.data_ptr(), piece.numel(), _U8, self._hosts[home].index(root))
        mine = piece[self._span(piece.numel(), carriers)]
        hosts = len(self._hosts)
        if hosts == 2 or piece.numel() <= _FEW:
            yield self._exchange([mine] * hosts, [mine if host == home else mine[:0] for host in range(hosts)], home)
        else:
            # Each host gets a part and gives it to the others, so that the root's has no more to send than they.
            parts = [mine[_part(mine.numel(), hosts, host)] for host in range(hosts)]
            own = parts[self._host]
            yield self._exchange(parts, [own if host == home else own[:0] for host in range(hosts)], home)
            gives = [own if host != home else own[:0] for host in range(hosts)]
            yield self._exchange(gives, parts if self._host != home else [own[:0]] * hosts)
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
        got = torch.empty(hosts, given.numel(), dtype=torch.uint8)
        got[self._host] = given
        yield self._exchange([given] * hosts, list(got))
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
        came = self._borrow(slices[self._host])
        yield self._exchange(slices, came)
        block = torch.empty(self._mates * mine.numel(), dtype=mine.dtype)
        place = block[self._span(block.numel(), carriers)]
        if place.numel():
            place.copy_(self._divide(fold(came, step), name))
        self._give_back(came)
        if carriers != self._mates:
            self._spread(block, carriers)
        mine.copy_(block[self._place * mine.numel() : (self._place + 1) * mine.numel()])

    def _divide(self, total: torch.Tensor, name: str) -> torch.Tensor:
        return total.div_(self._size) if name == "AVG" else total

    def _host_of(self, rank: int) -> int:
        return next(number for number, host in enumerate(self._hosts) if rank in host)

    # Between hosts: nothing where this rank carries none of it -------------------------------------------------------

    def _borrow(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return for each host room for what is like ``mine``, and ``mine`` itself for our own."""
        rows = []
        for host in range(len(self._hosts)):
            if host == self._host or not mine.numel():
                rows.append(mine)
                continue
            room = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
            if room.numel() < mine.nbytes:
                room = torch.empty(mine.nbytes, dtype=torch.uint8)
            rows.append(room[: mine.nbytes].view(mine.dtype))
        return rows

    def _give_back(self, rows: _Rows) -> None:
        for host, row in enumerate(rows):
            if host != self._host and row.numel():
                whole = torch.empty(0, dtype=torch.uint8)
                self._spare.append(whole.set_(row.untyped_storage()))

    def _across(self, rows: _Rows, target: int | None) -> Exchange | None:
        """Begin to give our row to the rail's other ranks and take theirs, or all to the one on the host ``target``."""
        empty = rows[0][:0]
        gives = [rows[self._host] if target in {None, host} else empty for host in range(len(rows))]
        return self._exchange(gives, rows if target in {None, self._host} else [empty] * len(rows))

    def _exchange(self, gives: _Rows, takes: _Rows, source: int | None = None) -> Exchange | None:
        """Begin to give each host its row and take its own into ours; with a ``source``, only that one gives."""
        if self._rail is None or not (any(map(len, gives)) or any(map(len, takes))):
            return None
        silent = source is not None and source != self._host
        deaf = source == self._host
        none: list[memoryview | None] = [None] * len(gives)
        return self._rail.begin(
            none if silent else [memory(row) for row in gives], none if deaf else [memory(row) for row in takes]
        )

    # Inside the host -----------------------------------------------------------------------------------------------

    def _span(self, count: int, carriers: int, place: int | None = None) -> slice:
        """Return which elements of ``count`` this rank carries across, or the one at ``place`` of its host."""
        return _part(count, carriers, self._place if place is None else place)

    def _slices(self, block: torch.Tensor, carriers: int) -> list[torch.Tensor]:
        """Return what each of this host's ranks carries of ``block``."""
        return [block[_part(block.numel(), carriers, place)] for place in range(self._mates)]

    def _bring(self, block: torch.Tensor, reduction: int, carriers: int) -> torch.Tensor:
        """Reduce ``block`` over the ranks of this host, in place; return the slice that this rank has of it."""
        slices, code = self._slices(block, carriers), shm.DTYPES[block.dtype]
        mine = slices[self._place]
        if carriers == self._mates and slices[0].numel() == slices[-1].numel():
            self._inside("reduce_scatter", shm.parts(slices), mine.data_ptr(), mine.nbytes, code, reduction)
        else:
            for place, each in enumerate(slices[:carriers]):
                if each.numel():
                    self._inside("reduce", each.data_ptr(), each.nbytes, code, reduction, place)
        return mine

    def _spread(self, block: torch.Tensor, carriers: int) -> None:
        """Give everyone on this host each slice of ``block`` from the rank that has it."""
        if carriers == 1:
            self._inside("broadcast", block.data_ptr(), block.nbytes, _U8, 0)
            return
        slices = self._slices(block, carriers)
        mine = slices[self._place]
        self._inside("all_gather", mine.data_ptr(), mine.nbytes, shm.parts(slices), _U8)

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
            how, place = shm.CODES[code], self._shared.culprit()
            culprit = self._numbers[self._hosts[self._host][place]]
            # In the words that transports use, for `Session.explain` to find out what is behind it.
            late = f"Timed out waiting for rank {culprit}"
            raise RuntimeError(late if how == "timeout" else f"connection closed: rank {culprit} is {how}")


def _part(count: int, parts: int, number: int) -> slice:
    """Return which of ``count`` elements are in the part of that number."""
    each = -(-count // parts)
    return slice(min(number * each, count), min((number + 1) * each, count))


def _spans(count: int, each: int) -> list[slice]:
    return [slice(at, min(at + max(1, each), count)) for at in range(0, count, max(1, each))]


def _cut(data: torch.Tensor, carriers: int) -> Sequence[torch.Tensor]:
    """Return ``data`` in pieces that can be cut evenly among the carriers, but for the last."""
    each = max(1, _PIECE // data.element_size() // carriers) * carriers
    return torch.split(data, each) if data.numel() > each else [data]


def _padded(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``data`` with ``count`` elements; the last ones are of no account."""
    if data.numel() == count:
        return data
    made = torch.zeros(count, dtype=data.dtype)
    made[: data.numel()] = data
    return made
