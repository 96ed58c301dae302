"""Shared memory: collectives of the ranks of one host through one segment, at the speed of memory.

The segment is a memfd without a name, which rank 0 of the group makes and hands to the others; "one host" means that a
rank mapped it and read the nonce.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import ReduceOp, Store

from ... import _core, settings
from ...errors import fail
from .fd_passing import Handing, Handover, allocate, no_room, pid_namespace, require_room

__all__ = [
    "BESIDE",
    "CODES",
    "COMPLEX",
    "DTYPES",
    "KINDS",
    "LEAST_SLOT_KIB",
    "LINEAR",
    "MOST_RANKS",
    "ON_GPU",
    "PREMUL_SUM",
    "REDUCTIONS",
    "REDUCTION_NAMES",
    "Shm",
    "Trouble",
    "cores",
    "dtype_code",
    "dtype_of",
    "form",
    "kind_name",
    "parts",
    "reducible",
    "reduction_code",
]

# The least that a slot may have: room for a line and a size for each of the most ranks.
LEAST_SLOT_KIB = 64

# Beyond this the segment grows to a gigabyte, and one host hardly has the cores.
MOST_RANKS = _core.MOST_RANKS

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

# Not among the others: its factor comes with it, so that it is never known by its name alone.
PREMUL_SUM = 9

REDUCTION_NAMES = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

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
    "send",
    "recv",
)
# Above these: the same operation, agreed on here and then done by Gloo. No operation of the core has such a number.
BESIDE = 64
# And this: that the ranks' tensors are on a GPU, agreed on once before their first call there.
ON_GPU = 128
CODES = ("ok", "timeout", "dead", "aborted", "mismatch", "broken", "interrupted", "departed")


class Trouble(Exception):
    """A call that did not end well: how (one of CODES), and the group rank it is about."""

    def __init__(self, how: str, culprit: int) -> None:
        super().__init__(how, culprit)
        self.how, self.culprit = how, culprit


# Beside the number of a real type: the tensor is of the complex type with such parts. The core reduces the parts and
# compares the mark too.
COMPLEX = 0x100

# Reductions that may be done on the real and imaginary parts of complex numbers by themselves.
LINEAR = frozenset({1, 2, PREMUL_SUM})


def reducible(dtype: int, reduction: int) -> bool:
    """Tell whether the core can reduce ``dtype`` by ``reduction``."""
    return _core.reducible(dtype, reduction)


def dtype_code(dtype: torch.dtype) -> int:
    """Return the core's number for ``dtype``; those it cannot reduce are bytes to it."""
    return DTYPES.get(dtype) or _MOVED.get(dtype, _RAW)


def dtype_of(code: int) -> torch.dtype | None:
    """Return the type that `dtype_code` has a number for, None for one without a number of its own."""
    if code & COMPLEX:
        parts = dtype_of(code & ~COMPLEX)
        return parts.to_complex() if parts is not None else None
    return next((kind for kind, known in (DTYPES | _MOVED).items() if known == code), None)


def reduction_code(op: ReduceOp | ReduceOp.RedOpType) -> int:
    """Return the core's number for ``op``, 0 for one that it does not have."""
    for known, code in REDUCTIONS.items():
        if op == known:
            return code
    return PREMUL_SUM if op == ReduceOp.PREMUL_SUM else 0


# A forked child has its parent's segments and must not be taken for it: the short way is shut there. The long one
# looks for itself.
_LIVE: weakref.WeakSet[Shm] = weakref.WeakSet()


def _shut_in_child() -> None:
    for each in _LIVE:
        each.segment.shut = 1


os.register_at_fork(after_in_child=_shut_in_child)


def kind_name(kind: int) -> str:
    """Return what an operation is called."""
    if kind == ON_GPU:
        return "a collective of CUDA tensors"
    if BESIDE < kind < BESIDE + len(KINDS):
        return f"{KINDS[kind - BESIDE]} through Gloo"
    return KINDS[kind] if kind < len(KINDS) else f"operation {kind}"


