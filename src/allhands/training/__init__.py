"""Data-parallel training: DistributedDataParallel, SyncBatchNorm, samplers and metrics over all ranks."""

from __future__ import annotations

from .data.iterable_shard import shard_iterable
from .data.lengths import LengthGroupedBatches
from .data.sampler import DistributedSampler
from .ddp.ddp import DistributedDataParallel
from .ddp.gradients import GradientSync, average_gradients, sync_gradients
from .metrics import gather_metrics
from .norm.sync_batch_norm import SyncBatchNorm, revert_sync_batchnorm

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
