"""The nursery that ranks are forked from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import harness


@pytest.fixture(scope="session")
def nursery() -> Iterator[None]:
    """Have torch imported once for all ranks of all tests; started before a test counts what it leaves behind."""
    harness.nursery()
    yield
    harness.forget_nursery()
