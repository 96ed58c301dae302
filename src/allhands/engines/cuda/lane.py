"""A stream of a GPU into which the ranks of a group put the same calls, each telling the others of it.

What the engines of CUDA tensors have in common: the calls are compared (`engines.flags`), by whoever comes last and by
those who watch, and nobody waits on the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from .. import fingerprint
from ..gloo.engine import Difference
from ..shm import engine as shm
from ..shm.fd_passing import Handing
from . import driver
from .flags import Flags, region_bytes

__all__ = ["Lane", "agree", "at", "share"]

_KINDS = {name: kind for kind, name in enumerate(shm.KINDS)}


class _Raw:
    """Memory of the GPU as torch takes it from others (the CUDA array interface)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the ``size`` bytes of ``device`` at ``address`` as a tensor."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Raw(address, size), device=device)


class Lane:
    """One rank's end. One call at a time."""

    def __init__(self, flags: Flags, rank: int, ranks: int, device: torch.device) -> None:
        self.site = ""
        self.shape = ""
        # Called while waiting for others; raises where the group is over.
        self.check: Callable[[], None] = lambda: None
        self.flags = flags
        self.device = device
        self._rank = rank
        self._ranks = ranks
        self._context = driver.context()
        self._own = driver.Stream()
        self.stream = torch.cuda.ExternalStream(self._own.number, device=device)  # type: ignore[no-untyped-call]
        self._call = 0

    def sequence(self) -> int:
        """Return the number of the next call."""
        return self._call

    def _parts(self, places: tuple[int, ...] | None) -> list[torch.Tensor]:
        places = places or ()
        return [at(places[index], places[index + 1], self.device) for index in range(0, len(places), 2)]

    def _end(self) -> int:
        self._call += 1
        return 0

    def release(self) -> None:
        """Let go whatever waits in the stream: the group is over. To be repeated until the stream is empty."""
        self.flags.release()

    def close(self, within_s: float) -> None:
        """Let go of what is shared, once the stream is empty, and wait for others at most ``within_s``."""
        del within_s
        driver.enter(self._context)
        self.flags.close()
        self._own.close()

    # Telling -----------------------------------------------------------------------------------------------

    def _tell(
        self,
        name: str,
        limit_ns: int,
        size: int,
        gives: Sequence[int] = (),
        takes: Sequence[int] = (),
        **what: Any,
    ) -> None:
        """Tell everyone of this call; raise Difference where others have told of another one.

        ``gives`` and ``takes``, the bytes for and from each rank, are told where they may differ from rank to rank.
        """
        call = fingerprint.Call(
            self._call, _KINDS[name], size, uneven=bool(gives), shape=self.shape, site=self.site, **what
        )
        self._post(call, [*gives, *takes], limit_ns)

    def refuse(self, name: str, why: str, limit_ns: int) -> None:
        """Tell the others that this rank cannot make its call; raise Difference where one of them can."""
        words = why or "it did not say why"
        call = fingerprint.Call(self._call, _KINDS.get(name, 0), shape=self.shape, site=self.site, refused=words)
        self._post(call, [], limit_ns)
        self._meet(limit_ns)
        self._end()

    def _post(self, call: fingerprint.Call, sizes: Sequence[int], limit_ns: int) -> None:
        driver.enter(self._context)
        judgement = self.flags.tell(call, sizes, time.monotonic() + limit_ns / 1e9, self.check)
        if judgement is not None:
            raise Difference(judgement)

    def _meet(self, limit_ns: int) -> None:
        judgement = self.flags.meet(time.monotonic() + limit_ns / 1e9, self.check)
        if judgement is not None:
            raise Difference(judgement)

    def compare(self) -> None:
        """Raise Difference where others have told of other calls than this rank, since it told of its own."""
        judgement = self.flags.compare()
        if judgement is not None:
            raise Difference(judgement)

    def behind(self) -> int | None:
        """Return a rank of the group that has told of fewer calls than this one, None where there is none."""
        mine = self.flags.told(self._rank)
        return next((rank for rank in range(self._ranks) if self.flags.told(rank) < mine), None)


def share(handing: Handing, key: str, rank: int, numbers: Sequence[int], timeout_s: float) -> tuple[Flags | None, str]:
    """Make the memory in which ranks tell each other; every rank of the group calls this, with a ``key`` of its own.

    Returns it, or why the GPU cannot reach it on this rank.
    """

    def make(ranks: int, _: bytes) -> tuple[int, int]:
        size = region_bytes(ranks) * ranks
        descriptor = os.memfd_create("allhands-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        return descriptor, size

    descriptor, _ = handing.share(key, make, timeout_s)
    try:
        return Flags(descriptor, rank, numbers), ""
    except driver.DriverError as problem:
        return None, str(problem)
    finally:
        os.close(descriptor)


def agree(store: Store, key: str, rank: int, ranks: int, trouble: str) -> str:
    """Return the first trouble that any rank has, "" for none; the same on every rank, each of which calls this."""
    store.set(f"{key}/{rank}", trouble)
    told = [store.get(f"{key}/{each}").decode() for each in range(ranks)]
    return next((f"rank {each} of the group: {words}" for each, words in enumerate(told) if words), "")
