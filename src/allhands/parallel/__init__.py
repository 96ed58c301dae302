"""Training on a process group."""

from __future__ import annotations

from .norm import SyncBatchNorm, revert_sync_batchnorm

__all__ = ["SyncBatchNorm", "revert_sync_batchnorm"]
