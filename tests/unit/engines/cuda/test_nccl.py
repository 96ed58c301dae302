from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allhands.engines.cuda import nccl
from allhands.errors import ResourceError


def room(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """Let every file system have this much room."""
    found = SimpleNamespace(f_bavail=mib * 256, f_frsize=4096, f_bfree=10**9, f_bsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


def test_a_containers_64_mib_are_too_little_for_ten_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a container has by default does not suffice for many ranks; both numbers are named."""
    room(monkeypatch, 64)
    with pytest.raises(ResourceError) as caught:
        nccl.check_shared_memory(10, rank=3)
    assert (caught.value.slug, caught.value.ranks) == ("shm-too-small", (3,))
    assert caught.value.hosts == (socket.gethostname(),)
    assert caught.value.diagnosis.what == "/dev/shm has 64 MiB free, 10 ranks need 80 MiB"
    assert "--shm-size" in caught.value.diagnosis.fix


def test_the_limit_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly what is needed is accepted, one MiB less refused; only what ordinary users may use counts."""
    room(monkeypatch, 64)
    nccl.check_shared_memory(8, rank=0)
    room(monkeypatch, 63)
    with pytest.raises(ResourceError):
        nccl.check_shared_memory(8, rank=0)


def test_a_missing_mount_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a shared-memory file system NCCL uses other transports; one without room would be refused."""
    nccl.check_shared_memory(8, rank=0, path="/no/such/mount")
    room(monkeypatch, 0)
    with pytest.raises(ResourceError):
        nccl.check_shared_memory(8, rank=0, path="/no/such/mount")


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_rank_without_a_gpu_names_none(device: torch.device | None) -> None:
    """No device, or one that is no GPU, identifies none."""
    assert nccl.gpu(device) == ""


def test_a_gpu_is_told_by_what_is_unique_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device numbers mean different GPUs in different processes (CUDA_VISIBLE_DEVICES), so its UUID is used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # Two processes with different CUDA_VISIBLE_DEVICES: cuda:0 of one is cuda:1 of the other.
    uuids = {torch.device("cuda", 0): "GPU-a", torch.device("cuda", 1): "GPU-b"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
    assert [nccl.gpu(torch.device("cuda", index)) for index in (0, 1)] == ["GPU-a", "GPU-b"]


def test_abort_does_not_wait_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort may take long: the stream is released first, and the caller, who has others to wake, goes on."""
    begun, finish = threading.Event(), threading.Event()
    released: list[str] = []

    def slow_abort() -> None:
        released.append("nccl")
        begun.set()
        finish.wait(10)

    def init(self: Any, counters: Any, rank: int, ranks: int, device: Any) -> None:
        del rank, ranks, device
        self.counters = counters

    monkeypatch.setattr(nccl.StreamEngine, "__init__", init)
    counters: Any = SimpleNamespace(release=lambda: released.append("stream"))
    engine = nccl.NcclEngine(counters, SimpleNamespace(abort=slow_abort), 0, 2, torch.device("cpu"))
    engine.abort(0)
    engine.abort(0)
    assert begun.wait(10)
    assert not finish.is_set()
    assert released[0] == "stream"
    assert released.count("nccl") == 1
    finish.set()
