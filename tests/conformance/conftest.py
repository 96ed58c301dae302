"""Every engine that this machine has, as a fixture: a test of this folder runs once on each."""

from __future__ import annotations

import pytest

from conformance.engines import CPU, OnEngine, available


@pytest.fixture(params=[*CPU, pytest.param("cuda_ipc", marks=pytest.mark.gpu)])
def any_engine(request: pytest.FixtureRequest, fork_server: None) -> OnEngine:
    """Each engine, those of CUDA tensors too."""
    del fork_server
    return available(request.param)


@pytest.fixture(params=CPU)
def engine(request: pytest.FixtureRequest, fork_server: None) -> OnEngine:
    """Each engine of CPU tensors."""
    del fork_server
    return available(request.param)
