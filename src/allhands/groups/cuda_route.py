"""The route of CUDA tensors in a group on one host: chosen at the first call with one, the same on every rank.

With a GPU for each rank by NCCL (`engines.cuda.nccl`). Ranks that all use one GPU go through memory of it
(`engines.cuda.ipc`), where NCCL refuses. Where some share and some do not, and where the driver or a container does not
allow it, tensors go by way of the host's memory.

A call is issued on a stream. No thread waits for it on the host, so none would notice a missing rank. A thread checks
the calls under way: it compares what the ranks called, enforces each deadline, and releases the stream when the group
is over.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .. import _torch, settings
from ..engines.base import CallMismatch, EngineFailure, EngineTimeout
from ..engines.cuda import ipc, nccl
from ..engines.cuda.stream import StreamEngine, first_problem, share
from ..engines.dtypes import CUDA_CALL
from ..errors import AllhandsError, error, fail
from . import failure
from .staging import shapes
from .work import Operation

if TYPE_CHECKING:
    from ..engines.shm.fd_passing import FdPassing
    from .process_group import Group

__all__ = ["CudaCalls", "CudaRoute", "StreamWork"]

# The values of ALLHANDS_CUDA; that of rank 0 counts.
_ROUTES = ("auto", "nccl", "cuda_ipc", "host")

# How often to check the calls under way: a difference must be reported within a second, and checking costs time.
_POLL_S = 0.05

# How often to release a stream that was aborted: its next call waits for a number, too.
_RELEASE_S = 0.002

# How long rank 0 waits for the others to unmap its memory: they end their groups at about the same time.
_UNMAP_S = 0.5


class _Offer(msgspec.Struct):
    """What a rank publishes: its GPU, and the route that its setting asks for."""

    gpu: str
    route: str
    device: str
    has_nccl: bool


class CudaRoute:
    """The GPUs that this rank used in a group so far, and the engine of each."""

    def __init__(self, group: Group, store: Store, timeout_s: float) -> None:
        self._group = group
        self._store = store
        self._timeout_s = timeout_s
        self._found: dict[torch.device, CudaCalls | None] = {}

    def find(self, device: torch.device) -> CudaCalls | None:
        """Return what issues the calls of ``device``, None where its tensors go through host memory.

        Every rank of the group calls this at its first call with a tensor of a GPU that it has not used before.
        """
        if device not in self._found:
            self._found[device] = self._meet(device)
        return self._found[device]

    def all(self) -> list[CudaCalls]:
        """Return those of all GPUs used so far."""
        return [each for each in self._found.values() if each is not None]

    def _meet(self, device: torch.device) -> CudaCalls | None:
        group = self._group
        # A rank that is in a call of CPU tensors is found here to differ, instead of being waited for.
        group.compare_only(CUDA_CALL)
        store = PrefixStore(f"gpu/{len(self._found)}/", self._store)
        rank, numbers = group.rank(), group.ranks
        own = _Offer(nccl.gpu(device), _asked_route(), str(device), dist.is_nccl_available())
        store.set(f"rank/{rank}", msgspec.json.encode(own).decode())
        offers = [msgspec.json.decode(store.get(f"rank/{each}"), type=_Offer) for each in range(len(numbers))]
        route = self._choose(offers)
        if route == "host":
            return None
        with torch.cuda.device(device):
            made = self._make(route, store, device)
        if isinstance(made, StreamEngine):
            return CudaCalls(group, made)
        if offers[0].route != "auto":
            raise fail(
                "engine-failed",
                f"ALLHANDS_CUDA={route}, but CUDA tensors of this group cannot go that way",
                who=f"rank {numbers[rank]} ({socket.gethostname()}, pid {os.getpid()})",
                why=made,
                fix="unset ALLHANDS_CUDA; in containers, start them with --ipc=host and one pid namespace",
            )
        if rank == 0:
            warnings.warn(
                f"allhands: CUDA tensors go by way of the host's memory, which is slower: {made}", stacklevel=2
            )
        return None

    def _choose(self, offers: list[_Offer]) -> str:
        """Return the route for all ranks: what rank 0's setting asks for, or what their GPUs allow."""
        numbers, route = self._group.ranks, offers[0].route
        different = len({offer.gpu for offer in offers})
        able = {
            "cuda_ipc": different == 1,
            "nccl": different == len(offers) and all(offer.has_nccl for offer in offers),
            "host": True,
        }
        if route == "auto":
            return next(name for name in ("nccl", "cuda_ipc", "host") if able[name])
        if not able[route]:
            raise fail(
                "invalid-argument",
                f"ALLHANDS_CUDA={route} does not fit the GPUs of this group",
                who=", ".join(f"rank {number} {offer.device}" for number, offer in zip(numbers, offers, strict=True)),
                why="cuda_ipc is for ranks that all use one GPU, nccl for a GPU each and a torch with NCCL",
                fix="unset ALLHANDS_CUDA, or see to each rank's torch.cuda.set_device",
            )
        return route

    def _make(self, route: str, store: Store, device: torch.device) -> StreamEngine | str:
        """Return the engine, or why there is none, the same on every rank."""
        group = self._group
        rank, ranks = group.rank(), group.size()
        key = f"stream/{len(self._found)}"
        counters, trouble = share(cast("FdPassing", group.engine.fd_passing), key, rank, group.ranks, self._timeout_s)
        trouble = first_problem(store, "flags", rank, ranks, trouble)
        if trouble or counters is None:
            return trouble
        if route == "cuda_ipc":
            return ipc.form(counters, store, rank, ranks, device)
        backend = _torch.nccl(PrefixStore("nccl/", store), rank, ranks, timedelta(seconds=self._timeout_s))
        return nccl.NcclEngine(counters, backend, rank, ranks, device)


