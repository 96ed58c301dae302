"""DistributedDataParallel and gradient averaging."""

from __future__ import annotations

__all__: list[str] = []
