"""Compiled functions and models that communicate; run with one compiler backend or another."""

from __future__ import annotations

from ranks.against_gloo import compare

__all__ = ["differences"]

TRIALS = """import torch.distributed._functional_collectives as functional
from torch import nn

# Generated code is deleted with the test; no pool of compilers, which takes longer to start than this code to compile.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["GATES"], f"generated-{rank}")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend={backend!r}, **options)

def try_functional():
    group = torch_dist.group.WORLD

    def call(x):
        y = functional.all_reduce(x * 2, "sum", group)
        z = functional.all_gather_tensor(y + 1, 0, group)
        w = functional.reduce_scatter_tensor(z, "sum", 0, group)
        return functional.all_to_all_single(w, None, None, group) + functional.broadcast(x, 0, group)

    return compiled(call, fullgraph=True)(torch.randn(4, 3) + rank)

def try_each_librarys_functions():
    found = []
    for library in (torch_dist, dist):
        def call(x):
            x = x * 2
            library.all_reduce(x)
            y = torch.empty(4 * size, 3)
            library.all_gather_into_tensor(y, x)
            return y + 1

        found.append(compiled(call, fullgraph=True)(torch.ones(4, 3) * rank))
    return found

def try_ddp():
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
    ddp = compiled(nn.parallel.DistributedDataParallel(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 10)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.state_dict().values())
"""


def differences(backend: str, timeout: float) -> dict[str, str]:
    """Return the differences between compiled code on ours and on Gloo, by trial."""
    return compare(TRIALS.replace("{backend!r}", repr(backend)), 2, timeout=timeout)
