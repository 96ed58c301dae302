"""Shared memory: collectives of the ranks of one host through one memory segment, at memory speed.

The segment is an anonymous memfd that rank 0 of the group creates and sends to the others. "One host" means that a
rank mapped it and read its nonce.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from ... import _core, settings
from ...errors import fail
from ..base import (
    CallMismatch,
    Capabilities,
    Engine,
    EngineAborted,
    EngineFailure,
    EngineTimeout,
    MessageMismatch,
    PeerDead,
    PeerLeft,
    TransportFailure,
)
from .fd_passing import FdPassing, Handover, allocate, pid_namespace

__all__ = ["MAX_RANKS", "MIN_SLOT_KIB", "ShmEngine", "cores", "form", "spare_threads"]

# Room for a fingerprint and a size for each of MAX_RANKS ranks.
MIN_SLOT_KIB = 64

# Above this the segment would take a gigabyte, and hardly any host has the cores.
MAX_RANKS = _core.MAX_RANKS

# How a call of the core ends, by its return code.
_FAILURES: dict[int, type[EngineFailure]] = {
    _core.OUTCOMES["timeout"]: EngineTimeout,
    _core.OUTCOMES["dead"]: PeerDead,
    _core.OUTCOMES["aborted"]: EngineAborted,
    _core.OUTCOMES["invalid"]: TransportFailure,
    _core.OUTCOMES["interrupted"]: EngineAborted,
    _core.OUTCOMES["left"]: PeerLeft,
}
_MISMATCH = _core.OUTCOMES["mismatch"]

# A forked child has its parent's segments and must not be taken for it: its fast path is disabled there. The slow path
# checks the process.
_LIVE: weakref.WeakSet[ShmEngine] = weakref.WeakSet()


def _disable_fast_path_in_child() -> None:
    for each in _LIVE:
        each.segment.fast_path_closed = 1


os.register_at_fork(after_in_child=_disable_fast_path_in_child)


def _raising(name: str) -> Callable[..., None]:
    """Return an operation of `Engine`: that of the segment, whose outcome is raised where it is not 0."""

    def operation(self: ShmEngine, *args: Any) -> None:
        if code := getattr(self.segment, name)(*args):
            raise self.failure(code)

    return operation


class ShmEngine(Engine):
    """One rank's view of a group's segment."""

    name = "shm"
    capabilities = Capabilities(p2p=True, shared_tensors=True, tensor_lists=True, one_host=True)
    fast_path: _core.Segment
    p2p: _core.P2P
    fd_passing: FdPassing

    def __init__(  # noqa: PLR0917  # what a segment needs
        self,
        segment: _core.Segment,
        rank: int,
        nbytes: int,
        pidfds: tuple[int, ...],
        pids: tuple[int, ...],
        fd_passing: FdPassing,
    ) -> None:
        self.segment = self.fast_path = segment
        self.p2p = _core.P2P(segment)
        self._rank = rank
        self.segment_nbytes = nbytes
        # Of each rank; 0 where the rank is in another pid namespace.
        self.pids = pids
        self.fd_passing = fd_passing
        self._windows = 0
        _LIVE.add(self)
        # The core polls them as long as this object lives. At exit the kernel closes them.
        weakref.finalize(self, _close, pidfds).atexit = False

    def sequence(self) -> int:
        """Return the number of the next call."""
        return self.segment.sequence()

    barrier = _raising("barrier")
    all_reduce = _raising("all_reduce")
    all_reduce_list = _raising("all_reduce_list")
    reduce = _raising("reduce")
    broadcast = _raising("broadcast")
    all_gather = _raising("all_gather")
    gather = _raising("gather")
    scatter = _raising("scatter")
    reduce_scatter = _raising("reduce_scatter")
    all_to_all = _raising("all_to_all")
    compare_only = _raising("compare_only")

    def failure(self, code: int, culprit: int | None = None) -> EngineFailure:
        """Return the failure for an outcome of the core, about ``culprit`` or the rank that the core names."""
        culprit = self.segment.culprit() if culprit is None else culprit
        if code != _MISMATCH:
            return _FAILURES[code](culprit=culprit)
        odd = self.p2p.mismatch()
        message = MessageMismatch(*odd) if odd is not None else None
        return CallMismatch(culprit=culprit, message=message, found_here=bool(self.segment.found_mismatch))

    def missing(self) -> list[int]:
        """Return the ranks that have not begun this rank's current call."""
        own = self.segment.call(self._rank)[0]
        return [rank for rank in range(len(self.pids)) if self.segment.call(rank)[0] != own]

    def abort(self, rank: int) -> None:
        """End every call under way."""
        self.segment.end(rank)
        self.p2p.wake_all()

    def close(self, within_s: float) -> None:
        """Make no further call: peers that wait for one raise PeerLeft."""
        del within_s
        self.segment.leave()

    def window(self, nbytes: int, timeout_s: float) -> _core.Window:
        """Create memory that all ranks map, ``nbytes`` for each. Every rank of the group calls this."""
        stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._windows += 1

        def create(ranks: int, _: bytes) -> int:
            return allocate("allhands-window", stride * ranks, f"a shared tensor of {ranks} ranks")

        descriptor, _ = self.fd_passing.share(f"window/{self._windows}", create, timeout_s)
        try:
            return _core.Window(self.segment, descriptor, stride)
        finally:
            os.close(descriptor)


