"""Train a classifier of handwritten digits on several ranks: a complete data-parallel training job.

    allhands run -n 4 examples/digits.py                            train, and show the progress
    allhands run -n 4 examples/digits.py --checkpoint digits.pt     ... and resume from there after a kill -9,
    allhands run -n 3 examples/digits.py --checkpoint digits.pt         with any number of ranks that divides 60
    allhands run -n 4 examples/digits.py --against-gloo             ... and the same on torch's DDP over Gloo, in turn

The data ships with scikit-learn: 1,797 images of 8 by 8 pixels. `pip install allhands[examples]` installs it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import allhands as dist

# Training images; the other 357 are for the test. A global batch of 60 divides evenly among many numbers of ranks, so
# every sample counts exactly once and the losses do not depend on the number of ranks.
TRAIN, BATCH = 1440, 60
EPOCHS = 12


@dataclass
class Job:
    """One training: a model, its data and its progress."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    sampler: Any
    train: DataLoader[Any]
    test: DataLoader[Any]
    group: Any
    losses: list[float] = field(default_factory=list)  # one for each step, averaged over all ranks
    accuracies: list[float] = field(default_factory=list)  # one for each epoch
    seen: dict[int, list[int]] = field(default_factory=dict)  # the samples of each epoch, with --trace
    seconds: float = 0.0
    fresh: list[torch.Tensor] = field(default_factory=list)  # local losses that are not in `losses` yet


