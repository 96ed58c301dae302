"""NCCL as the engine of CUDA tensors on the backend `allhands`, with a GPU for each rank.

With one GPU there is one rank; several ranks make the same calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.engines import FORM, OnEngine, check
from conformance.test_operations import test_random_operations_agree_with_a_model as run_random_operations
from ranks import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda finds no GPU on this machine"),
]


@pytest.fixture(autouse=True)
def _by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors on the GPU where a test names no device, and let NCCL move them."""
    start = harness.start

    def on_gpu(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        threads = "torch.set_num_threads(1)\n"
        source = source.replace(threads, threads + 'torch.set_default_device("cuda:0")\n')
        kw = {"fresh": True, **kw, "timeout": max(180, kw.get("timeout", 0))}
        return start(source, ranks, {"ALLHANDS_CUDA": "nccl", **(env or {})}, **kw)

    monkeypatch.setattr(harness, "start", on_gpu)


def test_random_operations_agree_with_a_model() -> None:
    """Random operations on random types and sizes agree with a model computed from all ranks' data."""
    run_random_operations(OnEngine("nccl", begin=harness.start), 1)


def test_every_reduction_and_what_it_is_done_by() -> None:
    """Reductions with and without NCCL's support work; the engine is the requested one."""
    results = harness.launch(
        FORM
        + """
for kind in (torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.complex64):
    for name in ("SUM", "MAX", "BXOR", "AVG"):
        x = (torch.arange(1000) % 3).to(kind)
        try:
            dist.all_reduce(y := x.clone(), op=getattr(dist.ReduceOp, name))
        except (dist.ArgumentError, ValueError):  # torch refuses some of complex numbers itself
            continue
        assert torch.equal(x, y), (kind, name)
work = dist.all_reduce(torch.ones(5), async_op=True)
work.wait()
torch.cuda.synchronize()
say(way=dist.group.WORLD._route([x]).engine.name, done=work.is_completed())
z = torch.ones(3, device="cpu")
dist.all_reduce(z)
dist.destroy_process_group()
""",
        1,
    )
    check(results)
    assert results[0]["way"] == "nccl"
    assert results[0]["done"]


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """With nccl requested, ranks that share a GPU get gpu-shared on every rank, with the alternative."""
    results = harness.launch(
        FORM + "say(found=attempt(lambda: dist.all_reduce(torch.ones(3))))",
        2,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "invalid-argument"
        assert "ALLHANDS_CUDA" in result["found"]["text"]
