"""Shared memory inside each host, TCP between hosts."""

from __future__ import annotations

__all__: list[str] = []
