"""Every engine that this machine has, as a fixture: a test of this folder runs once on each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.engines import CPU, OnEngine, available
from ranks import harness


@pytest.fixture(params=[*CPU, pytest.param("cuda_ipc", marks=pytest.mark.gpu)])
def any_engine(request: pytest.FixtureRequest, nursery: None) -> OnEngine:
    """Each engine, those of CUDA tensors too."""
    del nursery
    return available(request.param)


@pytest.fixture(params=CPU)
def engine(request: pytest.FixtureRequest, nursery: None) -> OnEngine:
    """Each engine of CPU tensors."""
    del nursery
    return available(request.param)


@pytest.fixture(scope="session")
def nursery() -> Iterator[None]:
    """Import torch once for all ranks of all tests; started before a test counts what it leaves behind."""
    harness.nursery()
    yield
    harness.forget_nursery()
