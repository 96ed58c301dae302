"""The engine of CUDA tensors, by whose GPUs the ranks use: several machines with several GPUs need not be there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import allhands
from allhands.groups.cuda_route import CudaRoute, _Offer


def choose(gpus: str, way: str = "auto", *, has_nccl: bool = True) -> str:
    """Return the route of ranks whose GPUs are the letters of ``gpus``."""
    group: Any = SimpleNamespace(ranks=list(range(len(gpus))), rank=lambda: 0)
    offers = [_Offer(gpu, way if not rank else "auto", f"cuda:{rank}", has_nccl) for rank, gpu in enumerate(gpus)]
    return CudaRoute(group, Any, 1.0)._choose(offers)


@pytest.mark.parametrize(
    ("gpus", "way"),
    [("ab", "nccl"), ("abcd", "nccl"), ("aa", "cuda_ipc"), ("aaaa", "cuda_ipc"), ("aab", "host"), ("aabb", "host")],
)
def test_the_gpus_decide(gpus: str, way: str) -> None:
    """One each: NCCL. One for all: its memory. Some shared, which NCCL refuses: the host's memory."""
    assert choose(gpus) == way


def test_without_nccl_the_host() -> None:
    """A torch without NCCL has no way between GPUs."""
    assert choose("ab", has_nccl=False) == "host"


@pytest.mark.parametrize(("gpus", "way"), [("aab", "nccl"), ("aa", "nccl"), ("aab", "cuda_ipc"), ("ab", "cuda_ipc")])
def test_a_way_that_does_not_fit_is_refused(gpus: str, way: str) -> None:
    """What rank 0's ALLHANDS_CUDA asks for and the GPUs cannot do is an error that names it."""
    with pytest.raises(allhands.AllhandsError, match=f"ALLHANDS_CUDA={way}"):
        choose(gpus, way)
