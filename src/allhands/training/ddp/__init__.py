"""DistributedDataParallel and gradient averaging."""

__all__: list[str] = []
