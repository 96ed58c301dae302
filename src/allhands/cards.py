"""Which way the CUDA tensors of a group on one host go: found at its first call with one, the same on every rank.

Ranks that all use one GPU go through memory of it (`engines.cuda_ipc`), where NCCL refuses. Where the driver
or a container does not allow that, and where ranks use several GPUs, tensors go by way of the host's memory.
"""

from __future__ import annotations

import os
import socket
import warnings
from typing import TYPE_CHECKING

import msgspec
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from . import settings
from .engines import cuda_ipc, nccl, shm
from .errors import fail
from .streamed import Streamed

if TYPE_CHECKING:
    from .hostgroup import HostGroup

__all__ = ["Cards"]

# What ALLHANDS_CUDA may say; rank 0's word counts.
_WAYS = ("auto", "cuda_ipc", "host")


class _Word(msgspec.Struct):
    """What a rank tells the others: its GPU, and which way it was asked to take."""

    gpu: str
    way: str
    device: str


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
        group.agree(shm.ON_GPU)
        store = PrefixStore(f"gpu/{len(self._found)}/", self._store)
        rank, numbers = group.rank(), group.ranks
        own = _Word(nccl.gpu(device), _way(), str(device))
        store.set(f"rank/{rank}", msgspec.json.encode(own).decode())
        words = [msgspec.json.decode(store.get(f"rank/{each}"), type=_Word) for each in range(len(numbers))]
        shared = len({word.gpu for word in words}) == 1
        way = words[0].way
        if way == "host" or (way == "auto" and not shared):
            return None
        if not shared:
            told = ", ".join(f"rank {number} {word.device}" for number, word in zip(numbers, words, strict=True))
            raise fail(
                "invalid-argument",
                "ALLHANDS_CUDA=cuda_ipc, but the ranks of the group use several GPUs",
                who=f"ranks {numbers[0]} to {numbers[-1]}",
                why=told,
                fix="unset ALLHANDS_CUDA, or use one GPU: torch.cuda.set_device(0) on every rank",
            )
        with torch.cuda.device(device):
            made = cuda_ipc.form(store, group.engine.handing, rank, numbers, device, self._timeout_s)
        if isinstance(made, cuda_ipc.Card):
            return Streamed(group, made)
        if way == "cuda_ipc":
            raise fail(
                "engine-failed",
                "ALLHANDS_CUDA=cuda_ipc, but the ranks cannot share memory of their GPU",
                who=f"rank {numbers[rank]} ({socket.gethostname()}, pid {os.getpid()})",
                why=made,
                fix="unset ALLHANDS_CUDA; in containers, start them with --ipc=host and one pid namespace",
            )
        if rank == 0:
            warnings.warn(
                f"allhands: CUDA tensors go by way of the host's memory, which is slower: {made}", stacklevel=2
            )
        return None


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
