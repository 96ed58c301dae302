"""The nursery that ranks are forked from, and the laboratory of hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hosts.conftest import cables, network
from ranks import harness

__all__ = ["cables", "network", "nursery"]


@pytest.fixture(scope="session")
def nursery() -> Iterator[None]:
    """Have torch imported once for all ranks of all tests; started before a test counts what it leaves behind."""
    harness.nursery()
    yield
    harness.forget_nursery()
