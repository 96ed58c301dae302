"""The laboratory of hosts, for the tests here too."""

from __future__ import annotations

from hosts.conftest import cables, network

__all__ = ["cables", "network"]
