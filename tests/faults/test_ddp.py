"""Invalid models, and ranks that fail during a pass: every rank raises an error, none hangs."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

# Failures are reported in well under a second; an order of magnitude wider for loaded machines.
MOST_S = 10.0

BEGIN = """
import warnings
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import allhands as dist
warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, without=""):
        for name in "abc":
            x = getattr(self, name)(x) if name not in without else x
        return x

def step(ddp, **kw):
    ddp(torch.randn(2, 4), **kw).sum().backward()

dist.init_process_group(BACKEND, rank=rank, world_size=size, timeout=30)
torch.manual_seed(0)
"""


def run(script: str, ranks: int = 2, backend: str = "allhands") -> list[harness.Result]:
    """Run ``script`` on ``ranks``; each rank reports the outcome under "found"."""
    return harness.launch(f"BACKEND = {backend!r}\n" + BEGIN + script, ranks)


def check(results: list[harness.Result], slug: str, *words: str) -> list[dict[str, Any]]:
    """Fail unless every rank raised ``slug`` with ``words`` in time, and not with torch's message."""
    found: list[dict[str, Any]] = []
    for result in results:
        outcome = result["found"]
        assert outcome.get("slug") == slug, f"rank {result.rank}: {outcome}\n{result.stderr}"
        assert outcome["seconds"] < MOST_S
        assert "Expected to have finished reduction" not in outcome["text"]
        for each in words:
            assert each in outcome["text"], outcome["text"]
        found.append(outcome)
    return found


@pytest.mark.parametrize("backend", ["allhands", "gloo"])
@pytest.mark.parametrize("hooked", [False, True])
def test_unused_parameters_are_named_with_their_ranks(backend: str, *, hooked: bool) -> None:
    """Every rank names the parameters without a gradient and their ranks; the group is usable afterwards."""
    results = run(
        f"""
ddp = dist.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
if {hooked}:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    ddp.register_comm_hook(None, allreduce_hook)
step(ddp)
found = attempt(step, ddp, without=["b", "bc", ""][rank])
say(found=found)
ddp.zero_grad()
step(ddp)
say(after=[p.grad.tolist() for p in ddp.parameters()])
dist.destroy_process_group()
""",
        3,
        backend,
    )
    found = check(results, "unused-parameters", "b.weight on ranks 0 and 1", "c.bias on rank 1", "4 parameters")
    assert all(each["ranks"] == [0, 1] for each in found)
    assert results[0]["after"] == results[1]["after"] == results[2]["after"]


def test_static_graph_that_changes() -> None:
    """A parameter without its gradient is named on every rank, one with a new gradient on the ranks that have it."""
    results = run("""
ddp = dist.DistributedDataParallel(Net(), static_graph=True)
step(ddp)
say(found=attempt(step, ddp, without="b" if rank else ""))
dist.destroy_process_group()
""")
    check(results, "unused-parameters", "b.weight on rank 1", "static_graph")
    results = run("""
ddp = dist.DistributedDataParallel(Net(), static_graph=True)
step(ddp, without="b")
say(found=attempt(step, ddp))
dist.destroy_process_group()
""")
    check(results, "gradient-twice", "b.", "static_graph")


def test_gradient_that_arrives_twice() -> None:
    """Reentrant checkpoints that share a parameter raise an error with a fix."""
    results = run("""
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x
say(found=attempt(step, dist.DistributedDataParallel(Twice())))
dist.destroy_process_group()
""")
    check(results, "gradient-twice", "layer.", "use_reentrant=False")


@pytest.mark.parametrize("backend", ["allhands", "gloo"])
def test_parameters_that_differ_are_named_with_their_hashes(backend: str) -> None:
    """Different values without the initial sync, different shapes with it: every rank names them with their ranks."""
    results = run(
        """
torch.manual_seed(0)
net = Net()
with torch.no_grad():
    net.b.weight += rank == 2
say(found=attempt(dist.DistributedDataParallel, net, init_sync=False))
say(unwrapped=attempt(dist.sync_gradients, net))
say(shapes=attempt(dist.DistributedDataParallel, nn.Linear(4, 3 if rank else 4)))
say(options=attempt(dist.DistributedDataParallel, Net(), find_unused_parameters=rank == 1))
dist.destroy_process_group()
""",
        3,
        backend,
    )
    found = check(results, "parameters-differ", "b.weight: hash ", "on ranks 0 and 1", "on rank 2")
    assert "a.weight" not in found[0]["text"]
    assert all(result["unwrapped"]["slug"] == "parameters-differ" for result in results)
    for result in results:
        assert result["shapes"]["slug"] == "parameters-differ"
        assert "weight: float32 (4, 4) on rank 0, float32 (3, 4) on ranks 1 and 2" in result["shapes"]["text"]
        assert "find_unused_parameters: False on ranks 0 and 2, True on rank 1" in result["options"]["text"]


