"""SyncBatchNorm."""

__all__: list[str] = []
