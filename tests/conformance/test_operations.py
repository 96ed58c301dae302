"""Every operation on every engine: right, and the same bits on every rank."""

from __future__ import annotations

import pytest

from conformance.engines import FORM, OnEngine, check


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_operations_agree_with_a_model(any_engine: OnEngine, ranks: int) -> None:
    """Random operations on random types and sizes agree with a model computed from all ranks' data."""
    results = any_engine.launch(
        FORM
        + """
import random

def integers(kind, shape, seed):
    made = torch.Generator("cpu").manual_seed(seed)
    values = torch.randint(0, 5, shape, generator=made, device="cpu")
    return values.to(torch.get_default_device(), kind)

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
         torch.int64, torch.uint8, torch.bool, torch.complex64]
choose = random.Random(11)
for step in range(250):
    kind = choose.choice(KINDS)
    shape = choose.choice([(), (0,), (1,), (7,), (5, 3), (4096,), (100_003,), (300_000,)])
    root = choose.randrange(size)
    later = choose.random() < 0.3
    everyone = [integers(kind, shape, step * 100 + each) for each in range(size)]
    mine = everyone[rank].clone()
    name = choose.choice(["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
                          "all_to_all", "all_to_all_single", "barrier", "all_gather_object"])
    total = everyone[0].clone()
    for other in everyone[1:]:
        total = (total | other) if kind is torch.bool else total + other
    work = None
    if name == "all_reduce":
        work = dist.all_reduce(mine, async_op=later)
        want, got = [total], [mine]
    elif name == "reduce":
        work = dist.reduce(mine, root, async_op=later)
        want, got = [total if rank == root else everyone[rank]], [mine]
    elif name == "broadcast":
        work = dist.broadcast(mine, root, async_op=later)
        want, got = [everyone[root]], [mine]
    elif name == "all_gather":
        got = [torch.empty_like(mine) for _ in range(size)]
        work = dist.all_gather(got, mine, async_op=later)
        want = everyone
    elif name == "gather":
        got = [torch.empty_like(mine) for _ in range(size)] if rank == root else []
        work = dist.gather(mine, got if rank == root else None, root, async_op=later)
        want = everyone if rank == root else []
    elif name == "scatter":
        got = [torch.empty_like(mine)]
        work = dist.scatter(got[0], everyone if rank == root else None, root, async_op=later)
        want = [everyone[rank]]
    elif name == "reduce_scatter":
        got = [torch.empty_like(mine)]
        work = dist.reduce_scatter(got[0], [each.clone() for each in everyone], async_op=later)
        factor = everyone[rank]
        want = [factor if kind is torch.bool else factor * size]
    elif name == "all_to_all":
        got = [torch.empty_like(mine) for _ in range(size)]
        work = dist.all_to_all(got, [each.clone() for each in everyone], async_op=later)
        want = [everyone[rank]] * size
    elif name == "all_to_all_single":
        rows = [[(step + i * 3 + j) % 4 for j in range(size)] for i in range(size)]
        given = torch.cat([torch.full((rows[rank][j], 2), rank * 10.0 + j) for j in range(size)])
        came = torch.empty(sum(rows[i][rank] for i in range(size)), 2)
        work = dist.all_to_all_single(came, given, [rows[i][rank] for i in range(size)], rows[rank], async_op=later)
        want, got = [torch.cat([torch.full((rows[i][rank], 2), i * 10.0 + rank) for i in range(size)])], [came]
    elif name == "all_gather_object":
        boxes = [None] * size
        dist.all_gather_object(boxes, {"rank": rank, "step": step})
        assert boxes == [{"rank": each, "step": step} for each in range(size)]
        want = got = []
    else:
        work = dist.barrier(async_op=later)
        want = got = []
    if work is not None:
        work.wait()
    for expected, found in zip(want, got, strict=True):
        assert torch.equal(expected, found), (step, name, kind, shape, root)
x = torch.ones(1)
say(engine=dist.group.WORLD._route([x]).engine.name)
dist.destroy_process_group()
""",
        ranks,
        timeout=90,
    )
    check(results)
    # Two ranks are on one simulated host.
    name = "shm" if any_engine.name == "hierarchical" and ranks < 3 else any_engine.name
    assert {result["engine"] for result in results} == {name}


