"""Train a small network on four ranks with a live view, optionally with a failure of one rank.

    python examples/demo.py              classify three spirals with DistributedDataParallel over allhands
    python examples/demo.py --break 2    rank 2 raises an exception halfway
    python examples/demo.py --kill 2     rank 2 is killed (SIGKILL) halfway

No port, address or launcher: each rank only needs its rank and the world size.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as sentinels_ready
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

RANKS = 4
ARMS = 3  # classes
PER_ARM = 2000  # training points
EPOCHS = 60
BATCH = 100  # points per rank and step
# Exceeded with every seed that was tried; chance is 33 %.
ENOUGH = 0.97
# The others end within a second of a failure; a rank that does not is killed after this.
GRACE_S = 15
# Width and height of the picture in characters, for a terminal of 80 by 24. One character shows two pixels, one above
# the other.
PICTURE = (44, 20)
COLOURS = ((235, 110, 80), (80, 160, 235), (120, 190, 90))


class ShardError(ValueError):
    """The exception of --break."""


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    epochs: int
    breaks: int | None
    killed: int | None


# In each rank --------------------------------------------------------------------------------------------------


def rank_main(rank: int, options: Options, parent: Connection) -> None:
    """Run one rank: train, and send the result to the parent."""
    import torch

    import allhands as dist

    torch.set_num_threads(1)  # Four ranks share the cores of a laptop.
    try:
        with dist.process_group(rank=rank, world_size=RANKS):
            accuracy = train(rank, options, parent)
    except dist.AllhandsError as error:
        parent.send(("error", time.monotonic(), type(error).__name__, str(error)))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except ShardError as error:  # --break
        parent.send(("raised", time.monotonic(), type(error).__name__, str(error)))
        sys.exit(1)
    parent.send(("done", time.monotonic(), "", accuracy))


def train(rank: int, options: Options, parent: Connection) -> float:
    """Train in the present group; return the accuracy on the test points."""
    import torch

    import allhands as dist

    torch.manual_seed(0)
    points, arms = spirals(PER_ARM, seed=1)
    test_points, test_arms = spirals(PER_ARM // 4, seed=2)
    mine = torch.arange(rank, len(points), RANKS)
    model = dist.DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs, eta_min=2e-4)
    pids = [0] * RANKS
    dist.all_gather_object(pids, os.getpid())
    accuracy = 0.0
    with view(rank, options.epochs, pids) as show:
        for epoch in range(options.epochs):
            started = time.monotonic()
            total = torch.zeros(())
            for step, batch in enumerate(mine[torch.randperm(len(mine))].split(BATCH)):
                if epoch == options.epochs // 2 and step == 1:
                    fail_if_selected(rank, options, parent)
                loss = torch.nn.functional.cross_entropy(model(points[batch]), arms[batch])
                optimizer.zero_grad()
                loss.backward()  # DDP averages the gradients over all ranks here.
                optimizer.step()
                total += loss.detach() * len(batch)
            schedule.step()
            speed = list(torch.zeros(RANKS, 1))
            dist.all_gather(speed, torch.tensor([len(mine) / (time.monotonic() - started)]))
            with torch.no_grad():
                correct = (model.module(test_points[rank::RANKS]).argmax(1) == test_arms[rank::RANKS]).sum()
            result = torch.stack([total, correct.float()])
            dist.all_reduce(result)
            accuracy = float(result[1]) / len(test_points)
            mean = float(result[0]) / len(points)
            show(Epoch(epoch + 1, mean, accuracy, [float(each) for each in speed], model.module))
    return accuracy


def spirals(per_arm: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points on ARMS interleaved spirals, with noise, and the arm of each."""
    import torch

    source = torch.Generator().manual_seed(seed)
    arms = torch.arange(ARMS).repeat_interleave(per_arm)
    radius = torch.rand(len(arms), generator=source).sqrt()
    angle = 2 * math.pi * (arms / ARMS + 1.75 * radius) + 0.25 * torch.randn(len(arms), generator=source)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms


