"""Ranks on several hosts, some with several ranks: shared memory inside a host, TCP rails between hosts.

Each call is compared as by `GlooEngine`, and its data cut into pieces. A piece is first reduced or gathered inside each
host, in shared memory; then each of its slices crosses to the other hosts on a *rail* (`tcp`), which has one rank on
every host; then it is spread inside each host. So each byte crosses between two hosts once, however many ranks they
have. While one piece crosses, the next is reduced inside the host.
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
from ..base import Engine, parts_of
from ..compared import Tensors, as_bytes, memory
from ..dtypes import DTYPES, REDUCTION_NAMES, REDUCTIONS, reduce_rows
from ..gloo.engine import GlooEngine
from ..shm import engine as shm
from ..shm.fd_passing import Apart
from ..shm.fd_passing import hosts as find_hosts
from .tcp import Exchange, Rail, join

__all__ = ["HierarchicalEngine", "form"]

# What is moved at a time: fits into the caches together with what it is added to, and is large against its messages.
_PIECE = 2 << 20

# Up to this size one rail carries all: more messages would cost more than they save.
_ONE_RAIL = 32 << 10

_U8 = DTYPES[torch.uint8]
_SUM = REDUCTIONS[dist.ReduceOp.SUM]
_SUMS = frozenset({"SUM", "AVG", "PREMUL_SUM"})

# Types whose sums are rounded once, after all ranks' values are added. Minima and maxima are never rounded.
_HALVES = frozenset({torch.float16, torch.bfloat16})
_EXACT = frozenset({"MIN", "MAX"})

# The steps of a piece; each but the last yields the exchange that the next one waits for.
_Steps = Iterator[Exchange | None]


def form(
    store: Store,
    gloo: Any,
    rank: int,
    ranks: Sequence[int],
    *,
    address: str,
    timeout_s: float,
    check: Callable[[], None],
) -> Engine:
    """Find which ranks share memory and form the engine that fits: shm, hierarchical, or Gloo where no ranks do.

    Every rank of the group calls this. ``gloo`` is torch's backend of all of them, ``address`` this rank's on the
    network between them, "" on one host; ``check`` raises where the group is over.
    """
    deadline = time.monotonic() + timeout_s
    hosts = find_hosts(store, rank, len(ranks))
    if max(map(len, hosts)) > shm.MAX_RANKS or len(hosts) == len(ranks) > 1:
        return GlooEngine(gloo, rank, ranks)
    number = next(number for number, host in enumerate(hosts) if rank in host)
    here = hosts[number]
    local, refused = None, ""
    if len(here) > 1 or len(hosts) == 1:
        sub = PrefixStore(f"host/{here[0]}/", store)
        try:
            local = shm.form(sub, here.index(rank), len(here), timeout_s, check)
        except Apart as problem:
            refused = str(problem) or "apart"
        except AllhandsError as problem:
            if len(hosts) == 1 or problem.slug != "shm-too-small":
                raise
            refused = problem.slug
    if len(hosts) == 1 and local is not None:
        return local
    # One engine for all ranks, also where those of one host cannot share memory or have no room for it.
    store.set(f"formed/{rank}", refused)
    if any(store.multi_get([f"formed/{each}" for each in range(len(ranks))])):
        return GlooEngine(gloo, rank, ranks)
    place, rail = here.index(rank), None
    if place < min(map(len, hosts)):
        sub = PrefixStore(f"rail/{place}/", store)
        peers = [host[place] for host in hosts]
        names = [ranks[peer] for peer in peers]
        rail = join(sub, number, peers, names, address=address or "127.0.0.1", deadline=deadline, check=check)
    return HierarchicalEngine(gloo, rank, ranks, hosts=hosts, local=local, rail=rail)


class HierarchicalEngine(GlooEngine):
    """One rank's end of a group on several hosts. There are as many rails as the smallest host has ranks."""

    name = "hierarchical"

    def __init__(
        self,
        gloo: Any,
        rank: int,
        ranks: Sequence[int],
        *,
        hosts: list[list[int]],
        local: shm.ShmEngine | None,
        rail: Rail | None,
    ) -> None:
        super().__init__(gloo, rank, ranks)
        # The group ranks of each host.
        self.hosts = hosts
        self._host = self._host_of(rank)
        self._place = hosts[self._host].index(rank)
        self._mates = len(hosts[self._host])
        self._most = max(map(len, hosts))
        self._rails = min(map(len, hosts))
        self._local = local
        self._rail = rail
        self.segment_nbytes = local.segment_nbytes if local is not None else 0
        self._lay_out_records()
        if local is not None:
            # Ranks here mostly wait for one that waits for the network, and needs the core.
            local.segment.set_wait_policy(0, 50)

    def _lay_out_records(self) -> None:
        """Prepare the table of all records: one block per host, each with room for the ranks of the largest."""
        places = {
            rank: number * self._most + place
            for number, host in enumerate(self.hosts)
            for place, rank in enumerate(host)
        }
        order = [places[rank] for rank in range(self._size)]
        self._set_records(len(self.hosts) * self._most, order)
        block = self._most * self._record_bytes
        self._blocks = [self._read[at * block : (at + 1) * block] for at in range(len(self.hosts))]
        self._order = None if order == list(range(len(self._records))) else torch.tensor(order)
        mine = self._records[self._host * self._most :][: self._mates]
        self._own_block = parts_of(list(mine)) if self._place == 0 else None

    def abort(self, rank: int) -> None:
        """End every wait: in shared memory, for a rail and for Gloo."""
        super().abort(rank)
        if self._local is not None:
            self._local.abort(self._place)
        if self._rail is not None:
            self._rail.abort()

    def close(self, within_s: float) -> None:
        """Make no further call."""
        if self._local is not None:
            self._local.close(within_s)
        if self._rail is not None:
            self._rail.close()

    # What GlooEngine leaves to subclasses ---------------------------------------------------------------------------

    def _gather_records(self) -> None:
        if self._local is None:
            self._blocks[self._host][: self._record_bytes] = self._written
        else:
            self._inside("gather", self._record.data_ptr(), self._record_bytes, self._own_block, _U8, 0)
        if self._place == 0 and self._rail is not None:
            own = self._blocks[self._host]
            self._rail.finish(self._rail.begin([own] * len(self.hosts), self._blocks), self._deadline)
        self._inside("broadcast", self._records.data_ptr(), len(self._read), _U8, 0)

    def _inline(self, size: int) -> torch.Tensor:
        rows = super()._inline(size)
        return rows if self._order is None else rows[self._order]

    def _large_reduce(self, data: torch.Tensor, reduction: int, root: int | None) -> None:
        carriers = self._carriers(data.nbytes)
        if data.numel():
            self._flow(self._reducing(piece, reduction, carriers, root) for piece in _cut(data, carriers))

    def _large_broadcast(self, data: torch.Tensor, root: int) -> None:
        carriers = self._carriers(data.nbytes)
        self._flow(self._broadcasting(piece, root, carriers) for piece in _cut(data, carriers) if data.numel())

    def _flat_all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        own = as_bytes(mine)
        rows = as_bytes(whole).view(self._size, own.numel())
        carriers = self._carriers(own.numel() * self._most)
        spans = _spans(own.numel(), _PIECE // self._most)
        self._flow(self._gathering(rows[:, span], own[span], carriers) for span in spans)

    def _reduce_scatter(self, parts: Tensors, mine: torch.Tensor, reduction: int) -> None:
        carriers = self._carriers(mine.nbytes * self._most)
        spans = _spans(mine.numel(), _PIECE // self._size // mine.element_size())
        self._flow(self._scattering([part[span] for part in parts], mine[span], reduction, carriers) for span in spans)

    def _all_to_all(self, given: Tensors, came: Tensors) -> None:
        """Exchange inside the host through shared memory and, at the same time, between hosts through Gloo.

        Data between hosts is different for each pair of ranks: it crosses once in any case.
        """
        if self._empty:
            return
        near = self.hosts[self._host]
        far = [rank for rank in range(self._size) if rank not in near]
        gone = torch.cat([given[rank] for rank in far])
        got = torch.empty(sum(came[rank].numel() for rank in far), dtype=torch.uint8)
        sizes = [[0 if rank in near else part.numel() for rank, part in enumerate(parts)] for parts in (came, given)]

        def issue() -> Any:
            work = self._gloo.alltoall_base(got, gone, *sizes, self._options(dist.AllToAllOptions))
            try:
                if self._local is None:
                    came[self._rank].copy_(given[self._rank])
                ours = parts_of([given[rank] for rank in near]), parts_of([came[rank] for rank in near])
                self._inside("all_to_all", *ours, _U8)
            except BaseException:
                self._leak_gloo()
                raise
            return work

        self._run(issue)
        for rank, piece in zip(far, torch.split(got, [came[rank].numel() for rank in far]), strict=True):
            came[rank].copy_(piece)

    # Pieces --------------------------------------------------------------------------------------------------------

    def _carriers(self, size: int) -> int:
        """Return how many rails carry ``size`` bytes."""
        return 1 if size <= _ONE_RAIL else self._rails

    def _flow(self, pieces: Iterable[_Steps]) -> None:
        """Pipeline ``pieces``: the first step of one runs before the second step of the one before it, and so on.

        The order is the same on every rank, in shared memory and on each rail.
        """
        flying: deque[tuple[_Steps, Exchange | None]] = deque()
        for piece in pieces:
            older = len(flying)
            flying.append((piece, next(piece)))
            for _ in range(older):
                self._step(flying)
            # Their next steps were queued behind the newest piece.
            flying.rotate(-1)
        while flying:
            self._step(flying)

    def _step(self, flying: deque[tuple[_Steps, Exchange | None]]) -> None:
        """Run the next step of the oldest piece, once the exchange that it waits for is complete."""
        piece, exchange = flying.popleft()
        if exchange is not None and self._rail is not None:
            self._rail.finish(exchange, self._deadline)
        for following in piece:
            flying.append((piece, following))
            break

    def _reducing(self, piece: torch.Tensor, reduction: int, carriers: int, root: int | None) -> _Steps:
        """Reduce ``piece`` in place: to everyone, or to the host of ``root`` only."""
        name = REDUCTION_NAMES[reduction]
        step = _SUM if name in _SUMS else reduction
        rounded = piece.dtype in _HALVES and name not in _EXACT
        target = None if root is None else self._host_of(root)
        mine = self._reduce_inside(piece.to(torch.float32) if rounded else piece, step, carriers)
        place = piece[_part(piece.numel(), carriers, self._place)]
        hosts, largest = len(self.hosts), -(-piece.nbytes // carriers)
        # One step: every host receives all of it. With two hosts that is as much as two steps of half of it.
        if not rounded and (hosts == 2 or largest <= _ONE_RAIL):
            rows = self._rows_like(mine)
            yield self._exchange_rows(rows, target)
            if mine.numel() and target in {None, self._host}:
                self._divide(
                    reduce_rows(rows, step, out=place) if hosts == 2 else place.copy_(reduce_rows(rows, step)), name
                )
        else:
            each = -(-mine.numel() // hosts)
            given = _padded(mine, each * hosts).view(hosts, each)
            came = self._rows_like(given[self._host])
            yield self._exchange(list(given), came)
            one = self._divide(reduce_rows(came, step), name).to(piece.dtype)
            rows = self._rows_like(one)
            yield self._exchange_rows(rows, target)
            if target in {None, self._host}:
                place.copy_(torch.cat(list(rows))[: place.numel()])
        if target in {None, self._host}:
            self._spread(piece, carriers)

    def _broadcasting(self, piece: torch.Tensor, root: int, carriers: int) -> _Steps:
        """Copy the root's ``piece`` to every rank."""
        home = self._host_of(root)
        if self._host == home:
            self._inside("broadcast", piece.data_ptr(), piece.numel(), _U8, self.hosts[home].index(root))
        mine = piece[_part(piece.numel(), carriers, self._place)]
        hosts, at_home = len(self.hosts), self._host == home
        # All hosts but the root's receive ``first`` from it; without a second step that is everything.
        parts = [mine[_part(mine.numel(), hosts, host)] for host in range(hosts)]
        split = hosts > 2 and piece.numel() > _ONE_RAIL
        first, none = parts[self._host] if split else mine, [mine[:0]] * hosts
        if at_home:
            yield self._exchange(parts if split else [mine] * hosts, none)
        else:
            yield self._exchange(none, [first if host == home else mine[:0] for host in range(hosts)])
        if split:
            # Each host passes its part on, so that the root's host does not send more than the others.
            gives = [first if host != home else mine[:0] for host in range(hosts)]
            yield self._exchange(gives, none if at_home else parts)
        if self._host != home:
            self._spread(piece, carriers)

    def _gathering(self, rows: torch.Tensor, mine: torch.Tensor, carriers: int) -> _Steps:
        """Copy every rank's ``mine`` into ``rows``, one per rank."""
        hosts, most, each = len(self.hosts), self._most, mine.numel()
        # Each rail carries a part of the data of all ranks of a host; with a rail per rank, that of its own rank.
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
        self._collect(as_bytes(got), [as_bytes(row) for row in everything])
        blocks = everything.transpose(0, 1).reshape(hosts, -1)
        for host, block in zip(self.hosts, blocks, strict=True):
            for at, rank in enumerate(host):
                rows[rank].copy_(block[at * each : (at + 1) * each])

    def _scattering(self, parts: list[torch.Tensor], mine: torch.Tensor, reduction: int, carriers: int) -> _Steps:
        """Reduce all ranks' ``parts``, one per rank, to ``mine``."""
        name = REDUCTION_NAMES[reduction]
        step = _SUM if name in _SUMS else reduction
        work = torch.float32 if mine.dtype in _HALVES and name not in _EXACT else mine.dtype
        # For each host the parts of its ranks, and the slice of them that this rank's rail carries.
        blocks = [torch.cat([parts[rank] for rank in host]).to(work) for host in self.hosts]
        slices = [self._reduce_inside(each, step, carriers) for each in blocks]
        came = self._rows_like(slices[self._host])
        yield self._exchange(slices, came)
        block = torch.empty(self._mates * mine.numel(), dtype=mine.dtype)
        place = block[_part(block.numel(), carriers, self._place)]
        if place.numel():
            place.copy_(self._divide(reduce_rows(came, step), name))
        if carriers != self._mates:
            self._spread(block, carriers)
        mine.copy_(block[self._place * mine.numel() : (self._place + 1) * mine.numel()])

    def _divide(self, total: torch.Tensor, name: str) -> torch.Tensor:
        return total.div_(self._size) if name == "AVG" else total

    def _host_of(self, rank: int) -> int:
        return next(number for number, host in enumerate(self.hosts) if rank in host)

    # Between hosts: no-ops where this rank carries nothing      -------------------------------------------------------

    def _rows_like(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return memory for the rows of all hosts, each like ``mine``, which is the row of the own host."""
        return [mine if host == self._host else torch.empty_like(mine) for host in range(len(self.hosts))]

    def _exchange_rows(self, rows: Tensors, target: int | None) -> Exchange | None:
        """Begin to exchange rows with the other ranks of the rail; with a ``target``, only its host receives."""
        empty = rows[0][:0]
        gives = [rows[self._host] if target in {None, host} else empty for host in range(len(rows))]
        return self._exchange(gives, rows if target in {None, self._host} else [empty] * len(rows))

    def _exchange(self, gives: Tensors, takes: Tensors) -> Exchange | None:
        """Begin to send each host its row and to receive into ours; an empty row means nothing."""
        if self._rail is None:
            return None
        return self._rail.begin([memory(row) for row in gives], [memory(row) for row in takes])

    # Inside the host -----------------------------------------------------------------------------------------------

    def _slices(self, block: torch.Tensor, carriers: int) -> list[torch.Tensor]:
        """Return the slice of ``block`` for each rank of this host."""
        return [block[_part(block.numel(), carriers, place)] for place in range(self._mates)]

    def _reduce_inside(self, block: torch.Tensor, reduction: int, carriers: int) -> torch.Tensor:
        """Reduce ``block`` over the ranks of this host, in place; return this rank's slice of the result."""
        slices, code = self._slices(block, carriers), DTYPES[block.dtype]
        mine = slices[self._place]
        if carriers == self._mates and slices[0].numel() == slices[-1].numel():
            self._inside("reduce_scatter", parts_of(slices), mine.data_ptr(), mine.nbytes, code, reduction)
        else:
            for place, each in enumerate(slices[:carriers]):
                if each.numel():
                    self._inside("reduce", each.data_ptr(), each.nbytes, code, reduction, place)
        return mine

    def _spread(self, block: torch.Tensor, carriers: int) -> None:
        """Copy each slice of ``block`` from its rank to all ranks of this host."""
        if carriers == 1:
            self._inside("broadcast", block.data_ptr(), block.nbytes, _U8, 0)
            return
        slices = self._slices(block, carriers)
        mine = slices[self._place]
        self._inside("all_gather", mine.data_ptr(), mine.nbytes, parts_of(slices), _U8)

    def _collect(self, mine: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Copy the data of each rank of this host into ``parts``; ranks without a part have no data."""
        if self._local is None:
            parts[0].copy_(mine)
            return
        places = parts_of(parts) + (0, 0) * (self._mates - len(parts))
        self._inside("all_gather", mine.data_ptr(), mine.numel(), places, _U8)

    def _inside(self, operation: str, *args: Any) -> None:
        """Make a call of this host's segment; a host with one rank has none."""
        if self._local is None:
            return
        left_ns = max(1, int((self._deadline - time.monotonic()) * 1e9))
        code = getattr(self._local.segment, operation)(*args, left_ns)
        if code:
            raise self._local.failure(code, self.hosts[self._host][self._local.segment.culprit()])


def _part(count: int, parts: int, number: int) -> slice:
    """Return which of ``count`` elements are in one of ``parts`` equal parts."""
    each = -(-count // parts)
    return slice(min(number * each, count), min((number + 1) * each, count))


def _spans(count: int, each: int) -> list[slice]:
    return [slice(at, min(at + max(1, each), count)) for at in range(0, count, max(1, each))]


def _cut(data: torch.Tensor, carriers: int) -> Sequence[torch.Tensor]:
    """Return ``data`` in pieces that can be cut evenly among the carriers, except the last."""
    each = max(1, _PIECE // data.element_size() // carriers) * carriers
    return torch.split(data, each) if data.numel() > each else [data]


def _padded(data: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``data`` padded to ``count`` elements."""
    if data.numel() == count:
        return data
    made = torch.zeros(count, dtype=data.dtype)
    made[: data.numel()] = data
    return made
