"""Data parallel training from nothing, one step after the other; each prints what it did.

    allhands run -n 2 examples/from_scratch.py
    python examples/from_scratch.py                 a world of one: the same program

docs/tutorial.md tells the story to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import allhands as dist


def say(step: str, *found: object) -> None:
    """Print on rank 0 what each rank found: one line for each value."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [str(each) for each in found])
    if dist.get_rank() == 0:
        print(f"\n{step}")
        for rank, row in enumerate(rows):
            print(f"  rank {rank}: {'; '.join(row)}")


def model() -> nn.Module:
    """Return the model that every rank begins with."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's own samples; every rank has others."""
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, 8, generator=source)
    return inputs, inputs[:, :1] - inputs[:, 1:2].tanh()


def loss_of(network: nn.Module, step: int = 0) -> torch.Tensor:
    """Return the loss of this rank's batch."""
    inputs, targets = batch(step)
    return nn.functional.mse_loss(network(inputs), targets)


def first_gradient(network: nn.Module) -> str:
    """Return the beginning of a gradient, to be compared by eye."""
    gradient = next(network.parameters()).grad
    return " ".join(f"{value:+.5f}" for value in gradient.flatten()[:4].tolist())


def average_one(parameter: torch.Tensor) -> None:
    """Replace a gradient by its average over all ranks."""
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def average(network: nn.Module) -> None:
    """Do so with every gradient."""
    for parameter in network.parameters():
        average_one(parameter)


@contextlib.contextmanager
def averaging(network: nn.Module) -> Iterator[None]:
    """Average gradients as backward makes them, within a block."""
    hooks = [parameter.register_post_accumulate_grad_hook(average_one) for parameter in network.parameters()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


class OwnDataParallel(nn.Module):
    """Data parallel training in fifty lines: equal beginnings, buckets, and reductions while backward goes on."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        # Backward comes to the last layer first, so buckets are filled from there.
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
            if sum(each.nbytes for each in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.sync = True
        self.begin()

    def begin(self) -> None:
        """Wait for the gradients of all parameters anew."""
        self.missing = [len(bucket) for bucket in self.buckets]
        self.under_way: list[tuple[Any, torch.Tensor, list[nn.Parameter]]] = []

    def ready(self, parameter: torch.Tensor) -> None:
        """Take note of a gradient; reduce its bucket once it is full; finish when all are."""
        if not self.sync:
            return
        number = next(at for at, bucket in enumerate(self.buckets) if any(each is parameter for each in bucket))
        self.missing[number] -= 1
        if not self.missing[number]:
            bucket = self.buckets[number]
            flat = torch.cat([each.grad.flatten() for each in bucket])
            self.under_way.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        if not any(self.missing):
            for work, flat, bucket in self.under_way:
                work.wait()
                parts = flat.div_(dist.get_world_size()).split([each.numel() for each in bucket])
                for each, part in zip(bucket, parts, strict=True):
                    each.grad.copy_(part.view_as(each))
            self.begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up, within a block: for accumulation over several batches."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the module."""
        result: torch.Tensor = self.module(*inputs)
        return result


def train(network: nn.Module, steps: int = 20) -> list[float]:
    """Train, and return the losses of this rank."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(network, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def digest(network: nn.Module) -> str:
    """Return a number that differs where parameters do."""
    return f"{sum(parameter.double().abs().sum().item() for parameter in network.parameters()):.12f}"


def main() -> None:
    """Go through the steps."""
    # 1. Join. Who this process is, is read from whatever started it.
    with dist.process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        say("1. join: every rank is here", f"I am rank {rank} of {size}")

        # 2. The one operation that everything below is made of.
        numbers = torch.tensor([1.0, 10.0]) * (rank + 1)
        before = numbers.tolist()
        dist.all_reduce(numbers)
        say("2. all_reduce adds up, and everyone has the sum", f"{before} became {numbers.tolist()}")

        # 3. Own data, own gradients; averaged by hand they are those of all data.
        network = model()
        loss_of(network).backward()
        own = first_gradient(network)
        average(network)
        say("3. gradients averaged by hand", f"{own} became {first_gradient(network)}")
        expected = first_gradient(network)

        # 4. A hook does the same in the middle of backward, as soon as a gradient is there.
        network = model()
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(average_one)
        loss_of(network).backward()
        say(
            "4. the same by hooks, while backward goes on",
            first_gradient(network),
            f"as by hand: {first_gradient(network) == expected}",
        )

        # 5. Hooks that come and go with a block: two batches, of which only the second talks to the others.
        network = model()
        loss_of(network, 0).backward()
        with averaging(network):
            loss_of(network, 1).backward()
        say("5. a context manager: accumulate first, average at the end", first_gradient(network))

        # 6. Put together: a DistributedDataParallel of one's own.
        ours, theirs = OwnDataParallel(model()), nn.parallel.DistributedDataParallel(model())
        losses = train(ours)
        train(theirs)
        say("6. our own data parallel training", f"loss {losses[0]:.4f} became {losses[-1]:.4f}")
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))
        say("   parameters: ours, and those of DistributedDataParallel", digest(ours), digest(theirs))
        say("   and they are the same on every rank, bit for bit", digest(ours))


if __name__ == "__main__":
    main()
