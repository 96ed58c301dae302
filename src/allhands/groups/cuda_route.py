"""The route of CUDA tensors in a group on one host: chosen at the first call with one, the same on every rank.

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
from .cuda_issue import CudaCalls

if TYPE_CHECKING:
    from ..engines.shm.fd_passing import FdPassing
    from .process_group import Group

__all__ = ["CudaRoute"]

# The values of ALLHANDS_CUDA; that of rank 0 counts.
_ROUTES = ("auto", "nccl", "cuda_ipc", "host")


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
