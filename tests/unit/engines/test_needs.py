from __future__ import annotations

import resource
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from allhands.diagnosis import Diagnosis
from allhands.engines.mpi import library
from allhands.engines.needs import needs

Limits = Callable[[int, int], list[tuple[int, int]]]


def lacking(backend: str, world_size: int = 2) -> Diagnosis:
    """Return what ``backend`` lacks on rank 1 here; fail where it lacks nothing."""
    found = needs(backend, world_size, 1)
    assert found is not None
    assert (found.ranks, found.hosts) == ((1,), (socket.gethostname(),))
    assert found.who.startswith("rank 1 (")
    return found


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Let the system have other descriptor limits; what is asked of it instead is written down."""

    def put(soft: int, hard: int) -> list[tuple[int, int]]:
        asked: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: asked.append(pair))
        return asked

    return put


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "GLOO", " cpu:gloo , ", ""])
def test_gloo_needs_nothing(backend: str) -> None:
    """Gloo is in every torch, in any spelling; no backend at all is torch's choice."""
    assert needs(backend, 2, 1) is None


@pytest.mark.parametrize(
    ("backend", "fix"),
    [("glo", "did you mean 'gloo'? Pass it as backend="), ("cpu:nclc", "did you mean 'nccl'? Pass it as backend=")],
)
def test_an_unknown_backend_comes_with_a_suggestion(backend: str, fix: str) -> None:
    """A misspelt name is answered with the one that was probably meant."""
    found = lacking(backend)
    assert (found.slug, found.fix) == ("backend-unknown", fix)
    assert f"{backend.rpartition(':')[2]!r}" in found.what
    assert "gloo" in found.why
    assert "fake" not in found.why


def test_an_unknown_backend_without_a_near_one() -> None:
    """Where nothing is close, nothing is guessed."""
    assert lacking("quantum-tunnel").fix == "pass one of these as backend="


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_in_a_torch_without_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch has no NCCL, and says so with its version."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    found = lacking(backend)
    assert found.slug == "nccl-missing"
    assert str(torch.__version__) in found.why


@pytest.mark.parametrize(("visible", "why"), [(None, "torch.cuda finds no device"), ("", "CUDA_VISIBLE_DEVICES=")])
def test_nccl_without_a_gpu(visible: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL without a GPU is another matter, and an empty CUDA_VISIBLE_DEVICES is named as the reason."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = lacking("nccl")
    assert (found.slug, found.why) == ("gpu-missing", why)


def test_nccl_with_a_gpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL and a GPU there is nothing to complain of."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert needs("nccl", 2, 1) is None


def test_mpi_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The diagnosis has the reason and the commands to type."""
    monkeypatch.setattr(library, "load_failure", lambda: "the module mpi4py is not installed")
    found = lacking("mpi")
    assert found.slug == "mpi-missing"
    assert "mpi4py is not installed" in found.why
    assert "pip install 'allhands[mpi]'" in found.fix


def test_mpi_in_a_process_that_no_mpirun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix is the line that starts the ranks, with their number."""
    monkeypatch.setattr(library, "load_failure", lambda: "")
    monkeypatch.setattr(library, "launched", lambda: "")
    monkeypatch.setattr(library, "_flag", lambda _: False)
    found = needs("mpi", 4, 1)
    assert found is not None
    assert (found.slug, found.ranks) == ("mpi-missing", (1,))
    assert "no mpirun, mpiexec or srun started this process" in found.why
    assert "`mpirun -n 4 python train.py`" in found.fix


def test_a_backend_that_this_torch_was_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that torch knows but has no code for are found out before torch is asked to use them."""
    monkeypatch.setattr(dist, "is_backend_available", lambda _: False)
    found = lacking("ucc")
    assert found.slug == "backend-unknown"
    assert "ucc" in found.what


def test_too_few_descriptors(limits: Limits) -> None:
    """More ranks than the hard limit has room for are refused, with the numbers."""
    asked = limits(256, 1024)
    found = lacking("gloo", world_size=961)
    assert found.slug == "fd-limit"
    assert found.what == "961 ranks need 1025 file descriptors in each process, the limit is 1024"
    assert asked == []


def test_a_soft_limit_is_raised_as_far_as_needed(limits: Limits) -> None:
    """Where only the soft limit is in the way, it is raised; the hard one stays."""
    asked = limits(256, 4096)
    assert needs("gloo", 960, 1) is None
    assert asked == [(1024, 4096)]


def test_enough_descriptors_are_left_alone(limits: Limits) -> None:
    """Nothing is changed where nothing is needed."""
    asked = limits(1024, 1024)
    assert needs("gloo", 960, 1) is None
    assert asked == []


def test_no_limit_is_no_limit(limits: Limits) -> None:
    """An unlimited hard limit is never too low."""
    asked = limits(256, resource.RLIM_INFINITY)
    assert needs("gloo", 100_000, 1) is None
    assert asked == [(100_064, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(
    ("seen", "device", "said"),
    [(0, "cuda", "no GPU"), (0, "cuda:0", "no GPU"), (2, "cuda:2", "only 2 GPUs"), (2, "cuda:1", ""), (0, "cpu", "")],
)
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, seen: int, device: str, said: str) -> None:
    """A GPU that was asked for and is not there is told with the answer to the roll call, whatever the backend."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    found = needs("gloo", 2, 1, torch.device(device))
    assert (found is not None) == bool(said)
    if found is not None:
        assert (found.slug, found.ranks) == ("gpu-missing", (1,))
        assert f"device_id={device} was asked for, but this process sees {said}" in found.what
        assert "leave device_id= out" in found.fix
