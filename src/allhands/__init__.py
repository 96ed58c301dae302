"""Process groups for PyTorch that start in seconds or say why they cannot, and always clean up.

``import allhands as dist`` replaces ``import torch.distributed as dist``: every name that allhands does not define
is torch's. Names are imported on first use, so that tools which need no torch do not wait for its import.
"""

from __future__ import annotations

import importlib

from ._version import __version__

# Not imported from typing, which would delay the start of every worker; type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .errors import (
        AllhandsError,
        AlreadyDestroyed,
        AlreadyInitialised,
        ArgumentError,
        CollectiveMismatch,
        CollectiveTimeout,
        ConnectError,
        CoordinatorLost,
        EngineFailed,
        EngineMissing,
        GroupEnded,
        GroupStateError,
        NotInitialised,
        PeerFailed,
        PeerLost,
        PeerSilent,
        ResourceError,
        RollCallError,
        RollCallRefused,
        RollCallTimeout,
        SpawnFailed,
        StoreTimeout,
        TrainingError,
        WorldError,
    )
    from .groups.lifecycle import destroy_process_group, init_process_group, process_group
    from .groups.registered import empty, register
    from .launch.spawn.errors import SpawnExited, SpawnRaised
    from .launch.spawn.spawn import spawn
    from .observe.flight_recorder import board
    from .training import (
        DistributedDataParallel,
        DistributedSampler,
        LengthGroupedBatches,
        SyncBatchNorm,
        average_gradients,
        gather_metrics,
        revert_sync_batchnorm,
        shard_iterable,
        sync_gradients,
    )

    # isort: split
    from torch.distributed import *  # type: ignore[assignment]  # noqa: F403  # torch's, where not ours

__all__ = [
    "AllhandsError",
    "AlreadyDestroyed",
    "AlreadyInitialised",
    "ArgumentError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConnectError",
    "CoordinatorLost",
    "DistributedDataParallel",
    "DistributedSampler",
    "EngineFailed",
    "EngineMissing",
    "GroupEnded",
    "GroupStateError",
    "LengthGroupedBatches",
    "NotInitialised",
    "PeerFailed",
    "PeerLost",
    "PeerSilent",
    "ResourceError",
    "RollCallError",
    "RollCallRefused",
    "RollCallTimeout",
    "SpawnExited",
    "SpawnFailed",
    "SpawnRaised",
    "StoreTimeout",
    "SyncBatchNorm",
    "TrainingError",
    "WorldError",
    "__version__",
    "average_gradients",
    "board",
    "destroy_process_group",
    "empty",
    "gather_metrics",
    "init_process_group",
    "process_group",
    "register",
    "revert_sync_batchnorm",
    "shard_iterable",
    "spawn",
    "sync_gradients",
]

# name -> module that defines it; the exceptions are all in `errors`.
_HOMES = {
    "DistributedDataParallel": ".training",
    "DistributedSampler": ".training",
    "LengthGroupedBatches": ".training",
    "SpawnExited": ".launch.spawn.errors",
    "SpawnRaised": ".launch.spawn.errors",
    "SyncBatchNorm": ".training",
    "average_gradients": ".training",
    "board": ".observe.flight_recorder",
    "destroy_process_group": ".groups.lifecycle",
    "empty": ".groups.registered",
    "gather_metrics": ".training",
    "init_process_group": ".groups.lifecycle",
    "process_group": ".groups.lifecycle",
    "register": ".groups.registered",
    "revert_sync_batchnorm": ".training",
    "shard_iterable": ".training",
    "spawn": ".launch.spawn.spawn",
    "sync_gradients": ".training",
}
_ASKING = frozenset({"get_backend", "get_rank", "get_world_size"})


def __getattr__(name: str) -> Any:
    """Import ``name`` from allhands, otherwise from torch.distributed. The first use imports torch."""
    from importlib.util import find_spec

    if name.startswith("__"):
        raise AttributeError(name)
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    elif find_spec(f"{__name__}.{name}") is not None:  # `from allhands import cli` asks for the attribute first.
        return importlib.import_module(f".{name}", __name__)
    elif name in __all__:
        value = getattr(importlib.import_module(".errors", __name__), name)
    else:
        value = _from_torch(name)
    globals()[name] = value
    return value


def _from_torch(name: str) -> Any:
    collectives = importlib.import_module(".groups.collectives", __name__)
    torch_distributed = importlib.import_module("torch.distributed")
    if not hasattr(torch_distributed, name):
        raise AttributeError(f"neither allhands nor torch.distributed has {name!r}")
    if name in collectives.FAST_PATH:
        return collectives.fast_path(name)
    if name in collectives.GUARDED:
        return collectives.guarded(name)
    if name in _ASKING:
        return collectives.asking(name)
    if name == "P2POp":
        return collectives.P2POp
    return getattr(torch_distributed, name)


def __dir__() -> list[str]:
    torch_distributed = importlib.import_module("torch.distributed")
    return sorted({*__all__, *(name for name in dir(torch_distributed) if not name.startswith("_"))})
