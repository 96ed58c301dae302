"""SyncBatchNorm against BatchNorm on the batches of all ranks in one."""

from __future__ import annotations

import json

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

BEGIN = """
import copy, os, warnings
import torch
from torch import nn
import allhands as dist
from allhands.training import SyncBatchNorm

torch.set_num_threads(1)
dist.init_process_group(os.environ.get("BACKEND", "allhands"), rank=rank, world_size=size, timeout=30)

def mine(whole, cuts):
    return whole[cuts[rank]:cuts[rank + 1]]

def close(one, other, tolerance):
    assert one.shape == other.shape and one.dtype == other.dtype, (one.shape, other.shape, one.dtype, other.dtype)
    if one.numel():
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

"""

# All cases run in one group: forming a group takes longer than all of them.
AGAINST_BATCHNORM = """
SHAPES = {1: (13, 5), 2: (13, 5, 7), 3: (13, 5, 4, 3), 4: (13, 5, 2, 3, 2)}
CLASSES = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}
CUTS = [[0, 4, 9, 13], [0, 1, 1, 13], [0, 0, 13, 13]]

PLAIN = torch.contiguous_format

def compare(dims, cuts, dtype=torch.float64, tolerance=1e-12, layout=PLAIN, params=None, steps=3, **kw):
    torch.manual_seed(dims)
    plain = CLASSES[dims](5, **kw).to(params or dtype)
    if plain.affine:
        nn.init.uniform_(plain.weight); nn.init.uniform_(plain.bias)
    sync = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert type(sync) is SyncBatchNorm
    wide = copy.deepcopy(plain).double()  # what both are measured by
    for step in range(steps):
        whole = (torch.randn(SHAPES[dims], dtype=torch.float64) * 2 + 30).to(dtype)
        slope = torch.randn(SHAPES[dims], dtype=torch.float64).to(dtype)
        reference = whole.double().clone().requires_grad_()
        expected = wide(reference)
        expected.backward(slope.double())
        own = mine(whole, cuts).clone(memory_format=layout).requires_grad_()
        found = sync(own)
        assert not own.numel() or found.is_contiguous(memory_format=layout)
        found.backward(mine(slope, cuts))
        assert own.grad.dtype == dtype
        close(found.detach().double(), mine(expected, cuts).detach(), tolerance)
        close(own.grad.double(), mine(reference.grad, cuts), tolerance)
        if plain.affine:
            for ours, theirs in ((sync.weight, wide.weight), (sync.bias, wide.bias)):
                total = ours.grad.double()
                dist.all_reduce(total)
                close(total, theirs.grad, tolerance * 20)
                ours.grad = theirs.grad = None
    for name, buffer in wide.named_buffers():
        close(getattr(sync, name).double(), buffer.double(), tolerance)
    sync.eval(); wide.eval()
    if plain.track_running_stats:  # without, eval mode normalises by the batch that it gets
        close(sync(mine(whole, cuts)).double(), mine(wide(whole.double()), cuts), tolerance)

for dims in SHAPES:
    for cuts in CUTS:
        compare(dims, cuts)
compare(3, CUTS[0], layout=torch.channels_last)
compare(4, CUTS[0], layout=torch.channels_last_3d)
compare(3, CUTS[0], momentum=None)
compare(3, CUTS[1], momentum=0.7, eps=0.1)
compare(3, CUTS[0], affine=False)
compare(3, CUTS[1], track_running_stats=False)
compare(3, CUTS[0], affine=False, track_running_stats=False)
compare(3, CUTS[0], dtype=torch.float32, tolerance=2e-5)
compare(3, CUTS[1], dtype=torch.bfloat16, params=torch.float32, tolerance=5e-2)
compare(3, CUTS[0], dtype=torch.bfloat16, tolerance=1.5e-1)
compare(3, CUTS[2], dtype=torch.float16, params=torch.float32, tolerance=5e-3)
compare(3, CUTS[0], dtype=torch.float16, tolerance=2e-2)
say(done=True)
"""

GRADCHECK = """
CUTS = [0, 4, 4, 9]

class Dealt(torch.autograd.Function):
    # The same tensor on every rank; its gradient is the sum of the gradients of each rank's part.
    @staticmethod
    def forward(ctx, whole):
        return whole.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

class Collected(torch.autograd.Function):
    # The parts of all ranks concatenated, on every rank.
    @staticmethod
    def forward(ctx, part):
        rows = torch.zeros(9, *part.shape[1:], dtype=part.dtype)
        rows[CUTS[rank]:CUTS[rank + 1]] = part
        dist.all_reduce(rows)
        return rows

    @staticmethod
    def backward(ctx, grad):
        return mine(grad, CUTS)

def through(layer):
    def call(whole, weight, bias):
        own = mine(Dealt.apply(whole), CUTS)
        out = torch.func.functional_call(layer, {"weight": Dealt.apply(weight), "bias": Dealt.apply(bias)}, (own,))
        return Collected.apply(out)
    return call

torch.manual_seed(0)
for shape in ((9, 2), (9, 2, 2)):
    values = [torch.randn(shape), torch.rand(2) + 0.5, torch.randn(2)]
    values = [value.double().requires_grad_() for value in values]
    layer = SyncBatchNorm(2, track_running_stats=False).double()
    assert torch.autograd.gradcheck(through(layer), values)
say(done=True)
"""

