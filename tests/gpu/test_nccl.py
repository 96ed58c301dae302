"""NCCL under the roll call, on a real GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from ranks import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda finds no GPU on this machine"),
]


def test_a_group_of_one_forms_and_ends_on_nccl() -> None:
    """backend="nccl" forms through our store, reduces a CUDA tensor, and ends; torch's state has the backend nccl."""
    (only,) = harness.launch(
        """
        import torch
        import allhands as dist

        with dist.process_group("nccl", rank=0, world_size=1, timeout=60, device_id=torch.device("cuda", 0)):
            x = torch.full((4,), 3.0, device="cuda")
            dist.all_reduce(x)
            dist.barrier()
            say(backend=dist.get_backend(), value=x.tolist())
        say(left=dist.is_initialized())
        """,
        1,
        fresh=True,
        timeout=120,
    )
    assert only.returncode == 0, only.stderr
    assert only["backend"] == "nccl"
    assert only["value"] == [3.0] * 4
    assert only["left"] is False


def test_default_backend_serves_cpu_and_cuda() -> None:
    """With no backend named, CPU tensors go by Gloo and CUDA tensors by NCCL in one group."""
    (only,) = harness.launch(
        """
        import torch
        import allhands as dist

        with dist.process_group(rank=0, world_size=1, timeout=60):
            for device in ("cpu", "cuda"):
                x = torch.ones(3, device=device)
                dist.all_reduce(x)
                say(**{device: x.tolist()})
        """,
        1,
        fresh=True,
        timeout=120,
    )
    assert only.returncode == 0, only.stderr
    assert only["cpu"] == only["cuda"] == [1.0] * 3


def test_two_ranks_on_one_gpu_are_refused_at_once() -> None:
    """Ranks that use the same GPU with nccl get gpu-shared on every rank, before NCCL is called."""
    results = harness.launch(
        """
        import time
        import torch
        import allhands as dist

        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        gate("ready")
        begun = time.monotonic()
        try:
            dist.init_process_group("nccl", rank=rank, world_size=size, timeout=30)
        except dist.EngineMissing as problem:
            say(slug=problem.slug, ranks=problem.ranks, seconds=time.monotonic() - begun)
        """,
        2,
        fresh=True,
        timeout=120,
    )
    for result in results:
        assert result["slug"] == "gpu-shared"
        assert result["ranks"] == [0, 1]
        assert result["seconds"] < 3


def test_gloo_serves_two_ranks_on_one_gpu() -> None:
    """The fix of gpu-shared works: CUDA tensors of two ranks on one GPU over Gloo, and a peer's end is reported."""
    results = harness.launch(
        """
        import os, time
        import torch
        import allhands as dist

        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=30)
        x = torch.full((8,), float(rank + 1), device="cuda")
        dist.all_reduce(x)
        say(value=x.tolist())
        if rank == 1:
            say(died=time.time())
            os.kill(os.getpid(), 9)
        try:
            dist.all_reduce(x)
        except dist.PeerLost as problem:
            say(slug=problem.slug, ranks=problem.ranks)
        """,
        2,
        fresh=True,
        timeout=120,
    )
    assert [result["value"] for result in results] == [[3.0] * 8] * 2
    assert results[0]["slug"] == "peer-lost"
    assert results[0]["ranks"] == [1]


def test_ranks_that_never_choose_a_gpu() -> None:
    """No device chosen, so all are on cuda:0: NCCL's refusal in the first collective becomes gpu-shared everywhere."""
    results = harness.launch(
        """
        import torch
        import allhands as dist

        dist.init_process_group("nccl", rank=rank, world_size=size, timeout=60)
        say(found=attempt(lambda: dist.all_reduce(torch.ones(4, device="cuda"))))
        """,
        2,
        fresh=True,
        timeout=180,
    )
    for result in results:
        assert result["found"]["slug"] == "gpu-shared", result["found"]
        assert "set_device" in result["found"]["text"]
        assert "backend='allhands'" in result["found"]["text"]
