"""The core's collectives over MPI, with threads as ranks and an MPI made here: so they also run under sanitizers."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from allhands import _core
from allhands.engines import fingerprint
from allhands.engines.dtypes import DTYPES

F32, SUM = DTYPES[torch.float32], 1
LIMIT_NS = 20_000_000_000

# Both families: how large a handle is, and what no statuses and no request are.
FAMILIES = {"openmpi": (ctypes.c_void_p, 0, 7), "mpich": (ctypes.c_int, 1, 0x2C000000)}
both = pytest.mark.parametrize("family", FAMILIES)

REFUSAL = 15

# Whether records are pinned to a wall or are messages, and how such a message is marked.
walled = pytest.mark.parametrize("wall", [True, False], ids=["wall", "messages"])
RECORD = 1


class Pretence:
    """An MPI of threads: a communicator's number says which of them calls, and messages are bytes in queues."""

    def __init__(self, family: str, ranks: int, *, wall: bool = False) -> None:
        self.wall = -1
        if wall:
            self.wall = os.memfd_create("wall")
            os.ftruncate(self.wall, _core.wall_bytes(ranks))
            weakref.finalize(self, os.close, self.wall)
        self.handle, self.ignore, self.none = FAMILIES[family]
        self.ranks = ranks
        self.numbers = itertools.count(1000)
        self.sent: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
        self.posted: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.rooms: dict[int, tuple[int, int, tuple[int, int, int]]] = {}
        self.prepared: dict[int, tuple[bool, int, int, tuple[int, int, int]]] = {}
        self.gatherings: dict[int, list[tuple[int, int, bytes, int]]] = defaultdict(list)
        self.gathered: dict[int, int] = defaultdict(int)
        self.pending: set[int] = set()
        self.truncated: set[int] = set()
        self.cancelled = 0
        self.broken = False
        self.inside = self.most_inside = 0
        self.lock = threading.Lock()

        handle = self.handle
        message = (ctypes.c_void_p, ctypes.c_int, handle, ctypes.c_int, ctypes.c_int, handle, ctypes.POINTER(handle))
        several = (ctypes.c_int, ctypes.POINTER(handle))
        gather = (ctypes.c_void_p, ctypes.c_int, handle, ctypes.c_void_p, ctypes.c_int, handle, handle)
        broadcast = (ctypes.c_void_p, ctypes.c_int, handle, ctypes.c_int, handle, ctypes.POINTER(handle))
        text = (ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.POINTER(ctypes.c_int))
        self.functions = [
            self._function(self._isend, *message),
            self._function(self._irecv, *message),
            self._function(self._send_init, *message),
            self._function(self._recv_init, *message),
            self._function(self._startall, *several),
            self._function(self._testall, *several, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p),
            self._function(self._cancel, ctypes.POINTER(handle)),
            self._function(self._request_free, ctypes.POINTER(handle)),
            self._function(self._iallgather, *gather, ctypes.POINTER(handle)),
            self._function(self._ibcast, *broadcast),
            self._function(self._error_string, *text),
        ]
        self.addresses = tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self.functions)

    def _function(self, function: Callable[..., int | None], *types: Any) -> Any:
        def call(*args: Any) -> int:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            time.sleep(0)  # Another thread's turn, were it let in.
            with self.lock:
                code = function(*args) or 0
            self.inside -= 1
            return code

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)

    def ferry(self, family: str, rank: int, *, alone: bool = False) -> _core.Ferry:
        """Return the end of ``rank``."""
        if not hasattr(self, "port"):
            self.port = _core.Port(family, self.addresses, self.none, alone)
        # All bits of a number that is negative to C.
        return _core.Ferry(self.port, 0x84000000 + rank, 5, rank, self.ranks, 10, 2, self.wall)

    def told(self) -> int:
        """Return how many ranks have told each other of calls by messages."""
        return sum(tag == RECORD for _, _, tag in self.sent) + len(self.gatherings)

    # What the core calls -----------------------------------------------------------------------------------

    @staticmethod
    def _rank(comm: int) -> int:
        return comm & 0xFF

    def _isend(self, *args: Any) -> None:
        data, size, _, peer, tag, comm, request = args
        self.sent[self._rank(comm), peer, tag].append(ctypes.string_at(data, size))
        request[0] = next(self.numbers)

    def _irecv(self, *args: Any) -> None:
        data, size, _, peer, tag, comm, request = args
        request[0] = number = next(self.numbers)
        self._post(number, data, size, (peer, self._rank(comm), tag))

    def _post(self, number: int, data: int, size: int, key: tuple[int, int, int]) -> None:
        self.rooms[number] = (data, size, key)
        self.posted[key].append(number)
        self.pending.add(number)

    def _send_init(self, *args: Any) -> None:
        data, size, _, peer, tag, comm, request = args
        request[0] = number = next(self.numbers)
        self.prepared[number] = (True, data, size, (self._rank(comm), peer, tag))

    def _recv_init(self, *args: Any) -> None:
        data, size, _, peer, tag, comm, request = args
        request[0] = number = next(self.numbers)
        self.prepared[number] = (False, data, size, (peer, self._rank(comm), tag))

    def _startall(self, count: int, requests: Any) -> None:
        for number in requests[:count]:
            sends, data, size, key = self.prepared[number]
            if sends:
                self.sent[key].append(ctypes.string_at(data, size))
            else:
                self._post(number, data, size, key)

    def _testall(self, count: int, requests: Any, over: Any, statuses: int | None) -> int:
        assert (statuses or 0) == self.ignore
        for key, numbers in self.posted.items():
            while numbers and self.sent[key]:
                data, size, _ = self.rooms[numbers[0]]
                came = self.sent[key].popleft()
                if len(came) > size:
                    self.truncated.add(numbers[0])
                ctypes.memmove(data, came, min(len(came), size))
                self.pending.discard(numbers.pop(0))
        if self.broken or self.truncated.intersection(requests[:count]):
            return REFUSAL
        over[0] = int(not self.pending.intersection(requests[:count]))
        for index in range(count if over[0] else 0):
            if requests[index] not in self.prepared:
                requests[index] = self.none
        return 0

    def _cancel(self, request: Any) -> None:
        assert request[0] != self.none
        self.cancelled += 1

    def _request_free(self, request: Any) -> None:
        del self.prepared[request[0]]
        request[0] = self.none

    def _together(self, comm: int, mine: tuple[int, int], into: int, request: Any, root: int) -> None:
        """Note one rank's part in a collective of MPI's own; the last one that comes ends it for all."""
        rank = self._rank(comm)
        turn, self.gathered[rank] = self.gathered[rank], self.gathered[rank] + 1
        request[0] = number = next(self.numbers)
        self.pending.add(number)
        parts = self.gatherings[turn]
        parts.append((rank, into, ctypes.string_at(*mine), number))
        if len(parts) == self.ranks:
            whole = b"".join(part for _, _, part, _ in sorted(parts))
            told = whole if root < 0 else whole[root * mine[1] : (root + 1) * mine[1]]
            for _, place, _, each in parts:
                ctypes.memmove(place, told, len(told))
                self.pending.discard(each)

    def _iallgather(self, *args: Any) -> None:
        mine, size, _, whole, _, _, comm, request = args
        self._together(comm, (mine, size), whole, request, -1)

    def _ibcast(self, *args: Any) -> None:
        data, size, _, root, comm, request = args
        self._together(comm, (data, size), data, request, root)

    def _error_string(self, error: int, words: Any, length: Any) -> None:
        said = f"pretended error {error}".encode()
        ctypes.memmove(words, said, len(said))
        length[0] = len(said)


