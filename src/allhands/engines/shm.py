"""Shared memory: collectives of the ranks of one host through one segment, at the speed of memory.

The segment is a memfd without a name, sealed against resizing. Rank 0 of the group makes it and hands it to the
others over a Unix socket, which checks who they are; "one host" means that a rank mapped it and read the nonce.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch.distributed.distributed_c10d import ReduceOp, Store

from .. import _core
from ..control import credentials
from ..errors import fail

__all__ = [
    "CODES",
    "DTYPES",
    "KINDS",
    "LINEAR",
    "MOST_RANKS",
    "REDUCTIONS",
    "REDUCTION_NAMES",
    "SLOT_BYTES",
    "Shm",
    "Trouble",
    "dtype_code",
    "dtype_of",
    "form",
    "parts",
    "reducible",
    "reduction_code",
]

# One slot of one rank; four of them, so a group of n ranks takes 4 n MiB and a little. A tensor up to this size goes
# in one chunk.
SLOT_BYTES = 1 << 20

# How often to look whether the group is over while waiting for a rank to fetch the segment.
_LOOK_S = 0.1

# Beyond this the segment grows to a gigabyte, and one host hardly has the cores.
MOST_RANKS = 256

DTYPES: dict[torch.dtype, int] = {
    torch.uint8: 1,
    torch.int8: 2,
    torch.uint16: 3,
    torch.int16: 4,
    torch.uint32: 5,
    torch.int32: 6,
    torch.uint64: 7,
    torch.int64: 8,
    torch.bool: 9,
    torch.float16: 10,
    torch.bfloat16: 11,
    torch.float32: 12,
    torch.float64: 13,
}
_RAW = 14
# Types that are bytes to the core, by numbers that it only compares.
_MOVED = {
    kind: _RAW + 1 + index
    for index, kind in enumerate(
        getattr(torch, name)
        for name in (
            "complex32",
            "complex64",
            "complex128",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
        if hasattr(torch, name)
    )
}

REDUCTIONS = {
    ReduceOp.SUM: 1,
    ReduceOp.AVG: 2,
    ReduceOp.PRODUCT: 3,
    ReduceOp.MIN: 4,
    ReduceOp.MAX: 5,
    ReduceOp.BAND: 6,
    ReduceOp.BOR: 7,
    ReduceOp.BXOR: 8,
}

REDUCTION_NAMES = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

# What the C core calls its operations and how they end.
KINDS = (
    "",
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
CODES = ("ok", "timeout", "dead", "aborted", "mismatch", "broken", "interrupted", "departed")


@dataclass(frozen=True, slots=True)
class Trouble(Exception):
    """A call that did not end well: how (one of CODES), and the group rank it is about."""

    how: str
    culprit: int


# Reductions that may be done on the real and imaginary parts of complex numbers by themselves.
LINEAR = frozenset({1, 2})


def reducible(dtype: int, reduction: int) -> bool:
    """Tell whether the core can reduce ``dtype`` by ``reduction``."""
    return _core.reducible(dtype, reduction)


def dtype_code(dtype: torch.dtype) -> int:
    """Return the core's number for ``dtype``; those it cannot reduce are bytes to it."""
    return DTYPES.get(dtype) or _MOVED.get(dtype, _RAW)


def dtype_of(code: int) -> torch.dtype | None:
    """Return the type that `dtype_code` has a number for, None for one without a number of its own."""
    return next((kind for kind, known in (DTYPES | _MOVED).items() if known == code), None)


def reduction_code(op: ReduceOp | ReduceOp.RedOpType) -> int:
    """Return the core's number for ``op``, 0 for one that it does not have."""
    for known, code in REDUCTIONS.items():
        if op == known:
            return code
    return 0


class Shm:
    """One rank's end of a group's segment. One call at a time; addresses and sizes are the caller's to get right."""

    def __init__(self, segment: _core.Segment, size_bytes: int, pidfds: tuple[int, ...]) -> None:
        self.segment = segment
        self.size_bytes = size_bytes
        # The core looks at them as long as this lives; at exit the kernel closes them.
        weakref.finalize(self, _close, pidfds).atexit = False

    def done(self, code: int) -> None:
        """Raise Trouble unless ``code`` says that all went well."""
        if code:
            raise Trouble(CODES[code], self.segment.culprit())


class _Greeting(msgspec.Struct):
    """What a rank tells the one that hands out the segment."""

    rank: int
    namespace: int


