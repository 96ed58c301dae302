"""Which engine a group uses: what its caller asked for, else what the default group uses, else the setting.

torch knows our groups by one name, `allhands`. A backend that is an engine of ours is asked for by its own name, which
torch passes from the call to the making of the group as ``pg_options``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .. import settings
from ..errors import fail

__all__ = ["ENGINES", "chosen", "engine_of", "named", "new_group", "split"]

# Backends that are engines of ours: torch's own branch of that name refuses, or is not what is meant.
ENGINES = frozenset({"mpi"})

_SETTINGS = ("shm", "gloo", "mpi")


def split(backend: str | None) -> tuple[str | None, str]:
    """Return the backend as torch is to be told, and the engine of ours that it asks for, "" for none."""
    name = str(backend).lower() if backend is not None else ""
    if name in ENGINES:
        return "allhands", name
    for part in name.split(","):
        if part.rpartition(":")[2].strip() in ENGINES:
            raise fail(
                "invalid-argument",
                f"backend={backend!r}: mpi cannot be one of several backends of a group",
                who="this process",
                why="it takes the tensors of every device itself, those of a GPU by way of the host's memory",
                fix='pass backend="mpi" alone; tensors of a GPU go over NCCL in a group of their own: '
                'new_group(backend="nccl")',
            )
    return backend, ""


def engine_of(group: Any) -> str:
    """Return the name of the engine of ``group`` where it is one of `ENGINES`, else ""."""
    name = getattr(getattr(group, "engine", None), "name", "")
    return name if name in ENGINES else ""


def chosen(store: Store, rank: int, wanted: str) -> str:
    """Return the engine that the group's rank 0 asks for, by its caller (``wanted``, "" for any) or its setting.

    Ranks that went by their own settings might never meet.
    """
    if rank == 0:
        inherited = engine_of(dist.group.WORLD) if dist.is_initialized() else ""
        asked = wanted or inherited or settings.read().engine or "shm"
        if asked not in _SETTINGS:
            raise fail(
                "invalid-argument",
                f"ALLHANDS_ENGINE={asked!r} names no engine",
                who="this process's environment",
                fix="unset ALLHANDS_ENGINE, or set it to shm, gloo or mpi",
            )
        store.set("engine", asked)
    return str(store.get("engine").decode())


def new_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, one of torch's that makes groups, taking the names of our engines as backend= too."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kw: Any) -> Any:
        given = signature.bind(*args, **kw)
        backend, engine = split(given.arguments.get("backend"))
        if engine:
            given.arguments.update(backend=backend, pg_options=engine)
        return function(*given.args, **given.kwargs)

    return call


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `get_backend`, which answers with the engine's name where that is what was asked for."""

    @functools.wraps(function)
    def call(group: Any = None) -> Any:
        answer = function(group)
        return engine_of(group if group is not None else dist.group.WORLD) or answer

    return call
