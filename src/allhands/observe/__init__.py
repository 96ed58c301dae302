"""Observation of ranks from inside and outside: the flight recorder and stacks."""

from __future__ import annotations

__all__: list[str] = []