def network() -> torch.nn.Module:
    """Return a network that is large enough to separate the spirals."""
    from torch.nn import Linear, Sequential, SiLU

    return Sequential(Linear(2, 64), SiLU(), Linear(64, 64), SiLU(), Linear(64, 64), SiLU(), Linear(64, ARMS))


def fail_if_selected(rank: int, options: Options, parent: Connection) -> None:
    """Fail if this rank was selected with --break or --kill."""
    if rank == options.breaks:
        parent.send(("fault", time.monotonic(), "", ""))
        raise ShardError(f"shard {rank} holds 7 points, not {ARMS * PER_ARM // RANKS}")
    if rank == options.killed:
        parent.send(("fault", time.monotonic(), "", ""))
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Epoch:
    """The progress after an epoch; ``speed`` is in points per second, one value per rank."""

    number: int
    loss: float
    accuracy: float
    speed: list[float]
    model: torch.nn.Module


# The output of rank 0 ---------------------------------------------------------------------------------------------


@contextmanager
def view(rank: int, epochs: int, pids: list[int]) -> Iterator[Callable[[Epoch], None]]:
    """Yield a function that shows an epoch: in place on a terminal, a line elsewhere, nothing on other ranks than 0."""
    if rank:
        yield lambda _: None
        return
    if not sys.stdout.isatty():
        yield lambda epoch: line(epochs, epoch)
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        # Every update draws the whole screen, so that no refresh thread is needed.
        yield lambda epoch: live.update(screen(epochs, pids, epoch), refresh=True)


def line(epochs: int, epoch: Epoch) -> None:
    """Print every tenth epoch, and the last."""
    if epoch.number % 10 == 0 or epoch.number == epochs:
        rates = "  ".join(f"rank {rank}: {value:,.0f}/s" for rank, value in enumerate(epoch.speed))
        done = f"epoch {epoch.number:3}/{epochs}  loss {epoch.loss:.3f}  accuracy {epoch.accuracy:6.1%}"
        print(f"{done}  {rates}", flush=True)


def screen(epochs: int, pids: list[int], epoch: Epoch) -> RenderableType:
    """Return the screen: progress, the throughput of each rank, and the decision regions of the network."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    ranks = Table(box=None, pad_edge=False)
    for heading in ("rank", "pid", "points/s"):
        ranks.add_column(heading, justify="right")
    for rank, value in enumerate(epoch.speed):
        ranks.add_row(str(rank), str(pids[rank]), f"{value:,.0f}")
    left = Group(
        f"epoch {epoch.number} of {epochs}",
        ProgressBar(total=epochs, completed=epoch.number, width=26),
        " ",
        f"loss      {epoch.loss:.3f}",
        f"accuracy  {epoch.accuracy:.1%}",
        " ",
        ranks,
    )
    title = f"{RANKS} ranks, DistributedDataParallel over allhands"
    both = Table.grid(padding=(0, 3, 0, 0))
    both.add_row(left, picture(epoch.model))
    return Panel(both, title=title, expand=False)


def picture(model: torch.nn.Module) -> RenderableType:
    """Return the plane, coloured by the class probabilities of the network."""
    import torch
    from rich.text import Text

    width, height = PICTURE
    x, y = torch.linspace(-1.1, 1.1, width), torch.linspace(1.1, -1.1, 2 * height)
    with torch.no_grad():
        probabilities = model(torch.cartesian_prod(y, x).flip(1)).softmax(1).reshape(2 * height, width, ARMS)
    # Colours are weighted by probability.
    pixels = (probabilities @ torch.tensor(COLOURS, dtype=torch.float32)).int().tolist()
    text = Text(no_wrap=True)
    for row in range(height):
        text.append("\n" if row else "")
        for upper, lower in zip(pixels[2 * row], pixels[2 * row + 1], strict=True):
            text.append("▀", f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
    return text


# The parent ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Start the ranks, wait for them, and print the result."""
    parser = argparse.ArgumentParser(description="Train on four ranks, with or without a failure halfway.")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default {EPOCHS}")
    fault = parser.add_mutually_exclusive_group()
    for option, name, text in (("--break", "breaks", "this rank raises"), ("--kill", "killed", "kill -9 this rank")):
        fault.add_argument(option, dest=name, type=int, choices=range(RANKS), metavar="RANK", help=text)
    options = Options(**vars(parser.parse_args()))
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")

    print(f"starting {RANKS} ranks, which learn to classify {ARMS} spirals ({ARMS * PER_ARM:,} points)", flush=True)
    started = time.monotonic()
    messages: list[list[Any]] = [[] for _ in range(RANKS)]
    try:
        codes = run(options, messages)
    except KeyboardInterrupt:
        print("\ninterrupted; every rank has ended")
        return 130
    if any(each and each[0][0] == "fault" for each in messages):
        return failed(messages, codes)
    return finished(messages, codes, options, time.monotonic() - started)


