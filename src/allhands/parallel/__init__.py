"""Training on several ranks: what wraps a model, normalises over all ranks and deals the data to them."""

from __future__ import annotations

from .ddp import DistributedDataParallel
from .gradients import GradientSync, average_gradients, sync_gradients
from .lengths import LengthGroupedBatches
from .metrics import gather_metrics
from .norm import SyncBatchNorm, revert_sync_batchnorm
from .sampler import DistributedSampler
from .stream import shard_iterable

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "GradientSync",
    "LengthGroupedBatches",
    "SyncBatchNorm",
    "average_gradients",
    "gather_metrics",
    "revert_sync_batchnorm",
    "shard_iterable",
    "sync_gradients",
]