def network(group: Any) -> nn.Module:
    """Return a small convolutional network that normalises over the batches of all ranks."""

    def block(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    model = nn.Sequential(
        *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    return dist.SyncBatchNorm.convert_sync_batchnorm(model, group)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training images with labels and indices, and those for the test."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.from_numpy(loaded.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(loaded.target)
    # The file is sorted by writer; the test should have all writers.
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    tensors = images[shuffled], labels[shuffled], torch.arange(len(images))
    return TensorDataset(*(each[:TRAIN] for each in tensors)), TensorDataset(*(each[TRAIN:] for each in tensors))


def make_job(name: str, epochs: int, group: Any = None) -> Job:
    """Return a new training: on allhands, or on torch's DDP over ``group``."""
    torch.manual_seed(0)
    train, test = digits()
    wrap = dist.DistributedDataParallel if name == "allhands" else nn.parallel.DistributedDataParallel
    model = wrap(network(group), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * TRAIN // BATCH)
    sampler = dist.DistributedSampler(train)
    local_batch = BATCH // dist.get_world_size()
    # pad=False: every test image counts once, even if the ranks' shares are uneven.
    test_sampler = dist.DistributedSampler(test, shuffle=False, pad=False)
    return Job(
        name,
        model,
        optimizer,
        schedule,
        sampler,
        DataLoader(train, local_batch, sampler=sampler),
        DataLoader(test, 100, sampler=test_sampler),
        group,
    )


def train_epoch(job: Job, epoch: int, after: Callable[[Job], None], *, trace: bool = False) -> None:
    """Train for the rest of an epoch; call ``after`` after each step."""
    job.model.train()
    job.sampler.set_epoch(epoch)
    started = time.perf_counter()
    for images, labels, numbers in job.train:
        loss = nn.functional.cross_entropy(job.model(images), labels)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.schedule.step()
        job.fresh.append(loss.detach())
        if trace:
            job.seen.setdefault(epoch, []).extend(dist.gather_metrics(numbers).tolist())
        after(job)
    job.seconds += time.perf_counter() - started
    average_losses(job)


def average_losses(job: Job) -> None:
    """Average the losses since the last call over all ranks; every rank must call."""
    if job.fresh:
        losses = torch.stack(job.fresh)
        dist.all_reduce(losses, group=job.group)
        job.losses += (losses / dist.get_world_size()).tolist()
        job.fresh.clear()


@torch.no_grad()
def evaluate(job: Job) -> float:
    """Return the accuracy on the test images, each counted once."""
    job.model.eval()
    right = [job.model.module(images).argmax(1) == labels for images, labels, _ in job.test]
    return float(dist.gather_metrics(torch.cat(right), sampler=job.test.sampler).float().mean())


def save(job: Job, path: Path) -> None:
    """Write a checkpoint; every rank must call, rank 0 writes."""
    average_losses(job)
    if dist.get_rank() == 0:
        state = {name: getattr(job, name).state_dict() for name in ("optimizer", "schedule", "sampler")}
        state |= {name: getattr(job, name) for name in ("losses", "accuracies", "seen")}
        torch.save(state | {"model": job.model.module.state_dict()}, path.with_suffix(".new"))
        # Atomic: a job that is killed here leaves a complete checkpoint.
        path.with_suffix(".new").replace(path)


def load(job: Job, path: Path) -> None:
    """Resume from a checkpoint of any number of ranks."""
    state = torch.load(path, weights_only=True)
    job.model.module.load_state_dict(state["model"])
    for name in ("optimizer", "schedule", "sampler"):
        getattr(job, name).load_state_dict(state[name])
    job.losses, job.accuracies, job.seen = state["losses"], state["accuracies"], state["seen"]


# The output of rank 0 ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def view(epochs: int, terminal: str) -> Iterator[Callable[[Job, int, list[float]], None]]:
    """Yield a function that shows an epoch: a bar on a terminal, a line elsewhere, nothing on other ranks than 0."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if dist.get_rank():
        yield lambda *_: None
        return
    with contextlib.ExitStack() as stack:
        # Under a launcher the output is a pipe; --terminal names the terminal.
        file = stack.enter_context(Path(terminal).open("w", encoding="utf-8")) if terminal else None
        console = Console(file=file, force_terminal=True if file else None)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        bar = Progress("epoch", *columns, console=console) if console.is_terminal else None
        if bar is not None:
            stack.enter_context(bar)
            task = bar.add_task("starting", total=epochs)

        def show(job: Job, epoch: int, speeds: list[float]) -> None:
            rates = " ".join(f"{speed:,.0f}" for speed in speeds)
            text = f"loss {job.losses[-1]:.3f}, accuracy {job.accuracies[-1]:.1%}, images/s per rank: {rates}"
            if bar is not None:
                bar.update(task, completed=epoch + 1, description=text)
            else:
                print(f"epoch {epoch + 1:2}/{epochs}  {text}", flush=True)

        yield show


def plot(jobs: list[Job], path: str) -> None:
    """Draw the losses and accuracies."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for job in jobs:
        left.plot(job.losses, label=job.name, alpha=0.7)
        right.plot(range(1, len(job.accuracies) + 1), job.accuracies, marker="o", label=job.name, alpha=0.7)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    right.set(xlabel="epoch", ylabel="accuracy on the test images")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a classifier of digits on several ranks.")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--checkpoint", type=Path, help="file to resume from, and to write every few steps")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--against-gloo", action="store_true", help="train on torch's DDP over Gloo too, in turn")
    parser.add_argument("--plot", default="", help="PNG of the curves")
    parser.add_argument("--report", default="", help="JSON of the curves")
    parser.add_argument("--terminal", default="", help="terminal that shows the progress bar")
    parser.add_argument("--trace", action="store_true", help="record the samples of each step")
    parser.add_argument("--kill-at", type=int, default=-1, help="the last rank kills itself after this many steps")
    return parser.parse_args()


def main() -> None:
    """Train, evaluate, and print the result."""
    given = options()
    torch.set_num_threads(1)
    with dist.process_group("allhands"):
        rank, size = dist.get_rank(), dist.get_world_size()
        if BATCH % size:
            raise SystemExit(f"{size} ranks do not divide the batch of {BATCH} evenly")
        jobs = [make_job("allhands", given.epochs)]
        if given.against_gloo:
            jobs.append(make_job("torch DDP with Gloo", given.epochs, dist.new_group(backend="gloo")))
        if given.checkpoint is not None and given.checkpoint.exists():
            load(jobs[0], given.checkpoint)
        first_epoch, steps = jobs[0].sampler.epoch, 0

        def after(job: Job) -> None:
            nonlocal steps
            steps += job is jobs[0]
            if job is jobs[0] and given.checkpoint is not None and steps % given.every == 0:
                save(job, given.checkpoint)
            if steps == given.kill_at and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        with view(given.epochs, given.terminal) as show:
            for epoch in range(first_epoch, given.epochs):
                dist.barrier()
                started, count = time.perf_counter(), len(jobs[0].sampler)
                # Alternate which job is first, so that both profit from warm caches.
                for each in jobs if epoch % 2 else reversed(jobs):
                    train_epoch(each, epoch, after, trace=given.trace)
                    if each is jobs[0]:
                        speed = count / (time.perf_counter() - started)
                    each.accuracies.append(evaluate(each))
                    started = time.perf_counter()
                if given.checkpoint is not None:
                    save(jobs[0], given.checkpoint)
                show(jobs[0], epoch, dist.gather_metrics(speed).tolist())
        slowest = [float(max(dist.gather_metrics(each.seconds))) for each in jobs]
        if rank == 0:
            finish(given, jobs, slowest, size)


def finish(given: argparse.Namespace, jobs: list[Job], seconds: list[float], size: int) -> None:
    """Write the plot and the report, and print the result."""
    if given.plot:
        plot(jobs, given.plot)
        print(f"the curves are in {given.plot}")
    if given.report:
        ours = jobs[0]
        content = {"losses": ours.losses, "accuracies": ours.accuracies, "seen": ours.seen, "seconds": seconds}
        Path(given.report).write_text(json.dumps(content), encoding="utf-8")
    print(
        f"accuracy {jobs[0].accuracies[-1]:.1%} on {1797 - TRAIN} images that were not trained on; "
        f"{seconds[0]:.1f} s of training on {size} ranks"
    )
    if len(jobs) > 1:
        print(
            f"the same job on torch's DDP with Gloo, in turn: accuracy {jobs[1].accuracies[-1]:.1%}, "
            f"{seconds[1]:.1f} s, which is {seconds[1] / seconds[0]:.2f} times as long"
        )


if __name__ == "__main__":
    main()
