"""A small language model on the text of this repository: accumulation, bfloat16, and sharding with FSDP2.

allhands run -n 2 examples/transformer.py             DistributedDataParallel
allhands run -n 2 examples/transformer.py --fsdp      torch's fully_shard on allhands' backend
allhands run -n 2 examples/transformer.py --bf16      with autocast to bfloat16

If --bf16 ends with an illegal instruction, the (virtual) machine reports AMX and does not have it: set
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import allhands as dist

ROOT = Path(__file__).resolve().parents[1]
# The context length in bytes.
CONTEXT = 64


class Text(Dataset[torch.Tensor]):
    """The documents' bytes in sequences of the context length and one more byte."""

    def __init__(self) -> None:
        files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        self.bytes = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
        ).long()

    def __len__(self) -> int:
        """Return the number of sequences."""
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return a sequence; the last byte is a target only."""
        return self.bytes[number * CONTEXT : (number + 1) * CONTEXT + 1]


class Block(nn.Module):
    """Attention and a multilayer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply causal attention, then the perceptron."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A byte-level language model."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next byte."""
        x = self.byte(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def distribute(model: Model, *, fsdp: bool) -> nn.Module:
    """Return the model replicated with DDP or sharded with FSDP2."""
    if not fsdp:
        return dist.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def gradient_sync(model: Any, *, fsdp: bool, last: bool) -> Any:
    """Reduce gradients within a block only for the last of several batches."""
    if fsdp:
        model.set_requires_gradient_sync(last)
        yield
    else:
        with contextlib.nullcontext() if last else model.no_sync():
            yield


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(description="A small language model on this repository's text.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for each step")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and batch")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with dist.process_group("allhands"):
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        text = Text()
        sampler = dist.DistributedSampler(text, drop_last=True)
        loader = DataLoader(text, given.batch, sampler=sampler, drop_last=True)
        model = distribute(Model(), fsdp=given.fsdp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if rank == 0:
            kind = "FSDP2" if given.fsdp else "DistributedDataParallel"
            own = sum(getattr(each, "to_local", lambda each=each: each)().numel() for each in model.parameters())
            print(
                f"{kind} on {size} ranks; {own:,} parameters on rank 0; {len(text.bytes):,} bytes of text", flush=True
            )

        def batches() -> Any:
            while True:
                yield from loader  # the sampler starts a new epoch with each pass

        source = batches()
        started = time.perf_counter()
        for step in range(1, given.steps + 1):
            total = torch.zeros(())
            for number in range(given.accumulate):
                sequence = next(source)
                last = number == given.accumulate - 1
                with (
                    gradient_sync(model, fsdp=given.fsdp, last=last),
                    torch.autocast("cpu", torch.bfloat16, enabled=given.bf16),
                ):
                    scores = model(sequence[:, :-1])
                    loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), sequence[:, 1:].flatten())
                    (loss / given.accumulate).backward()
                total += loss.detach() / given.accumulate
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0 or step in {1, given.steps}:
                bits = float(dist.gather_metrics(total).mean()) / math.log(2)
                rate = step * given.accumulate * given.batch * size * CONTEXT / (time.perf_counter() - started)
                if rank == 0:
                    print(f"step {step:4}: {bits:.2f} bits for each byte, {rate:,.0f} bytes/s", flush=True)


if __name__ == "__main__":
    main()
