"""How to start ranks on each engine."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ranks import harness, mpirun

__all__ = ["CPU", "ENGINES", "FORM", "OnEngine", "available", "check"]

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""

# Ranks believe that each pair of them has a host of its own. They share a loopback interface all the same, so Gloo and
# the hierarchical engine connects; only memory is shared within a pair.
HOSTS = """
import allhands.control.process_identity as identity
import allhands.engines.shm.fd_passing as fd_passing
identity.host_key = fd_passing.host_key = lambda: f"host {rank // 2}"
"""


@dataclass(frozen=True)
class OnEngine:
    """How the ranks of a test are started so that their default group uses one engine."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    # Runs in each rank before the test's script.
    prelude: str = ""
    begin: Callable[..., harness.Job] = harness.start

    def start(self, source: str, ranks: int, env: Mapping[str, str] | None = None, **kw: Any) -> harness.Job:
        """Start ``ranks`` ranks with the script ``source``."""
        return self.begin(self.prelude + source, ranks, {**self.env, **(env or {})}, **kw)

    def launch(self, source: str, ranks: int, env: Mapping[str, str] | None = None, **kw: Any) -> list[harness.Result]:
        """Run a script on ``ranks`` ranks and return how each ended."""
        with self.running(source, ranks, env, **kw) as job:
            return job.results()

    @contextlib.contextmanager
    def running(
        self, source: str, ranks: int, env: Mapping[str, str] | None = None, **kw: Any
    ) -> Iterator[harness.Job]:
        """Start a script for the length of a block; what still runs at its end is killed."""
        job = self.start(source, ranks, env, **kw)
        try:
            yield job
        finally:
            job.kill()
            shutil.rmtree(job.folder)


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's own output where it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


def on_gpu(
    source: str, ranks: int, env: Mapping[str, str], *, begin: Callable[..., harness.Job] = harness.start, **kw: Any
) -> harness.Job:
    """Start ranks that share a GPU and make their tensors there."""
    threads = "torch.set_num_threads(1)\n"
    source = source.replace(threads, threads + 'torch.set_default_device("cuda:0")\n')
    # CUDA cannot be used in a forked process.
    kw = {"fresh": True, **kw, "timeout": max(180, kw.get("timeout", 0))}
    return begin(source, ranks, {"ALLHANDS_CUDA": "cuda_ipc", **env}, **kw)


def on_mpi(source: str, ranks: int, env: Mapping[str, str], **kw: Any) -> harness.Job:
    """Start ranks by mpirun of Open MPI."""
    kw["timeout"] = max(90.0, kw.get("timeout", 0.0))
    return mpirun.start("openmpi", source, ranks, env, **kw)


ENGINES = {
    "shm": OnEngine("shm"),
    "gloo": OnEngine("gloo", {"ALLHANDS_ENGINE": "gloo"}),
    "hierarchical": OnEngine("hierarchical", prelude=HOSTS),
    "mpi": OnEngine("mpi", {"ALLHANDS_ENGINE": "mpi"}, begin=on_mpi),
    "cuda_ipc": OnEngine("cuda_ipc", begin=on_gpu),
}
CPU = ["shm", "gloo", "hierarchical", "mpi"]


def available(name: str) -> OnEngine:
    """Return an engine; skip the test where this machine has not what it needs."""
    if name == "mpi":
        mpirun.require("openmpi")
    if name == "cuda_ipc" and not torch.cuda.is_available():
        pytest.skip("torch.cuda finds no GPU on this machine")
    return ENGINES[name]
