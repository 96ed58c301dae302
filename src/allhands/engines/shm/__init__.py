"""Shared memory of one host."""

from __future__ import annotations

__all__: list[str] = []
