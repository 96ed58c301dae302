"""Communication hooks and distributed optimizers with our DistributedDataParallel, against torch's on Gloo."""

from __future__ import annotations

import pytest

from ranks.against_gloo import compare
from ranks.training import BEGIN, HOOKS

pytestmark = pytest.mark.usefixtures("fork_server")

TRIALS = (
    BEGIN
    + HOOKS
    + """
def try_hooks_of_torch():
    return [hooked(hook, cap_mb=0.001) for hook in (
        default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, bf16,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))]
"""
)


def test_hooks_equal_gloo() -> None:
    """Torch's hooks and a user's, ZeroRedundancyOptimizer and local SGD: the same bits with two ranks."""
    found = compare(TRIALS, 2)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 5