class Shm:
    """One rank's end of a group's segment. One call at a time; addresses and sizes are the caller's to get right."""

    def __init__(
        self,
        segment: _core.Segment,
        size_bytes: int,
        pidfds: tuple[int, ...],
        pids: tuple[int, ...],
        handing: Handing,
    ) -> None:
        self.segment = segment
        self.mail = _core.Mail(segment)
        self.size_bytes = size_bytes
        # Of each rank, 0 where it means nothing here.
        self.pids = pids
        self.handing = handing
        self._shared_before = 0
        _LIVE.add(self)
        # The core looks at them as long as this lives; at exit the kernel closes them.
        weakref.finalize(self, _close, pidfds).atexit = False

    def window(self, size: int, timeout_s: float) -> _core.Window:
        """Make memory that all ranks share, ``size`` bytes for each. Every rank of the group calls this."""
        stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._shared(stride * len(self.pids), "a shared tensor", timeout_s) as descriptor:
            return _core.Window(self.segment, descriptor, stride)

    @contextlib.contextmanager
    def _shared(self, size: int, what: str, timeout_s: float) -> Iterator[int]:
        """Give the descriptor of ``size`` bytes that all ranks share, for ``what`` of theirs."""
        self._shared_before += 1
        make = functools.partial(_new_file, size=size, what=what)
        descriptor, _ = self.handing.share(f"window/{self._shared_before}", make, timeout_s)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def done(self, code: int) -> None:
        """Raise Trouble unless ``code`` says that all went well."""
        if code:
            raise Trouble(CODES[code], self.segment.culprit())


def form(store: Store, rank: int, ranks: int, timeout_s: float, check: Callable[[], None]) -> Shm:
    """Make or fetch the segment of a group and map it. Every rank of the group calls this; ends by the timeout.

    ``check`` is called now and then and raises where the group is over. Raises Apart, on every rank, where they
    cannot share memory.
    """
    handing = Handing(store, rank, ranks, check)
    descriptor, handover = handing.share("shm", _new_segment, timeout_s)
    try:
        pidfds = _pidfds(handover, rank)
        segment = _core.Segment(descriptor, handover.size, rank, handover.nonce, pidfds)
    finally:
        os.close(descriptor)
    segment.patience(*_patience(ranks))
    pids = tuple(handover.pids) if handover.namespace == pid_namespace() else (0,) * ranks
    segment.reach(pids)
    return Shm(segment, handover.size, pidfds, pids, handing)


def _slot_bytes() -> int:
    wanted = settings.read().slot_kib
    if wanted < LEAST_SLOT_KIB:
        raise fail(
            "invalid-argument",
            f"ALLHANDS_SLOT_KIB={wanted} is too little: a slot has to have {LEAST_SLOT_KIB} KiB at least",
            who=f"rank 0 of the group (pid {os.getpid()})",
            fix="raise it, or unset it for 1 MiB",
        )
    return wanted * 1024


def _hands(ranks: int) -> int:
    """Return how many threads each rank has beside the one that calls: as many as there are cores left for."""
    wanted = settings.read().hands
    if wanted >= 0:
        return min(wanted, _core.MOST_HANDS)
    return max(0, min(_core.MOST_HANDS, cores() // ranks - 1)) if ranks > 1 else 0


def _new_segment(ranks: int, nonce: bytes) -> tuple[int, int]:
    slot, hands = _slot_bytes(), _hands(ranks)
    size = _core.segment_bytes(ranks, slot, hands)
    what = f"the shared memory of a group of {ranks}"
    require_room(size, what)
    descriptor = os.memfd_create("allhands", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        _core.segment_format(descriptor, ranks, slot, nonce, hands)
    except OSError as problem:
        os.close(descriptor)
        raise no_room(size, what, f"the kernel refused the pages: {problem.strerror}") from problem
    return descriptor, size


def _new_file(ranks: int, _: bytes, size: int, what: str) -> tuple[int, int]:
    return allocate("allhands-window", size, f"{what} of {ranks} ranks"), size


def _close(pidfds: tuple[int, ...]) -> None:
    for pidfd in pidfds:
        if pidfd >= 0:
            os.close(pidfd)


def _patience(ranks: int) -> tuple[int, int]:
    """Return how often to look at a flag, and then to give the core away, before sleeping.

    Looking is fastest where every rank has a core, and a disaster where it keeps the awaited rank off its core.
    """
    return (2000, 50) if cores() >= ranks else (0, 50)


def cores() -> int:
    """Return how many cores this process may use: those it may run on, and no more than its control group's quota."""
    found = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        found = min(found, int(quota) // int(period))
    return found


def _pidfds(handover: Handover, rank: int) -> tuple[int, ...]:
    """Return a pidfd for each other rank; -1 where its number means nothing here (another pid namespace)."""
    found = [-1] * len(handover.pids)
    if handover.namespace == pid_namespace():
        for number, pid in enumerate(handover.pids):
            # One that ended since it fetched the memory: the coordinator tells of it.
            with contextlib.suppress(ProcessLookupError):
                found[number] = -1 if number == rank or not pid else os.pidfd_open(pid)
    return tuple(found)


def parts(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return addresses and sizes as the core takes them."""
    return tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor.nbytes))
