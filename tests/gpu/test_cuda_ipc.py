"""Ranks that share one GPU: the tests of shared memory on CUDA tensors, and what is different on a stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.engines import ENGINES, check, on_gpu
from conformance.engines import FORM as ON_SHM
from conformance.test_failures import MISMATCHES
from conformance.test_operations import test_random_operations_agree_with_a_model as run_random_operations
from ranks import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda finds no GPU on this machine"),
]

FORM = ON_SHM.replace("timeout=20", "timeout=60")

# A deadline for an operation of milliseconds: several tests use the GPU at once.
AT_ONCE_S = 2.0


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors on the GPU if a test names no device, and forbid staging on the host."""
    start = harness.start

    def begin(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        return on_gpu(source, ranks, env or {}, begin=start, **kw)

    monkeypatch.setattr(harness, "start", begin)


@pytest.mark.parametrize("ranks", [4, 8])
def test_random_operations_agree_with_a_model(ranks: int) -> None:
    """Random operations on random types and sizes agree with a model computed from all ranks' data."""
    run_random_operations(ENGINES["cuda_ipc"], ranks)


def test_the_rows_grow_with_the_calls() -> None:
    """Tensors larger than the rows, of every operation, before and after the rows have grown, in parts of all sizes."""
    results = harness.launch(
        FORM
        + """
for count in (5_000_011, 300, 40_000_003, 2_000_000):
    x = torch.arange(count, dtype=torch.float32).remainder_(977) + rank
    want = torch.arange(count, dtype=torch.float32).remainder_(977)
    y = x.clone()
    dist.all_reduce(y)
    assert torch.equal(y, want * size + sum(range(size)))
    y = x.clone()
    dist.broadcast(y, 1)
    assert torch.equal(y, want + 1)
    got = [torch.empty_like(x[: count - each]) for each in range(size)]
    dist.all_gather(got, x[: count - rank].clone())
    assert all(torch.equal(each, want[: count - number] + number) for number, each in enumerate(got))
    got = [torch.empty_like(x) for _ in range(size)] if rank == 2 else None
    dist.gather(x, got, 2)
    assert got is None or all(torch.equal(each, want + number) for number, each in enumerate(got))
    out = torch.empty_like(x)
    dist.scatter(out, [want + 10 * each for each in range(size)] if rank == 0 else None, 0)
    assert torch.equal(out, want + 10 * rank)
    each = count // size
    part = torch.empty(each)
    dist.reduce_scatter_tensor(part, x[: each * size].clone())
    assert torch.equal(part, want[rank * each : rank * each + each] * size + sum(range(size)))
    rows = [[(count // 3 if i == j else count // 7) + i + j for j in range(size)] for i in range(size)]
    given = torch.cat([torch.full((rows[rank][j],), 10.0 * rank + j) for j in range(size)])
    came = torch.empty(sum(rows[i][rank] for i in range(size)))
    dist.all_to_all_single(came, given, [rows[i][rank] for i in range(size)], rows[rank])
    assert torch.equal(came, torch.cat([torch.full((rows[i][rank],), 10.0 * i + rank) for i in range(size)]))
say(way=dist.group.WORLD._route([x]).engine.name)
dist.destroy_process_group()
""",
        3,
    )
    check(results)
    assert {result["way"] for result in results} == {"cuda_ipc"}


def test_large_sums_in_two_steps() -> None:
    """With many ranks and much data, each rank reduces its part for all: the same on every rank."""
    results = harness.launch(
        FORM
        + """
x = torch.arange(70_000_007, dtype=torch.float32).remainder_(1013).mul_(0.1 * (rank + 1))
want = torch.arange(70_000_007, dtype=torch.float32).remainder_(1013).mul_(0.1 * sum(range(1, size + 1)))
dist.all_reduce(x)
assert torch.allclose(x, want, rtol=1e-5)
say(total=float(x.double().sum()), bits=int(x.view(torch.int32).long().sum()))
dist.destroy_process_group()
""",
        4,
    )
    check(results)
    assert len({(result["total"], result["bits"]) for result in results}) == 1


def test_no_rank_waits_on_the_host() -> None:
    """A rank issues many calls without waiting for a busy peer; results are right once they are used."""
    results = harness.launch(
        FORM
        + """
import time
x = torch.ones(1000)
dist.all_reduce(x)
torch.cuda.synchronize()
gate("ready")
if rank == 1:
    time.sleep(2)
began = time.monotonic()
works = [dist.all_reduce(x, async_op=True) for _ in range(20)]
issued = time.monotonic() - began
pending = not works[-1].is_completed()
for work in works:
    work.wait()
value = x[0].item()
# More calls than records: the rank ahead waits for the others, and all results are right.
if rank == 0:
    time.sleep(0.5)
y = torch.zeros(10)
for step in range(300):
    y += 1
    dist.broadcast(y, step % size)
assert y.tolist() == [300.0] * 10
say(issued=issued, pending=pending, value=value)
dist.destroy_process_group()
""",
        2,
    )
    check(results)
    assert results[0]["issued"] < 1.5
    assert results[0]["pending"]
    assert [result["value"] for result in results] == [2.0**21] * 2


@pytest.mark.parametrize("kind", [kind for kind in MISMATCHES if kind != "barrier"])
def test_a_mismatch_raises_on_every_rank(kind: str) -> None:
    """Calls that differ: each rank raises at its next call or wait at the latest, and no stream hangs."""
    usual, odd = MISMATCHES[kind]
    results = harness.launch(
        FORM
        + f"""
dist.all_reduce(torch.ones(3))
torch.cuda.synchronize()
gate("ready")
def calls():
    {odd} if rank == 2 else {usual}
    torch.cuda.synchronize()
    dist.barrier()
found = attempt(calls)
torch.cuda.synchronize()
say(found=found)
""",
        3,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert result["found"]["seconds"] < 5
        assert "script.py:" in result["found"]["text"]
    assert {tuple(result["found"]["ranks"]) for result in results} == {(2,)}


def test_tensors_of_the_host_and_of_the_gpu_in_one_call() -> None:
    """A first call with a CPU tensor on one rank and CUDA tensors on the others is a mismatch, not a hang."""
    results = harness.launch(
        FORM
        + """
dist.barrier()
device = "cpu" if rank == 0 else "cuda"
say(found=attempt(lambda: dist.all_reduce(torch.ones(5, device=device))))
""",
        3,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert result["found"]["ranks"] == [0]
        assert "CUDA" in result["found"]["text"]


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_rank_ends_it_for_the_others(who: int) -> None:
    """Survivors whose streams wait for a killed rank, the owner of the memory or not, raise within two seconds."""
    results = harness.launch(
        FORM
        + f"""
import os, time
x = torch.ones(1_000_000)
def loop():
    while True:
        dist.all_reduce(x)
        torch.cuda.synchronize()
        x.fill_(1)
dist.all_reduce(x)
if rank == {who}:
    for _ in range(20):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    say(fell=time.time())
    os.kill(os.getpid(), 9)
found = attempt(loop)
say(found=found, told=time.time())
y = torch.ones(4).sum().item()  # the GPU still works for this process
say(after=y)
""",
        4,
    )
    fell = results[who]["fell"]
    for result in results:
        if result.rank != who:
            assert result["found"]["slug"] == "peer-lost", result["found"]
            assert result["found"]["ranks"] == [who]
            assert result["told"] - fell < AT_ONCE_S
            assert result["after"] == 4.0


def test_a_rank_that_does_not_come_is_named_with_what_it_does() -> None:
    """At the timeout the rank that skipped the call is named, and waits for the GPU end."""
    results = harness.launch(
        FORM.replace("timeout=60", "timeout=6")
        + """
import time
x = torch.ones(10)
dist.all_reduce(x)
torch.cuda.synchronize()
gate("ready")
if rank == 1:
    time.sleep(10)
else:
    def calls():
        dist.all_reduce(x)
        torch.cuda.synchronize()
        dist.barrier()
    say(found=attempt(calls))
""",
        3,
    )
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "collective-timeout", result["found"]
        assert result["found"]["ranks"] == [1]
        assert "script.py" in result["found"]["text"]
        assert 5 < result["found"]["seconds"] < 9


def test_streams_and_lifetimes() -> None:
    """A call waits for the stream it was issued on, its waiters see the sum, and tensors may be dropped."""
    results = harness.launch(
        FORM
        + """
side = torch.cuda.Stream()
for step in range(3):
    x = torch.zeros(1_000_000)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x += rank + 1
        work = dist.all_reduce(x, async_op=True)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        work.wait()
        assert torch.equal(x, torch.full_like(x, 3.0)), x[:3]
# Dropped while in use: their memory must not be reused yet.
torch.cuda._sleep(200_000_000)
for step in range(50):
    dist.all_reduce(torch.full((100_000,), 1.0), async_op=True)
    torch.full((100_000,), 7.0)
kept = torch.full((100_000,), 1.0)
work = dist.all_reduce(kept, async_op=True)
future = work.get_future()
assert future.wait()[0] is kept or torch.equal(future.value()[0], kept)
assert kept.eq(size).all()
done = dist.all_reduce(kept, async_op=True).get_future().then(lambda each: each.value()[0] * 2).wait()
assert done.eq(2 * size * size).all()
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_messages() -> None:
    """Messages of CUDA tensors, waited for at once or later, in a batch, with tags and from any source, arrive."""
    results = harness.launch(
        FORM
        + """
other = 1 - rank
x = torch.full((100_003,), float(rank))
got = torch.empty_like(x)
if rank == 0:
    dist.send(x, 1, tag=3)
    dist.recv(got)
else:
    dist.recv(got, 0, tag=3)
    dist.send(x, 0)
assert got.is_cuda and got.eq(other).all()
got.zero_()
works = [dist.irecv(got, other), dist.isend(x, other)]
for work in works:
    work.wait()
assert got.eq(other).all()
grid = torch.zeros(1000, 2)
ops = [dist.P2POp(dist.isend, x[:1000], other), dist.P2POp(dist.irecv, grid[:, 1], other)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert grid[:, 1].eq(other).all() and grid[:, 0].eq(0).all()
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_calls_that_cannot_be_captured_are_errors() -> None:
    """A collective inside a CUDA graph's capture is refused by name, and the group still works."""
    results = harness.launch(
        FORM
        + """
x = torch.ones(10)
dist.all_reduce(x)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
found = None
try:
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        found = attempt(lambda: dist.all_reduce(y))
except RuntimeError:
    pass
dist.all_reduce(x)
say(found=found, value=x[0].item())
dist.destroy_process_group()
""",
        2,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "invalid-argument", result["found"]
        assert "CUDA graph" in result["found"]["text"]
        assert result["value"] == 4.0


def grown() -> int:
    """Return how much more of the GPU is used after the third life of overlapping groups than after the first."""
    results = harness.launch(
        FORM
        + """
def used():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free

before = None
for life in range(3):
    if life:
        dist.init_process_group("allhands", rank=rank, world_size=size, timeout=60)
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for step in range(5):
        x = torch.ones(1000) * (rank + 1)
        for pair in pairs:
            if rank in dist.get_process_group_ranks(pair):
                dist.all_reduce(x, group=pair)
        y = torch.full((2000,), float(rank))
        dist.all_reduce(y)
        assert y.eq(3.0).all()
    z = torch.ones(3, device="cpu")
    dist.all_reduce(z)
    assert z.tolist() == [3.0] * 3
    gate(f"done{life}")
    dist.destroy_process_group()
    gate(f"destroyed{life}")
    now = used()
    before = before if before is not None else now
    gate(f"looked{life}")
say(before=before, after=now)
""",
        3,
    )
    check(results)
    return max(result["after"] - result["before"] for result in results)


def test_subgroups_and_groups_again() -> None:
    """Groups that overlap have memory of their own; all of it is given back at their end, and a new one forms."""
    # 16 MiB: what a context may take and give back by itself. What others on the GPU take meanwhile counts too, but not
    # every time; what is not given back does.
    assert any(grown() < 16 << 20 for _ in range(3))


@pytest.mark.parametrize("library", ["torch", "allhands"])
def test_training_gives_the_loss_of_one_process(library: str) -> None:
    """DDP on two ranks of one GPU: the losses of one process with both batches."""
    source = """
import torch.nn as nn
DDP = nn.parallel.DistributedDataParallel if LIBRARY == "torch" else dist.DistributedDataParallel
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
wrapped = DDP(model) if size > 1 else model
made = torch.Generator("cuda").manual_seed(9)
losses = []
for step in range(10):
    data = torch.randn(16, 32, generator=made)
    target = torch.randn(16, 8, generator=made)
    each = 16 // size
    own = slice(rank * each, rank * each + each)
    loss = (wrapped(data[own]) - target[own]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    losses.append(total.item())
say(losses=losses)
dist.destroy_process_group()
"""
    source = FORM + source.replace("LIBRARY", repr(library))
    (alone,) = harness.launch(source, 1)
    results = harness.launch(source, 2)
    check([alone, *results])
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_fsdp_gives_the_loss_of_one_process() -> None:
    """FSDP2 on two ranks of one GPU: the losses of one process with both batches."""
    source = (
        FORM
        + """
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
if size > 1:
    mesh = init_device_mesh("cuda", (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
made = torch.Generator("cuda").manual_seed(9)
losses = []
for step in range(10):
    data = torch.randn(16, 32, generator=made)
    target = torch.randn(16, 8, generator=made)
    each = 16 // size
    own = slice(rank * each, rank * each + each)
    loss = (model(data[own]) - target[own]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    losses.append(total.item())
say(losses=losses)
dist.destroy_process_group()
"""
    )
    (alone,) = harness.launch(source, 1)
    results = harness.launch(source, 2)
    check([alone, *results])
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