def run(options: Options, messages: list[list[Any]]) -> list[int | None]:
    """Run every rank to its end, append its messages to ``messages``, and return the exit codes."""
    # Importing torch takes seconds. It is imported once, before the ranks are forked; on a laptop with few cores four
    # imports would take four times as long.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch", "torch._dynamo", "allhands.groups.lifecycle"):
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [context.Process(target=rank_main, args=(rank, options, pipes[rank][1])) for rank in range(RANKS)]
    try:
        for rank in ranks:
            rank.start()
        wait(ranks)
    except KeyboardInterrupt:
        # The ranks got SIGINT too. They leave the group, which takes a moment.
        deadline = time.monotonic() + 5
        for rank in ranks:
            if rank.pid is not None:
                rank.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
    for (receiver, sender), received in zip(pipes, messages, strict=True):
        sender.close()
        try:
            while True:
                received.append(receiver.recv())
        except EOFError:
            receiver.close()
    return [rank.exitcode for rank in ranks]


def wait(ranks: list[Any]) -> None:
    """Wait until every rank has ended, or until GRACE_S after the first failure, as a launcher does."""
    deadline = math.inf
    while running := [rank for rank in ranks if rank.is_alive()]:
        if time.monotonic() > deadline:
            return
        sentinels_ready([rank.sentinel for rank in running], timeout=1)
        if deadline == math.inf and any(rank.exitcode for rank in ranks):
            deadline = time.monotonic() + GRACE_S


def finished(messages: list[list[Any]], codes: list[int | None], options: Options, seconds: float) -> int:
    """Print the result of the training; return the exit status."""
    for rank, received in enumerate(messages):
        for kind, _, name, text in received:
            if kind == "error":
                print(f"rank {rank}: {name}: {text}")
    if any(codes) or not messages[0]:
        print(f"the ranks ended with {codes}")
        return 1
    accuracy = messages[0][-1][3]
    print(f"accuracy {accuracy:.1%} on points that were not trained on; {seconds:.1f} s in all, imports included")
    if options.epochs >= EPOCHS and accuracy < ENOUGH:
        print(f"this is too low: at least {ENOUGH:.0%} was expected")
        return 1
    return 0


def failed(messages: list[list[Any]], codes: list[int | None]) -> int:
    """Print the errors of the other ranks and their delays; return the exit status."""
    culprit = next(rank for rank, received in enumerate(messages) if received and received[0][0] == "fault")
    at = messages[culprit][0][1]
    outcome = "got a kill -9" if codes[culprit] == -signal.SIGKILL else f"raised {messages[culprit][-1][2]}"
    print(f"\nrank {culprit} {outcome}\n")
    slowest, count = 0.0, 0
    for rank, received in enumerate(messages):
        if rank == culprit:
            continue
        for kind, when, name, text in received:
            if kind != "error":
                continue
            slowest, count = max(slowest, when - at), count + 1
            # All errors are the same; print one in full.
            print(f"rank {rank}, {when - at:.2f} s later: {name}: {text if count == 1 else text.splitlines()[0]}\n")
        if not any(kind == "error" for kind, *_ in received):
            print(f"rank {rank} raised no error; it ended with {codes[rank]}\n")
    print(f"{count} of {RANKS - 1} other ranks raised within {slowest:.2f} s; every rank has ended")
    return 0 if count == RANKS - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
