"""One rank of `allhands bench ddp`: trains each model with each contestant in turn, and times their steps."""

from __future__ import annotations

import gc
import itertools
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import allhands

from .config import DdpConfig
from .processes import CommandConnection, serve
from .training import Sample

__all__ = ["main"]

# The length of a sample, and its least number of steps. For the same number of steps, many short samples have a smaller
# error than few long ones (4 ranks on 2 cores, MLP: 2.8 ±0.2 ms of communication in 60 samples of 0.05 s, 3.7 ±0.7 in
# 25 of 0.15).
_SAMPLE_S = 0.05
_LEAST_STEPS = 2

# A step this long fills the caches itself, so it is a sample of its own without a warm-up step. There are two in a
# round, because it varies by more of what communication takes.
_LONG_S = 0.1
_LONG_TURNS = 2

# Ranks start within seconds of each other, and a step takes a second at most: more is a hang.
_TIMEOUT_S = 60.0

# Where memory is measured: enough steps for DDP to rebuild its buckets and for the allocators to reach their peak.
_MEMORY_STEPS = 12

# Each group moves this much before the measurement, so that it holds its own buffers.
_MEMORY_BYTES = 64 << 20


class _Trainer:
    """A model, its synchronisation, and its optimizer."""

    def __init__(self, model: str, who: str, rank: int, gloo: Any) -> None:
        self.works = who != "single" or rank == 0
        self._lockstep = who == "lockstep"
        self._model, self._batch = _build(model)
        # torch's class is fastest with views of its buckets.
        if who == "allhands":
            self._model = allhands.DistributedDataParallel(self._model)
        elif who in {"torch", "gloo"}:
            group = gloo if who == "gloo" else None
            self._model = TorchDDP(self._model, process_group=group, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)

    def step(self) -> None:
        """Train one batch."""
        self._optimizer.zero_grad()
        self._model(self._batch).pow(2).mean().backward()
        if self._lockstep:
            allhands.barrier()
        self._optimizer.step()

    def sample(self, steps: int, *, warm_up: bool = True) -> Sample:
        """Train for ``steps``, after one that is not timed if ``warm_up``."""
        cores, ends = 0.0, [0.0] * (steps + 1)
        if warm_up:
            allhands.barrier()
            if self.works:
                self.step()  # Wakes sleeping threads and fills the caches.
        allhands.barrier()
        if self.works:
            # Of all threads: an engine's own threads use cores too.
            cores, ends[0] = time.process_time(), time.perf_counter()
            for step in range(steps):
                self.step()
                ends[step + 1] = time.perf_counter()
            cores = (time.process_time() - cores) / steps
        each = [end - begin for begin, end in itertools.pairwise(ends)]
        slowest = torch.tensor([*each, sum(each) / steps], dtype=torch.float64)
        total = torch.tensor(cores, dtype=torch.float64)
        # Ranks without work wait here.
        allhands.all_reduce(slowest, op=allhands.ReduceOp.MAX)
        allhands.all_reduce(total)
        return Sample(float(slowest[-1]), float(slowest[:-1].min()), float(total))


def main() -> None:
    """Run one rank; see `processes.serve`."""
    serve(DdpConfig, _train)


def _train(asked: DdpConfig, rank: int, line: CommandConnection) -> None:
    torch.set_num_threads(1)
    allhands.init_process_group("allhands", rank=rank, world_size=asked.ranks, timeout=_TIMEOUT_S)
    gloo = torch_dist.new_group(backend="gloo")
    for model in asked.models:
        if len(asked.who) == 1:
            _measure_memory(model, asked.who[0], rank, gloo, line)
        else:
            _compare(model, asked, rank, gloo, line)
    allhands.destroy_process_group()


def _compare(model: str, asked: DdpConfig, rank: int, gloo: Any, line: CommandConnection) -> None:
    """Train with all contestants in turn, and send the samples."""
    trainers = {who: _Trainer(model, who, rank, gloo) for who in asked.who}
    takes = {}
    for who, trainer in trainers.items():
        for _ in range(2):  # DDP builds its buckets in the first step and rebuilds them in the second.
            trainer.sample(1)
        takes[who] = trainer.sample(2).step_s
    long = min(takes.values()) >= _LONG_S
    steps = {who: 1 if long else max(_LEAST_STEPS, int(_SAMPLE_S / step_s)) for who, step_s in takes.items()}
    # A collection that visits all imported modules takes 0.1 s, in the middle of some sample.
    gc.collect()
    gc.freeze()
    samples: dict[str, list[Sample]] = {who: [] for who in trainers}
    turns = _LONG_TURNS if long else 1
    for turn in range(asked.rounds * turns):
        # A random order, the same on all ranks: no contestant always has the same predecessor.
        for who in random.Random(turn).sample([*trainers], len(trainers)):  # noqa: S311  # no secret
            samples[who].append(trainers[who].sample(steps[who], warm_up=not long))
        if rank == 0:
            line.tell(size=model, round=turn // turns + 1, wait=True)
    if rank == 0:
        parameters = list(_build(model)[0].parameters())
        about = {"bytes": sum(each.nbytes for each in parameters), "tensors": len(parameters)}
        line.tell(size=model, samples=samples, model=about, wait=True)
    gc.unfreeze()


def _measure_memory(model: str, who: str, rank: int, gloo: Any, line: CommandConnection) -> None:
    """Train with one contestant, and send the bytes that all ranks held at most, less those before.

    Private memory counts with its peak, which the kernel keeps; shared pages count once.
    """
    # Lazy imports and the buffers of the groups are not part of what a model takes.
    TorchDDP(torch.nn.Linear(1, 1), process_group=gloo)
    for group in (gloo, None):
        allhands.all_reduce(torch.ones(_MEMORY_BYTES // 4), group=group)
    allhands.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before = _held("VmRSS")
    # Around each reading: the share of a rank in a page depends on which ranks have it.
    allhands.barrier()
    trainer = _Trainer(model, who, rank, gloo)
    for _ in range(_MEMORY_STEPS):
        trainer.step()
    allhands.barrier()
    held = torch.tensor(_held("VmHWM") - before)
    allhands.barrier()
    allhands.all_reduce(held)
    if rank == 0:
        line.tell(size=model, memory=float(held), wait=True)


def _held(own: str) -> int:
    """Return the bytes of this process: of its private memory by ``own``, and its share of shared pages."""
    sizes = {}
    for table in ("status", "smaps_rollup"):
        for line in Path("/proc/self", table).read_text(encoding="utf-8").splitlines():
            if line.endswith(" kB"):
                name, number, _ = line.split()
                sizes[name] = int(number) * 1024
    shared = sizes["Pss_Shmem:"] + sizes["Pss_File:"]
    return sizes[f"{own}:"] - sizes["RssShmem:"] - sizes["RssFile:"] + shared


def _build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the model ``name``, the same on every rank, and a batch for it."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        return nn.Sequential(*layers), torch.randn(64, 784)
    if name == "cnn":
        parts: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            parts += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        head = [nn.Flatten(), nn.Linear(128 * 16, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(*parts, *head), torch.randn(16, 3, 32, 32)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    shape = (1, 16) if name == "transformer-16" else (8, 64)
    return nn.Sequential(nn.Embedding(1000, 256), encoder, nn.Linear(256, 1000)), torch.randint(0, 1000, shape)