class _Handover(msgspec.Struct):
    """What comes with the segment: its size, its nonce, and everyone's process as this namespace numbers them."""

    size: int
    nonce: bytes
    pids: list[int]
    namespace: int


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def form(store: Store, rank: int, ranks: int, timeout_s: float, check: Callable[[], None]) -> Shm:
    """Make or fetch the segment of a group and map it. Every rank of the group calls this; ends by the timeout.

    ``check`` is called now and then and raises where the group is over.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        descriptor, handover = _hand_out(store, ranks, deadline, check)
    else:
        descriptor, handover = _fetch(store, rank, deadline)
    pidfds = _pidfds(handover, rank)
    try:
        segment = _core.Segment(descriptor, handover.size, rank, handover.nonce, pidfds)
    finally:
        os.close(descriptor)
    segment.patience(*_patience(ranks))
    return Shm(segment, handover.size, pidfds)


def _close(pidfds: tuple[int, ...]) -> None:
    for pidfd in pidfds:
        if pidfd >= 0:
            os.close(pidfd)


def _patience(ranks: int) -> tuple[int, int]:
    """Return how often to look at a flag, and then to give the core away, before sleeping.

    Looking is fastest where every rank has a core, and a disaster where it keeps the awaited rank off its core.
    """
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) // int(period))
    return (2000, 50) if cores >= ranks else (0, 50)


def _pidfds(handover: _Handover, rank: int) -> tuple[int, ...]:
    """Return a pidfd for each other rank; -1 where its number means nothing here (another pid namespace)."""
    if handover.namespace != _pid_namespace():
        return (-1,) * len(handover.pids)
    return tuple(-1 if number == rank or not pid else os.pidfd_open(pid) for number, pid in enumerate(handover.pids))


def _hand_out(store: Store, ranks: int, deadline: float, check: Callable[[], None]) -> tuple[int, _Handover]:
    """Make the segment and give it to every other rank."""
    size = _core.segment_bytes(ranks, SLOT_BYTES)
    nonce = secrets.token_bytes(16)
    descriptor = os.memfd_create("allhands", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        _core.segment_format(descriptor, ranks, SLOT_BYTES, nonce)
    except OSError as problem:
        os.close(descriptor)
        raise fail(
            "shm-too-small",
            f"there is no room for the {size / 2**20:.0f} MiB of shared memory of a group of {ranks}",
            who=f"rank 0 of the group ({socket.gethostname()}, pid {os.getpid()})",
            why=f"the kernel refused the pages: {problem.strerror}",
            fix="free memory, or raise the memory limit of the container or cgroup",
            ranks=(0,),
        ) from problem
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    name = f"allhands-shm-{secrets.token_hex(12)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + name)
        listener.listen(ranks)
        store.set("shm", name)
        guests: dict[int, socket.socket] = {}
        pids = [0] * ranks
        pids[0] = os.getpid()
        own = _pid_namespace()
        try:
            while len(guests) < ranks - 1:
                guest = _accept(listener, deadline, check)
                pid, uid = credentials.peer(guest)
                if uid not in {os.getuid(), 0}:
                    guest.close()
                    continue
                guest.settimeout(max(0.01, deadline - time.monotonic()))
                greeting = msgspec.msgpack.decode(guest.recv(256), type=_Greeting)
                guests[greeting.rank] = guest
                pids[greeting.rank] = pid if greeting.namespace == own else 0
            handover = _Handover(size, nonce, pids, own)
            for guest in guests.values():
                socket.send_fds(guest, [msgspec.msgpack.encode(handover)], [descriptor])
        finally:
            for guest in guests.values():
                guest.close()
    return descriptor, handover


def _accept(listener: socket.socket, deadline: float, check: Callable[[], None]) -> socket.socket:
    while True:
        check()
        listener.settimeout(max(0.01, min(_LOOK_S, deadline - time.monotonic())))
        try:
            return listener.accept()[0]
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise


def _fetch(store: Store, rank: int, deadline: float) -> tuple[int, _Handover]:
    """Get the segment from rank 0 of the group."""
    name = store.get("shm").decode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        sock.connect("\0" + name)
        _, uid = credentials.peer(sock)
        if uid not in {os.getuid(), 0}:
            raise PermissionError("the segment is offered by another user's process")
        sock.send(msgspec.msgpack.encode(_Greeting(rank, _pid_namespace())))
        body, descriptors, _, _ = socket.recv_fds(sock, 65536, 1)
    if not descriptors:
        raise ConnectionError("rank 0 of the group went away before it handed out the segment")
    return descriptors[0], msgspec.msgpack.decode(body, type=_Handover)


def parts(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return addresses and sizes as the core takes them."""
    return tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor.nbytes))
