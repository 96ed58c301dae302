"""Memory of a model in training, in processes of its own."""

from __future__ import annotations

import pytest

from allhands.bench.config import DdpConfig
from allhands.bench.training import memory

pytest.importorskip("allhands._core", reason="the C core is built on Linux only")

# Of the MLP: parameters and as many gradients, on each of 2 ranks.
_MODEL_BYTES = 2 * 2 * 7 << 20


def test_memory_is_that_of_model_and_gradients() -> None:
    """It is no less than both on all ranks, and what shared memory and imports take is not in it."""
    found = memory(DdpConfig(2, ("mlp",), 1), "allhands")
    assert _MODEL_BYTES < found["mlp"] < 3 * _MODEL_BYTES
