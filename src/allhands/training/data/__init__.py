"""Samplers and data loading positions."""

__all__: list[str] = []
