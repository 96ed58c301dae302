"""Shared memory of one host."""

__all__: list[str] = []