def _asked_route() -> str:
    asked = settings.read().cuda or "auto"
    if asked not in _ROUTES:
        raise fail(
            "invalid-argument",
            f"ALLHANDS_CUDA={asked!r} names no way for CUDA tensors",
            who="this process's environment",
            fix=f"unset ALLHANDS_CUDA, or set it to {' or '.join(_ROUTES)}",
        )
    return asked


# Calls on a stream ---------------------------------------------------------------------------------------------


@_torch.untraced
class StreamWork(Operation):
    """An operation on a stream. `wait` makes the current stream wait, not the caller, as with NCCL."""

    def __init__(self, calls: CudaCalls, event: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._calls = calls
        self._event = event

    def _finish_by(self, limit_s: float | None, /) -> bool:
        """Make the current stream wait for it. With a limit, the caller waits too, at most as long."""
        self._calls.check()
        torch.cuda.current_stream(self._calls.device).wait_event(self._event)
        if limit_s is None:
            return True
        until = time.monotonic() + limit_s
        while not self._event.query():
            self._calls.check()
            if time.monotonic() > until:
                return False
            time.sleep(_RELEASE_S)
        self._calls.check()
        return True

    @property
    def _problem(self) -> BaseException | None:  # type: ignore[override]
        return self._calls.problem

    def is_completed(self) -> bool:
        """Return whether the GPU has finished it."""
        return bool(self._event.query())

    def get_future(self) -> Any:
        """Return a future that is done once the operation is queued; its value is valid on that stream."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._calls.device])
        stream: Any = torch.cuda.Stream(self._calls.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            future.set_result(self._tensors)
        return future.then(lambda done: done.value())


@dataclass(slots=True)
class _Pending:
    """A call under way: its deadline, and what must stay alive until it is done."""

    name: str
    site: str
    number: int
    event: Any  # torch's annotations of it have no types
    began: float
    until: float
    kept: object


class CudaCalls:
    """The calls of a group on one GPU. They are issued in the same order on every rank."""

    def __init__(self, group: Group, engine: StreamEngine) -> None:
        self.device = engine.device
        self.problem: AllhandsError | None = None
        self._group = group
        self.engine = engine
        engine.check = self.check
        # Held while calls are issued or compared.
        self._call_lock = threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._issued = threading.Condition(threading.Lock())
        self._closed = False
        threading.Thread(target=self._watch, name="allhands-cuda", daemon=True).start()

    def check(self) -> None:
        """Raise what ended the group, if anything."""
        self._group.session.member.check()
        if self.problem is not None:
            raise self.problem

    def issue(  # noqa: PLR0917  # what a call is
        self, name: str, run: Callable[[], None], tensors: list[torch.Tensor], site: str, within_ns: int, number: int
    ) -> dist.Work:
        """Issue ``run`` on the stream, after the caller's stream; ``number`` is that of its recorder entry."""
        self.check()
        if torch.cuda.is_current_stream_capturing():
            raise fail(
                "invalid-argument",
                f"{name}: a collective of ranks that share a GPU cannot be captured in a CUDA graph",
                who="this process",
                why="each call waits for a number of its own, and a graph would wait for the same one again",
                fix="leave collectives out of the capture",
            )
        with self._call_lock, torch.cuda.device(self.device):
            engine, stream = self.engine, self.engine.stream
            engine.site, engine.shape = site, shapes(tensors)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            began, before = time.monotonic(), engine.sequence()
            try:
                with torch.cuda.stream(stream):
                    self._run(name, run, before, within_ns)
            except EngineTimeout:
                raise self._fail(self._late(name, site, began)) from None
            except EngineFailure as problem:
                raise self._fail(failure.of_group(self._group, problem, name, site)) from None
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._group.recorder.run(number, before)
        with self._issued:
            self._pending.append(_Pending(name, site, number, event, began, began + within_ns / 1e9, (run, tensors)))
            self._issued.notify()
        return StreamWork(self, event, tensors)

    def _run(self, name: str, run: Callable[[], None], before: int, within_ns: int) -> None:
        """Run ``run``. Where the call cannot begin here, report that to the other ranks, which would wait otherwise."""
        try:
            run()
        except EngineFailure:
            raise
        except Exception as problem:
            if self.engine.sequence() == before and self.problem is None and self._group.session.member.verdict is None:
                self.engine.refuse(name, failure.reason(problem), within_ns)
            raise

    def _late(self, name: str, site: str, began: float) -> AllhandsError:
        """Return the exception for a call that took too long."""
        before = self._group.session.enter(name, site, began)
        try:
            missing = self.engine.missing()
            return failure.of_group(self._group, EngineTimeout(culprit=missing[0] if missing else 0), name, site)
        finally:
            self._group.session.leave(before)

    def _fail(self, problem: AllhandsError) -> AllhandsError:
        self.problem = self.problem or problem
        return problem

    # Watching ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._issued:
                self._issued.wait_for(lambda: self._pending or self._closed)
            if not self._pending:
                return
            while self._pending and self._pending[0].event.query():
                done = self._pending.popleft()
                self._group.recorder.end(done.number, self.problem is None)
            self._note_verdict()
            if self.problem is not None:
                self.engine.abort(self._group.rank())
                time.sleep(_RELEASE_S)
                continue
            if self._call_lock.acquire(blocking=False):
                try:
                    self._check_calls()
                finally:
                    self._call_lock.release()
            time.sleep(_POLL_S)

    def _note_verdict(self) -> None:
        verdict = self._group.session.member.verdict
        if self.problem is None and verdict is not None:
            self._fail(error(verdict))

    def _check_calls(self) -> None:
        """Compare the calls and enforce the deadline. The next call raises; the stream is released at once."""
        if not self._pending:
            return
        first = self._pending[0]
        try:
            self.engine.compare()
        except CallMismatch as mismatch:
            self._fail(failure.of_group(self._group, mismatch, first.name, first.site))
            return
        if time.monotonic() > first.until:
            self._fail(self._late(first.name, first.site, first.began))

    # The end -----------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Release the stream: the group is over. The thread repeats that until the stream is empty."""
        self._note_verdict()
        self.engine.abort(self._group.rank())

    def _drain(self, within_s: float) -> bool:
        """Return whether all calls are done within ``within_s``."""
        until = time.monotonic() + within_s
        while self._pending and time.monotonic() < until:
            time.sleep(_RELEASE_S)
        return not self._pending

    def close(self, within_s: float) -> None:
        """Finish what is under way, and free the GPU's memory once the other ranks have unmapped it."""
        if not self._drain(within_s):
            # A rank is missing. The stream must be empty before the memory is freed.
            self._fail(fail("already-destroyed", "the group was shut down with calls under way"))
            self._drain(within_s)
        with self._issued:
            self._closed = True
            self._issued.notify()
        if self._pending:
            return  # The kernel frees it with the process.
        with torch.cuda.device(self.device):
            self.engine.close(_UNMAP_S)
