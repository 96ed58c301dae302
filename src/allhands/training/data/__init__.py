"""Samplers and data loading positions."""

from __future__ import annotations

__all__: list[str] = []