def test_every_reduction_on_every_type(any_engine: OnEngine) -> None:
    """Each reduction on each type that it is defined on is right; each other pair is refused on all ranks, by name."""
    results = any_engine.launch(
        FORM
        + """
from functools import reduce as fold

OPS = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
       "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
refused = 0
for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
             torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn):
    for name in (*OPS, "AVG"):
        everyone = [(torch.arange(4099) % 3 + each % 2).to(torch.float32).to(kind) for each in range(size)]
        mine = everyone[rank].clone()
        floating = kind.is_floating_point and kind.itemsize > 1
        allowed = (floating and name not in ("BAND", "BOR", "BXOR")) or (not kind.is_floating_point and name != "AVG")
        try:
            dist.all_reduce(mine, op=getattr(dist.ReduceOp, name))
        except dist.ArgumentError as problem:
            assert not allowed, (kind, name, problem)
            refused += 1
            continue
        assert allowed, (kind, name)
        if name == "AVG":
            want = (sum(each.to(torch.float64) for each in everyone) / size).to(kind)
            assert torch.allclose(mine.double(), want.double(), rtol=1e-2), (kind, name)
        elif kind is torch.bool:
            both = torch.logical_or if name in ("SUM", "MAX", "BOR") else torch.logical_and
            both = torch.logical_xor if name == "BXOR" else both
            assert torch.equal(mine, fold(both, everyone)), (kind, name)
        else:
            assert torch.equal(mine, fold(OPS[name], everyone)), (kind, name)
say(refused=refused)
""",
        2,
    )
    check(results)
    assert results[0]["refused"] == results[1]["refused"] > 10


def test_sixteen_bit_sums_round_once(any_engine: OnEngine) -> None:
    """float16 and bfloat16 are summed in 32 bits: many small addends are not lost, and ranks get the same bits."""
    results = any_engine.launch(
        FORM
        + """
for kind in (torch.float16, torch.bfloat16):
    made = torch.Generator("cpu").manual_seed(5)
    drawn = [torch.randn(50_001, generator=made, device="cpu") for _ in range(size)]
    everyone = [each.to(torch.get_default_device(), kind) for each in drawn]
    mine = everyone[rank].clone()
    dist.all_reduce(mine)
    exact = everyone[0].float()
    for other in everyone[1:]:
        exact = exact + other.float()
    assert torch.equal(mine, exact.to(kind)), kind
odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 65504.0, 6e-8, -0.0], dtype=torch.float16)
mine = odd.clone()
dist.all_reduce(mine)
want = odd.float()
for _ in range(size - 1):
    want = want + odd.float()
assert torch.equal(torch.nan_to_num(mine, 7), torch.nan_to_num(want.to(torch.float16), 7))
""",
        3,
    )
    check(results)


def test_strides_scalars_and_large_tensors(any_engine: OnEngine) -> None:
    """Tensors that are not contiguous, have no dimension, or need many chunks keep their values and their strides."""
    results = any_engine.launch(
        FORM
        + """
grid = torch.arange(12.0).view(3, 4)
part = grid.t()[1::2]
dist.all_reduce(part)
assert torch.equal(grid[:, 1], torch.tensor([1.0, 5.0, 9.0]) * size)
assert torch.equal(grid[:, 0], torch.tensor([0.0, 4.0, 8.0]))
one = torch.tensor(float(rank))
dist.all_reduce(one)
assert one.item() == sum(range(size)) and one.dim() == 0
large = torch.arange(9_000_001, dtype=torch.float32).remainder_(1000) + rank
want = torch.arange(9_000_001, dtype=torch.float32).remainder_(1000) * size + sum(range(size))
dist.all_reduce(large)
assert torch.equal(large, want)
large.fill_(rank)
dist.broadcast(large, size - 1)
assert torch.equal(large, torch.full_like(large, size - 1))
""",
        2,
    )
    check(results)


