"""Ranks as children of the calling program: `allhands.spawn`."""

from __future__ import annotations

__all__: list[str] = []
