"""Which way the CUDA tensors of a group on one host go: found at its first call with one, the same on every rank.

With a GPU for each rank by NCCL (`engines.cuda.nccl`). Ranks that all use one GPU go through memory of it
(`engines.cuda.ipc`), where NCCL refuses. Where some share and some do not, and where the driver or a container does not
allow it, tensors go by way of the host's memory.
"""

from __future__ import annotations

import os
import socket
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from .. import _torch, settings
from ..engines.cuda import ipc, nccl
from ..engines.cuda.stream import StreamEngine, first_problem, share
from ..engines.dtypes import CUDA_CALL
from ..errors import fail
from .cuda_issue import Streamed

if TYPE_CHECKING:
    from ..engines.shm.fd_passing import FdPassing
    from .hostgroup import HostGroup

__all__ = ["Cards"]

# What ALLHANDS_CUDA may say; rank 0's word counts.
_WAYS = ("auto", "nccl", "cuda_ipc", "host")


class _Word(msgspec.Struct):
    """What a rank tells the others: its GPU, and which way it was asked to take."""

    gpu: str
    way: str
    device: str
    has_nccl: bool


class Cards:
    """The GPUs that this rank's tensors in a group were on so far, and the way of each."""

    def __init__(self, group: HostGroup, store: Store, timeout_s: float) -> None:
        self._group = group
        self._store = store
        self._timeout_s = timeout_s
        self._found: dict[torch.device, Streamed | None] = {}

    def find(self, device: torch.device) -> Streamed | None:
        """Return what issues the calls of ``device``, None where they go by way of the host's memory.

        Every rank of the group comes here at its first call with a tensor of a GPU that it has not used before.
        """
        if device not in self._found:
            self._found[device] = self._meet(device)
        return self._found[device]

    def all(self) -> list[Streamed]:
        """Return those that there are."""
        return [each for each in self._found.values() if each is not None]

    def _meet(self, device: torch.device) -> Streamed | None:
        group = self._group
        # A rank that is in a call of CPU tensors is told here, and nobody waits for it.
        group.agree(CUDA_CALL)
        store = PrefixStore(f"gpu/{len(self._found)}/", self._store)
        rank, numbers = group.rank(), group.ranks
        own = _Word(nccl.gpu(device), _way(), str(device), dist.is_nccl_available())
        store.set(f"rank/{rank}", msgspec.json.encode(own).decode())
        words = [msgspec.json.decode(store.get(f"rank/{each}"), type=_Word) for each in range(len(numbers))]
        way = self._choose(words)
        if way == "host":
            return None
        with torch.cuda.device(device):
            made = self._make(way, store, device)
        if isinstance(made, StreamEngine):
            return Streamed(group, made)
        if words[0].way != "auto":
            raise fail(
                "engine-failed",
                f"ALLHANDS_CUDA={way}, but CUDA tensors of this group cannot go that way",
                who=f"rank {numbers[rank]} ({socket.gethostname()}, pid {os.getpid()})",
                why=made,
                fix="unset ALLHANDS_CUDA; in containers, start them with --ipc=host and one pid namespace",
            )
        if rank == 0:
            warnings.warn(
                f"allhands: CUDA tensors go by way of the host's memory, which is slower: {made}", stacklevel=2
            )
        return None

    def _choose(self, words: list[_Word]) -> str:
        """Return the way that everyone takes, as rank 0 was asked to or as their GPUs are."""
        numbers, way = self._group.ranks, words[0].way
        different = len({word.gpu for word in words})
        able = {
            "cuda_ipc": different == 1,
            "nccl": different == len(words) and all(word.has_nccl for word in words),
            "host": True,
        }
        if way == "auto":
            return next(name for name in ("nccl", "cuda_ipc", "host") if able[name])
        if not able[way]:
            raise fail(
                "invalid-argument",
                f"ALLHANDS_CUDA={way} does not fit the GPUs of this group",
                who=", ".join(f"rank {number} {word.device}" for number, word in zip(numbers, words, strict=True)),
                why="cuda_ipc is for ranks that all use one GPU, nccl for a GPU each and a torch with NCCL",
                fix="unset ALLHANDS_CUDA, or see to each rank's torch.cuda.set_device",
            )
        return way

    def _make(self, way: str, store: Store, device: torch.device) -> StreamEngine | str:
        """Return what has the operations, or why there is none, the same on every rank."""
        group = self._group
        rank, ranks = group.rank(), group.size()
        key = f"lane/{len(self._found)}"
        counters, trouble = share(cast("FdPassing", group.engine.fd_passing), key, rank, group.ranks, self._timeout_s)
        trouble = first_problem(store, "flags", rank, ranks, trouble)
        if trouble or counters is None:
            return trouble
        if way == "cuda_ipc":
            return ipc.form(counters, store, rank, ranks, device)
        backend = _torch.nccl(PrefixStore("nccl/", store), rank, ranks, timedelta(seconds=self._timeout_s))
        return nccl.NcclEngine(counters, backend, rank, ranks, device)


def _way() -> str:
    asked = settings.read().cuda or "auto"
    if asked not in _WAYS:
        raise fail(
            "invalid-argument",
            f"ALLHANDS_CUDA={asked!r} names no way for CUDA tensors",
            who="this process's environment",
            fix=f"unset ALLHANDS_CUDA, or set it to {' or '.join(_WAYS)}",
        )
    return asked