def test_ddp_trains_the_same_as_on_gloo(engine: OnEngine) -> None:
    """DDP, and functional collectives, give on this backend what they give on Gloo, bit for bit with two ranks."""
    script = """
import torch
import allhands as dist
torch.set_num_threads(1)
found = {}
for backend in ("gloo", "allhands"):
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=20)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 20)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    import torch.distributed._functional_collectives as functional
    summed = functional.all_reduce(torch.ones(3) * rank, "sum", dist.group.WORLD)
    found[backend] = losses, model[0].weight.sum().item(), summed.tolist()
    dist.destroy_process_group()
say(gloo=found["gloo"], ours=found["allhands"])
"""
    results = engine.launch(script, 2, timeout=60)
    check(results)
    for result in results:
        assert result["gloo"] == result["ours"]


def test_overlapping_groups_used_by_threads(engine: OnEngine) -> None:
    """Subgroups that overlap, used from several threads at once, do not disturb each other."""
    results = engine.launch(
        FORM
        + """
import threading
first = dist.new_group([0, 1])
second = dist.new_group([1, 2])
mine = [group for group, members in ((first, (0, 1)), (second, (1, 2))) if rank in members]
problems = []
def work(group):
    try:
        for step in range(100):
            x = torch.ones(1000) * step
            dist.all_reduce(x, group=group)
            assert torch.equal(x, torch.ones(1000) * step * 2)
    except BaseException as problem:
        problems.append(repr(problem))
threads = [threading.Thread(target=work, args=(group,)) for group in mine]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not problems, problems
dist.barrier()
""",
        3,
    )
    check(results)


def test_parts_of_different_sizes(engine: OnEngine) -> None:
    """Uneven lists of all_gather, gather, scatter and all_to_all arrive whole, empty parts among them."""
    results = engine.launch(
        FORM
        + """
for scale in (1, 1000):
    sizes = [each * scale for each in range(size)]
    mine = torch.full((sizes[rank],), rank, dtype=torch.int16)
    want = [torch.full((each,), number, dtype=torch.int16) for number, each in enumerate(sizes)]
    got = [torch.zeros_like(each) for each in want]
    dist.all_gather(got, mine)
    assert all(map(torch.equal, got, want)), got
    got = [torch.zeros_like(each) for each in want]
    dist.gather(mine, got if rank == 1 else None, 1)
    assert rank != 1 or all(map(torch.equal, got, want)), got
    mine.zero_()
    dist.scatter(mine, want if rank == 2 else None, 2)
    assert torch.equal(mine, want[rank])
    table = [[(i * 2 + j) % 4 * scale for j in range(size)] for i in range(size)]
    given = [torch.full((table[rank][j],), rank * 10.0 + j) for j in range(size)]
    came = [torch.zeros(table[i][rank]) for i in range(size)]
    dist.all_to_all(came, given)
    assert all(torch.equal(came[i], torch.full((table[i][rank],), i * 10.0 + rank)) for i in range(size))
""",
        3,
    )
    check(results)


def test_results_are_the_same_bits_on_every_rank(engine: OnEngine) -> None:
    """Sums of random numbers of any size and type are the same on every rank, bit for bit."""
    results = engine.launch(
        FORM
        + """
import hashlib
digests = []
for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
    for count in (1, 30, 1000, 100_003):
        torch.manual_seed(count + rank)
        x = torch.randn(count, dtype=torch.complex64 if kind.is_complex else torch.float32).to(kind)
        dist.all_reduce(x)
        digests.append(hashlib.sha256(bytes(x.view(torch.uint8).tolist())).hexdigest())
say(digests=digests)
""",
        3,
    )
    check(results)
    assert results[0]["digests"] == results[1]["digests"] == results[2]["digests"]


def test_sparse_tensors(engine: OnEngine) -> None:
    """Sparse sums use Gloo, in order with other calls; other sparse calls are refused, and the group still works."""
    results = engine.launch(
        FORM
        + """
work = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(3)]
x = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
dist.all_reduce(x)
want = torch.zeros(5)
for each in range(size):
    want[each] += 1
    want[3] += 2
assert torch.equal(x.to_dense(), want), x
refused = [attempt(lambda: dist.broadcast(x, 0)), attempt(lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX))]
y = torch.ones(1000)
dist.all_reduce(y)
assert y[0] == size
say(refused=[each["slug"] for each in refused])
""",
        3,
    )
    check(results)
    for result in results:
        assert result["refused"] == ["invalid-argument"] * 2
