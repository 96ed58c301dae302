"""A small language model on the text of this repository: accumulation, bfloat16, and sharding with FSDP2.

allhands run -n 2 examples/transformer.py             DistributedDataParallel
allhands run -n 2 examples/transformer.py --fsdp      torch's fully_shard on allhands' backend
allhands run -n 2 examples/transformer.py --bf16      with autocast to bfloat16

Where --bf16 ends with an illegal instruction, the machine announces AMX and does not have it (some virtual ones):
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 leaves it out.
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
# Bytes that the model sees at once, and of which it says what comes next.
CONTEXT = 64


class Text(Dataset[torch.Tensor]):
    """Every stretch of the documents' bytes that is as long as the model sees, and one more."""

    def __init__(self) -> None:
        files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        self.bytes = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
        ).long()

    def __len__(self) -> int:
        """Return how many stretches there are."""
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return a stretch; the last byte is only to be predicted."""
        return self.bytes[number * CONTEXT : (number + 1) * CONTEXT + 1]


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look back, then think."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class Model(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next byte."""
        x = self.byte(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def spread(model: Model, *, fsdp: bool) -> nn.Module:
    """Return the model for all ranks: a copy on each, or a part on each."""
    if not fsdp:
        return dist.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def quiet(model: Any, *, fsdp: bool, last: bool) -> Any:
    """Within a block, only add gradients up, unless it is the last of several batches."""
    if fsdp:
        model.set_requires_gradient_sync(last)
        yield
    else:
        with contextlib.nullcontext() if last else model.no_sync():
            yield


def main() -> None:
    """Train for a while and say how well the text is predicted."""
    parser = argparse.ArgumentParser(description="A small language model on this repository's text.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=2, help="batches for each step")
    parser.add_argument("--batch", type=int, default=8, help="stretches of text for each rank and batch")
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
        model = spread(Model(), fsdp=given.fsdp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if rank == 0:
            kind = "FSDP2" if given.fsdp else "DistributedDataParallel"
            own = sum(getattr(each, "to_local", lambda each=each: each)().numel() for each in model.parameters())
            print(
                f"{kind} on {size} ranks; {own:,} parameters on rank 0; {len(text.bytes):,} bytes of text", flush=True
            )

        def batches() -> Any:
            while True:
                yield from loader  # each pass is an epoch of its own; the sampler sees to that

        source = batches()
        started = time.perf_counter()
        for step in range(1, given.steps + 1):
            total = torch.zeros(())
            for number in range(given.accumulate):
                stretch = next(source)
                last = number == given.accumulate - 1
                with (
                    quiet(model, fsdp=given.fsdp, last=last),
                    torch.autocast("cpu", torch.bfloat16, enabled=given.bf16),
                ):
                    scores = model(stretch[:, :-1])
                    loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), stretch[:, 1:].flatten())
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