def test_changed_module_is_named() -> None:
    """New, removed and replaced parameters, and another dtype, are named in the next pass."""
    results = run("""
net = Net()
ddp = dist.DistributedDataParallel(net)
step(ddp)
net.a.bias = nn.Parameter(torch.zeros(4))
net.d = nn.Linear(2, 2)
del net.c
say(found=attempt(step, ddp))
net = Net()
ddp = dist.DistributedDataParallel(net)
net.double()
say(retyped=attempt(lambda: ddp(torch.randn(2, 4).double()).sum().backward()))
dist.destroy_process_group()
""")
    check(results, "module-changed", "new: d.weight and d.bias", "gone: c.weight and c.bias", "replaced: a.bias")
    for result in results:
        assert result["retyped"]["slug"] == "module-changed"
        assert "torch.float64" in result["retyped"]["text"]


@pytest.mark.parametrize("backend", ["allhands", "gloo"])
@pytest.mark.parametrize("place", ["forward", "backward", "killed"])
def test_rank_that_fails_in_a_pass(backend: str, place: str) -> None:
    """If a rank raises or dies in forward or backward, backward raises on all others."""
    results = run(
        f"""
import os, signal, time
from pathlib import Path
place = {place!r}

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if place == "forward":
            raise KeyError("in forward")
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if place == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("in backward")

class Bad(Net):
    def forward(self, x):
        x = self.b(self.a(x))
        return self.c(Fails.apply(x) if rank == 1 and armed else x)

armed = False
ddp = dist.DistributedDataParallel(Bad(), bucket_cap_mb=0.0001)
for _ in range(2):
    step(ddp)
armed = True
place_of = Path(__file__).with_name
if rank == 1:
    # Not before the others have finished their successful steps, which would fail otherwise.
    while not (place_of("well-0").exists() and place_of("well-2").exists()):
        time.sleep(0.01)
    step(ddp)
else:
    place_of(f"well-{{rank}}").touch()
    say(found=attempt(step, ddp))
""",
        3,
        backend,
    )
    found = check([results[0], results[2]], "peer-lost" if place == "killed" else "peer-failed", "rank 1")
    assert all(each["ranks"] == [1] for each in found)
    assert results[1].returncode != 0


def test_unfinished_backward_is_not_mixed_with_the_next() -> None:
    """A rank that catches an exception between its reductions and continues raises an error, and so do the others."""
    results = run("""
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in backward")

class Bad(Net):
    def forward(self, x):
        x = self.b(self.a(x))
        return self.c(Fails.apply(x) if rank == 1 and armed else x)

armed = False
ddp = dist.DistributedDataParallel(Bad(), bucket_cap_mb=0.00005)
for _ in range(2):
    step(ddp)
armed = True
if rank == 1:
    try:
        step(ddp)
    except KeyError:
        pass
    armed = False
    step(ddp)
else:
    say(found=attempt(step, ddp))
""")
    check(results[:1], "peer-failed", "rank 1", "TrainingError")
    assert "backward-unfinished" in results[1].stderr
    assert "buckets were complete" in results[1].stderr


def test_uneven_inputs_without_join() -> None:
    """A rank that has no more inputs and leaves is named by those that wait for it."""
    results = run("""
import os
os.environ["ALLHANDS_DESTROY_TIMEOUT"] = "0.5"
ddp = dist.DistributedDataParallel(Net())
for _ in range(2 + 2 * rank):
    found = attempt(step, ddp)
    if rank == 1 and found["kind"]:
        say(found=found)
        say(again=attempt(step, ddp))
        break
dist.destroy_process_group()
""")
    check(results[1:], "peer-lost", "rank 0")
    assert results[1]["again"]["slug"] == "peer-lost"


def test_join_with_early_termination() -> None:
    """With throw_on_early_termination every rank raises when one has no inputs left."""
    results = run("""
ddp = dist.DistributedDataParallel(Net())

def run():
    with ddp.join(throw_on_early_termination=True):
        for _ in range(2 + 2 * rank):
            step(ddp)

say(found=attempt(run))
dist.destroy_process_group()
""")
    for result in results:
        assert result["found"]["kind"] == "RuntimeError"
        assert "exhausted" in result["found"]["text"]
