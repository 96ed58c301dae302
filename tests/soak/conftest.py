"""The fixtures of tests/hosts, for the tests here."""

from __future__ import annotations

from hosts.conftest import cables, network

__all__ = ["cables", "network"]