GROUPS_AND_MODES = """
layer = SyncBatchNorm(3)
batch = torch.arange(12.0).reshape(4, 3) * (rank + 1)
layer.eval()
close(layer(batch), nn.BatchNorm1d(3).eval()(batch), 0)

# A group of two: the third rank has local statistics.
pair = dist.new_group([0, 2])
layer = SyncBatchNorm(3, process_group=pair)
found = layer(batch)
both = torch.cat([torch.arange(12.0).reshape(4, 3) * (other + 1) for other in (0, 2)])
plain = nn.BatchNorm1d(3)
if rank != 1:
    close(found.detach(), plain(both)[slice(0, 4) if rank == 0 else slice(4, 8)].detach(), 1e-6)
else:
    close(found.detach(), plain(batch).detach(), 1e-6)
close(layer.running_var, plain.running_var, 1e-6)

# All batches empty: the output is empty and the running statistics do not change. One value in all is an error.
layer = SyncBatchNorm(3)
out = layer(torch.empty(0, 3, requires_grad=True))
out.sum().backward()
assert out.shape == (0, 3) and layer.running_mean.tolist() == [0, 0, 0] and layer.running_var.tolist() == [1, 1, 1]
say(single=attempt(layer, torch.ones(int(rank == 1), 3)))
close(layer(torch.full((1, 3), float(rank))).detach(), torch.full((1, 3), (rank - 1) * 1.2247), 1e-3)

# torch's DDP accepts it on a CPU (unlike torch's SyncBatchNorm), and parameters stay equal.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
ddp = nn.parallel.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(model))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
whole = torch.randn(9, 4)
for _ in range(2):
    optimizer.zero_grad()
    ddp(whole[rank::3]).square().mean().backward()
    optimizer.step()
say(state=[value.tolist() for value in ddp.state_dict().values()])
"""

COMPILED = """
torch.manual_seed(0)
whole = torch.randn(9, 3, 6, 6)
model = nn.Sequential(nn.Conv2d(3, 4, 3), SyncBatchNorm(4), nn.ReLU())
twin = copy.deepcopy(model)
compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
for cuts in ([0, 3, 6, 9], [0, 2, 4, 9]):
    own = mine(whole, cuts)
    one, other = model(own), compiled(own)
    one.square().sum().backward()
    other.square().sum().backward()
    close(one.detach(), other.detach(), 1e-6)
# An empty batch breaks the graph and issues the same collectives.
compiled = torch.compile(twin, backend="aot_eager")
own = mine(whole, [0, 5, 5, 9])
one, other = model(own), compiled(own)
one.square().sum().backward()
other.square().sum().backward()
close(one.detach(), other.detach(), 1e-6)
for (name, ours), theirs in zip(model.named_parameters(), twin.parameters()):
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)
for ours, theirs in zip(model.buffers(), twin.buffers()):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
say(done=True)
"""

DIFFERENT = """
found = {}
if os.environ["CASE"] == "channels":
    layer = SyncBatchNorm(4 if rank == 1 else 3)
    found = attempt(layer, torch.ones(4, layer.num_features))
elif os.environ["CASE"] == "type":
    found = attempt(SyncBatchNorm(3).to(torch.float64 if rank == 1 else torch.float32),
        torch.ones(4, 3, dtype=torch.float64 if rank == 1 else torch.float32))
else:
    layer = SyncBatchNorm(3)
    layer(torch.randn(4, 3))
    found = attempt(layer, torch.ones(4, 3, dtype=torch.bfloat16 if rank == 1 else torch.float32))
say(**found)
"""


def run(source: str, ranks: int, timeout: float = harness.DEADLINE_S, **env: str) -> list[harness.Result]:
    """Run on ``ranks`` ranks, all of which must end well."""
    results = harness.launch(BEGIN + source, ranks, env, timeout=timeout)
    for result in results:
        assert result.returncode == 0, result.stderr
    return results


@pytest.mark.parametrize("backend", ["allhands", pytest.param("gloo", marks=pytest.mark.soak)])
def test_equals_batchnorm_of_all_batches(backend: str) -> None:
    """Outputs, gradients, running statistics and eval mode, for dimensions, types, layouts, options, uneven batches."""
    assert all(result["done"] for result in run(AGAINST_BATCHNORM, 3, BACKEND=backend))


def test_gradients_pass_gradcheck() -> None:
    """In float64 the gradients of input, weight and bias pass gradcheck, with uneven and empty batches."""
    assert all(result["done"] for result in run(GRADCHECK, 3))


def test_groups_modes_and_data_parallel_training() -> None:
    """Statistics are per process group; too few values raise on all ranks; torch's DDP accepts the layer on a CPU."""
    results = run(GROUPS_AND_MODES, 3)
    for result in results:
        assert result["single"]["slug"] == "invalid-argument"
        assert "ValueError" in result["single"]["bases"]
    assert len({json.dumps(result["state"]) for result in results}) == 1


@pytest.mark.soak
def test_compiled_model_has_no_graph_break() -> None:
    """A compiled model has no graph break and the same result; an empty batch issues the same collectives."""
    # Each rank imports the compiler: most of the time on a loaded machine.
    assert all(result["done"] for result in run(COMPILED, 3, timeout=180))


@pytest.mark.parametrize(
    ("backend", "case", "words"),
    [
        ("allhands", "type", "3 channels, float64"),
        ("allhands", "later", "a batch of bfloat16"),
        ("gloo", "channels", "4 channels"),
        pytest.param("allhands", "channels", "4 channels", marks=pytest.mark.soak),
        pytest.param("gloo", "later", "a batch of bfloat16", marks=pytest.mark.soak),
    ],
)
def test_different_layers_are_named(backend: str, case: str, words: str) -> None:
    """Every rank raises collective-mismatch, which names the rank that differs and both sides."""
    for result in harness.launch(BEGIN + DIFFERENT, 3, {"BACKEND": backend, "CASE": case}):
        said = result.lines[-1]
        assert said["slug"] == "collective-mismatch", said
        assert said["ranks"] == [1]
        assert f"rank 1: {words}" in said["text"]
        assert "ranks 0 and 2: " in said["text"]
