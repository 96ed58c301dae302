"""Gloo, between hosts and where shared memory is not available."""

__all__: list[str] = []