def together(ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body`` in a thread for each rank; return what each returned, or raise what one raised."""
    results: list[Any] = [None] * ranks
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as problem:  # noqa: BLE001  # raised in the test's thread
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if problems:
        raise problems[0]
    return results


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where ``tensor`` is, as the core takes it."""
    return tensor.data_ptr(), tensor.nbytes


def places(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return where ``tensors`` are."""
    return tuple(number for tensor in tensors for number in place(tensor))


def every_operation(ferry: _core.Ferry, rank: int, ranks: int, count: int) -> None:
    """Do each operation once on ``count`` numbers, and look at what came."""
    everyone = [torch.arange(count, dtype=torch.float32) + each for each in range(ranks)]
    total = sum(everyone[1:], everyone[0].clone())
    mine = everyone[rank].clone()
    assert ferry.barrier(LIMIT_NS) == 0
    assert ferry.all_reduce(*place(mine), F32, SUM, LIMIT_NS) == 0
    assert torch.equal(mine, total)
    mine = everyone[rank].clone()
    assert ferry.reduce(*place(mine), F32, SUM, 1, LIMIT_NS) == 0
    assert torch.equal(mine, total if rank == 1 else everyone[rank])
    mine = everyone[rank].clone()
    assert ferry.broadcast(*place(mine), F32, 1, LIMIT_NS) == 0
    assert torch.equal(mine, everyone[1])
    rows = [torch.empty(count) for _ in range(ranks)]
    assert ferry.all_gather(*place(everyone[rank]), places(rows), F32, LIMIT_NS) == 0
    assert all(map(torch.equal, rows, everyone))
    rows = [torch.zeros(count) for _ in range(ranks)]
    out = places(rows) if rank == 0 else None
    assert ferry.gather(*place(everyone[rank]), out, F32, 0, LIMIT_NS) == 0
    assert rank != 0 or all(map(torch.equal, rows, everyone))
    given = places(everyone) if rank == 0 else None
    mine = torch.zeros(count)
    assert ferry.scatter(given, *place(mine), F32, 0, LIMIT_NS) == 0
    assert torch.equal(mine, everyone[rank])
    parts = [torch.full((count,), 10.0 * rank + each) for each in range(ranks)]
    assert ferry.reduce_scatter(places(parts), *place(mine), F32, SUM, LIMIT_NS) == 0
    assert torch.equal(mine, torch.full((count,), sum(10.0 * each + rank for each in range(ranks))))
    assert ferry.all_to_all(places(parts), places(rows), F32, LIMIT_NS) == 0
    assert [row[-1].item() for row in rows] == [10.0 * each + rank for each in range(ranks)]
    uneven = [torch.full((count + each,), float(each)) for each in range(ranks)]
    rows = [torch.zeros(count + each) for each in range(ranks)]
    assert ferry.all_gather(*place(uneven[rank]), places(rows), F32, LIMIT_NS) == 0
    assert all(map(torch.equal, rows, uneven))
    assert ferry.agree(3, 0, 0, 8, -1, 0, LIMIT_NS) == 0
    assert (ferry.under_way, ferry.left) == (0, 0)


@both
@walled
@pytest.mark.parametrize("ranks", [3, 9])
def test_every_operation(family: str, ranks: int, wall: bool) -> None:
    """Data that comes with the record, at once and in slices; of few ranks, and of many by MPI's own trees."""
    mpi = Pretence(family, ranks, wall=wall)

    def body(rank: int) -> None:
        ferry = mpi.ferry(family, rank)
        ferry.say("[2]", "here.py:1", "")
        for count in (7, 300, 40_000) if ranks < 9 else (7, 300):
            every_operation(ferry, rank, ranks, count)
        ferry.close()
        assert ferry.barrier(LIMIT_NS) == 5

    together(ranks, body)
    assert not mpi.prepared
    # Of many, only a broadcast that is too large for the record takes MPI's tree.
    assert mpi.told() == 0 if wall and ranks == 3 else mpi.told() > 0
    assert not any(tag == RECORD for _, _, tag in mpi.sent) or not wall


def test_a_group_of_one() -> None:
    """It has nobody to ask."""
    ferry = Pretence("openmpi", 1).ferry("openmpi", 0)
    one = torch.ones(5000)
    assert ferry.all_reduce(*place(one), F32, SUM, LIMIT_NS) == 0
    assert ferry.broadcast(*place(one), F32, 0, LIMIT_NS) == 0
    assert ferry.all_gather(*place(one), place(torch.empty(5000)), F32, LIMIT_NS) == 0
    assert torch.equal(one, torch.ones(5000))


@both
@walled
def test_blocks(family: str, wall: bool) -> None:
    """What is larger than a block is reduced block by block, and the tensor of a rank that is not the root stays."""
    mpi = Pretence(family, 2, wall=wall)
    count = 5_000_003

    def body(rank: int) -> None:
        ferry = mpi.ferry(family, rank)
        mine = torch.arange(count, dtype=torch.float32) % 1000 + rank
        want = 2 * (torch.arange(count, dtype=torch.float32) % 1000) + 1
        assert ferry.reduce(*place(mine), F32, SUM, 0, LIMIT_NS) == 0
        assert torch.equal(mine, want if rank == 0 else torch.arange(count, dtype=torch.float32) % 1000 + 1)
        mine = torch.arange(count, dtype=torch.float32) % 1000 + rank
        assert ferry.all_reduce(*place(mine), F32, SUM, LIMIT_NS) == 0
        assert torch.equal(mine, want)
        parts = [torch.full((count,), float(rank + each)) for each in range(2)]
        assert ferry.reduce_scatter(places(parts), *place(mine), F32, SUM, LIMIT_NS) == 0
        assert torch.equal(mine, torch.full((count,), 2.0 * rank + 1))

    together(2, body)


@both
@walled
def test_a_difference_is_told_to_everyone(family: str, wall: bool) -> None:
    """Another size ends with a mismatch on every rank; receives are taken back, and the records have words."""
    mpi = Pretence(family, 3, wall=wall)

    def body(rank: int) -> list[bytes]:
        ferry = mpi.ferry(family, rank)
        mine = torch.ones(3000 if rank else 2000)
        ferry.say(str(list(mine.shape)), f"line.py:{rank}", "")
        assert ferry.all_reduce(*place(mine), F32, SUM, LIMIT_NS) == 4
        assert ferry.left
        assert ferry.barrier(LIMIT_NS) == 5
        ferry.close()
        return ferry.records()

    for records in together(3, body):
        judgement = fingerprint.judge([fingerprint.unpack(record) for record in records], [0, 1, 2])
        assert judgement is not None
        assert judgement.odd == (0,)
        assert "float32 x 2000 by SUM, [2000], at line.py:0" in judgement.lines[-1]
    # What came before the records were compared cannot be taken back.
    assert mpi.cancelled == 6 or (wall and 2 <= mpi.cancelled < 6)


@both
@walled
def test_sizes_that_do_not_fit(family: str, wall: bool) -> None:
    """Parts of different sizes are compared pair by pair: what one gives is what the other has room for."""
    mpi = Pretence(family, 2, wall=wall)

    def body(rank: int) -> list[int]:
        ferry = mpi.ferry(family, rank)
        mine = torch.ones(100 * (rank + 1))
        rooms = [torch.zeros(100), torch.zeros(200 if rank else 300)]
        assert ferry.all_gather(*place(mine), places(rooms), F32, LIMIT_NS) == 4
        return ferry.tables()

    assert together(2, body) == [[400, 400, 400, 1200, 800, 800, 400, 800]] * 2


@both
@walled
def test_a_wait_ends(family: str, wall: bool) -> None:
    """At its deadline, when the group ends, and with what MPI says; no further call is taken."""
    ends: list[tuple[Callable[[Pretence, _core.Ferry], None], int, int, str]] = [
        (lambda _, __: None, 200_000_000, 1, ""),
        (lambda _, ferry: ferry.end(), LIMIT_NS, 3, ""),
        (lambda mpi, _: setattr(mpi, "broken", True), LIMIT_NS, 5, f"pretended error {REFUSAL}"),
    ]
    if wall:  # What MPI says of data is said when everyone's record is there, or none is to be waited for.
        ends[2] = (ends[2][0], 500_000_000, *ends[2][2:])
    for end, limit_ns, code, words in ends:
        mpi = Pretence(family, 2, wall=wall)
        ferry = mpi.ferry(family, 0)
        mine = torch.ones(3000)
        timer = threading.Timer(0.2, end, (mpi, ferry))
        timer.start()
        began = time.monotonic()
        assert ferry.all_reduce(*place(mine), F32, SUM, limit_ns) == code
        assert 0.1 < time.monotonic() - began < 10
        timer.join()
        assert ferry.problem() == words
        assert ferry.under_way
        assert ferry.left
        assert ferry.barrier(LIMIT_NS) in {3, 5}


@walled
def test_a_signal_is_heard(wall: bool) -> None:
    """A handler that raises ends a wait for a rank that does not come."""
    mpi = Pretence("openmpi", 2, wall=wall)
    # Never over, and not Python's, in which the handler would run: it takes nothing and returns 0.
    never = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    mpi.addresses = (*mpi.addresses[:5], never, *mpi.addresses[6:])
    ferry = mpi.ferry("openmpi", 0)

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            ferry.barrier(LIMIT_NS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ferry.under_way


@pytest.mark.parametrize("alone", [True, False])
def test_a_library_that_wants_one_call_at_a_time(alone: bool) -> None:
    """It has it, and whoever holds the port keeps the others out; a library that takes many has many."""
    mpi = Pretence("mpich", 3)

    def body(rank: int) -> None:
        ferry = mpi.ferry("mpich", rank, alone=alone)
        for _ in range(30):
            assert ferry.barrier(LIMIT_NS) == 0

    mpi.ferry("mpich", 0, alone=alone)
    together(3, body)
    assert (mpi.most_inside == 1) == alone


def test_what_makes_no_sense() -> None:
    """A port of another family or with other functions, a rank that is not there, a part too few: all are refused."""
    mpi = Pretence("mpich", 2)
    with pytest.raises(ValueError, match="openmpi or mpich"):
        _core.Port("lam", mpi.addresses, 0, False)
    with pytest.raises(ValueError, match="openmpi or mpich"):
        _core.Port("mpich", mpi.addresses[1:], 0, False)
    port = _core.Port("mpich", mpi.addresses, mpi.none, False)
    with pytest.raises(ValueError, match="Ferry"):
        _core.Ferry(port, 1, 5, 2, 2, 1, 1, -1)
    with pytest.raises(OSError, match="Invalid argument"):  # A wall that is too small would be a signal later.
        _core.Ferry(port, 0, 5, 0, 3, 1, 1, Pretence("mpich", 2, wall=True).wall)
    ferry = _core.Ferry(port, 0, 5, 0, 2, 1, 1, -1)
    with pytest.raises(ValueError, match="a part for each rank"):
        ferry.all_to_all((0, 0), (0, 0), F32, LIMIT_NS)
    assert not ferry.under_way


def test_data_that_does_not_fit_is_a_difference() -> None:
    """What MPI says of too long a message comes before the last record does, and is not what the ranks are told."""
    mpi = Pretence("openmpi", 3, wall=True)

    def body(rank: int) -> int:
        ferry = mpi.ferry("openmpi", rank)
        time.sleep(0.3 * (rank == 2))
        mine = torch.ones(3000 if rank else 2000)
        return ferry.all_reduce(*place(mine), F32, SUM, LIMIT_NS)

    assert together(3, body) == [4, 4, 4]
    assert mpi.truncated
