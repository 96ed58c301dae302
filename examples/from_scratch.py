"""Build data-parallel training step by step; each step prints its result.

    allhands run -n 2 examples/from_scratch.py
    python examples/from_scratch.py                 a world of one: the same program

docs/tutorial.md explains the steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import allhands as dist


def report(step: str, *values: object) -> None:
    """Print the ``values`` of each rank on rank 0."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [str(each) for each in values])
    if dist.get_rank() == 0:
        print(f"\n{step}")
        for rank, row in enumerate(rows):
            print(f"  rank {rank}: {'; '.join(row)}")


def model() -> nn.Module:
    """Return the initial model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that differ between ranks."""
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, 8, generator=source)
    return inputs, inputs[:, :1] - inputs[:, 1:2].tanh()


def loss_of(network: nn.Module, step: int = 0) -> torch.Tensor:
    """Return the loss of this rank's batch."""
    inputs, targets = batch(step)
    return nn.functional.mse_loss(network(inputs), targets)


def first_gradient(network: nn.Module) -> str:
    """Return the first elements of a gradient, for comparison."""
    gradient = next(network.parameters()).grad
    return " ".join(f"{value:+.5f}" for value in gradient.flatten()[:4].tolist())


def average_one(parameter: torch.Tensor) -> None:
    """Replace a gradient by its average over all ranks."""
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def average(network: nn.Module) -> None:
    """Replace every gradient by its average over all ranks."""
    for parameter in network.parameters():
        average_one(parameter)


@contextlib.contextmanager
def averaging(network: nn.Module) -> Iterator[None]:
    """Average gradients during backward, within a block."""
    hooks = [parameter.register_post_accumulate_grad_hook(average_one) for parameter in network.parameters()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


class OwnDataParallel(nn.Module):
    """Data-parallel training in fifty lines: broadcast of the model, buckets, and reductions during backward."""

    def __init__(self, module: nn.Module, bucket_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        # Backward starts with the last layer, so buckets are filled from there.
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
            if sum(each.nbytes for each in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.sync = True
        self.begin()

    def begin(self) -> None:
        """Prepare for a backward pass."""
        self.missing = [len(bucket) for bucket in self.buckets]
        self.pending: list[tuple[Any, torch.Tensor, list[nn.Parameter]]] = []

    def ready(self, parameter: torch.Tensor) -> None:
        """Count a gradient; reduce its bucket when it is complete; finish when all are."""
        if not self.sync:
            return
        number = next(at for at, bucket in enumerate(self.buckets) if any(each is parameter for each in bucket))
        self.missing[number] -= 1
        if not self.missing[number]:
            bucket = self.buckets[number]
            flat = torch.cat([each.grad.flatten() for each in bucket])
            self.pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        if not any(self.missing):
            for work, flat, bucket in self.pending:
                work.wait()
                parts = flat.div_(dist.get_world_size()).split([each.numel() for each in bucket])
                for each, part in zip(bucket, parts, strict=True):
                    each.grad.copy_(part.view_as(each))
            self.begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local within a block, to accumulate them over several batches."""
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
    """Return a checksum of the parameters."""
    return f"{sum(parameter.double().abs().sum().item() for parameter in network.parameters()):.12f}"


def main() -> None:
    """Run the steps."""
    # 1. Initialize. Rank and size are read from the environment of the launcher.
    with dist.process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        report("1. initialize: every rank has joined", f"rank {rank} of {size}")

        # 2. The one operation that everything below uses.
        numbers = torch.tensor([1.0, 10.0]) * (rank + 1)
        before = numbers.tolist()
        dist.all_reduce(numbers)
        report("2. all_reduce: every rank gets the sum", f"{before} became {numbers.tolist()}")

        # 3. Local data, local gradients; their average is the gradient of all data.
        network = model()
        loss_of(network).backward()
        own = first_gradient(network)
        average(network)
        report("3. gradients averaged explicitly", f"{own} became {first_gradient(network)}")
        expected = first_gradient(network)

        # 4. A hook does the same during backward, as soon as a gradient is computed.
        network = model()
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(average_one)
        loss_of(network).backward()
        report(
            "4. the same with hooks, during backward",
            first_gradient(network),
            f"equal to 3: {first_gradient(network) == expected}",
        )

        # 5. Hooks within a block: two batches, of which only the second communicates.
        network = model()
        loss_of(network, 0).backward()
        with averaging(network):
            loss_of(network, 1).backward()
        report("5. a context manager: accumulate first, average at the end", first_gradient(network))

        # 6. All together: a DistributedDataParallel of our own.
        ours, theirs = OwnDataParallel(model()), nn.parallel.DistributedDataParallel(model())
        losses = train(ours)
        train(theirs)
        report("6. our own data-parallel training", f"loss {losses[0]:.4f} became {losses[-1]:.4f}")
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))
        report("   parameters: ours, and those of torch's DistributedDataParallel", digest(ours), digest(theirs))
        report("   the same on every rank, bit for bit", digest(ours))


if __name__ == "__main__":
    main()
