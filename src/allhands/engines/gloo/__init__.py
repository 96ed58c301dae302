"""Gloo, between hosts and where shared memory is not available."""

from __future__ import annotations

__all__: list[str] = []