def form(store: Store, rank: int, ranks: int, timeout_s: float, check: Callable[[], None]) -> ShmEngine:
    """Create or fetch the segment of a group and map it. Every rank of the group calls this.

    ``check`` is called now and then and raises where the group is over. Raises Apart, on every rank, where they cannot
    share memory.
    """
    fd_passing = FdPassing(store, rank, ranks, check)
    descriptor, handover = fd_passing.share("shm", _new_segment, timeout_s)
    try:
        pidfds = _pidfds(handover, rank)
        segment = _core.Segment(descriptor, handover.size, rank, handover.nonce, pidfds)
    finally:
        os.close(descriptor)
    segment.set_wait_policy(*_wait_policy(ranks))
    pids = tuple(handover.pids) if handover.namespace == pid_namespace() else (0,) * ranks
    segment.enable_single_copy(pids)
    return ShmEngine(segment, rank, handover.size, pidfds, pids, fd_passing)


def _slot_bytes() -> int:
    wanted = settings.read().slot_kib
    if wanted < MIN_SLOT_KIB:
        raise fail(
            "invalid-argument",
            f"ALLHANDS_SLOT_KIB={wanted} is too little: a slot has to have {MIN_SLOT_KIB} KiB at least",
            who=f"rank 0 of the group (pid {os.getpid()})",
            fix="raise it, or unset it for 1 MiB",
        )
    return wanted * 1024


def _helper_threads(ranks: int) -> int:
    """Return the helper threads of each rank: the setting, or one per core that no rank uses."""
    wanted = settings.read().helper_threads
    return min(wanted, _core.MAX_HELPER_THREADS) if wanted >= 0 else spare_threads(ranks, cores())


def spare_threads(ranks: int, available: int) -> int:
    """Return how many of `available` cores each rank has beside its own, at most as many as a segment has room for."""
    return max(0, min(_core.MAX_HELPER_THREADS, available // ranks - 1)) if ranks > 1 else 0


def _new_segment(ranks: int, nonce: bytes) -> int:
    slot, threads = _slot_bytes(), _helper_threads(ranks)
    size = _core.segment_bytes(ranks, slot, threads)
    descriptor = allocate("allhands", size, f"the shared memory of a group of {ranks}")
    _core.segment_format(descriptor, ranks, slot, nonce, threads)
    return descriptor


def _close(pidfds: tuple[int, ...]) -> None:
    for pidfd in pidfds:
        if pidfd >= 0:
            os.close(pidfd)


def _wait_policy(ranks: int) -> tuple[int, int]:
    """Return how often a wait polls, and then yields, before it sleeps.

    Polling is fastest where every rank has a core; elsewhere it keeps the awaited rank off its core.
    """
    return (2000, 50) if cores() >= ranks else (0, 50)


def cores() -> int:
    """Return how many cores this process may use: by its affinity and by the quota of its cgroup."""
    found = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        found = min(found, int(quota) // int(period))
    return found


def _pidfds(handover: Handover, rank: int) -> tuple[int, ...]:
    """Return a pidfd for each other rank; -1 where its pid has no meaning here (another pid namespace)."""
    found = [-1] * len(handover.pids)
    if handover.namespace == pid_namespace():
        for number, pid in enumerate(handover.pids):
            # A rank that ended since it fetched the memory: the coordinator reports it.
            with contextlib.suppress(ProcessLookupError):
                found[number] = -1 if number == rank or not pid else os.pidfd_open(pid)
    return tuple(found)
