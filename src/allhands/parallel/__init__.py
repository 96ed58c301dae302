"""Training on a process group: batch normalisation and samplers that know about the other ranks."""

from __future__ import annotations

from .lengths import LengthGroupedBatches
from .metrics import gather_metrics
from .norm import SyncBatchNorm, revert_sync_batchnorm
from .sampler import DistributedSampler
from .stream import shard_iterable

__all__ = [
    "DistributedSampler",
    "LengthGroupedBatches",
    "SyncBatchNorm",
    "gather_metrics",
    "revert_sync_batchnorm",
    "shard_iterable",
]
