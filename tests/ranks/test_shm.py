"""Collectives through shared memory, with real processes: right, the same on every rank, and never a hang."""

from __future__ import annotations

import re

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("nursery")

# The class of the group; `test_relay` runs these tests on the engine for several hosts.
ENGINE = "Group"

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's own words where it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_operations_agree_with_a_model(ranks: int) -> None:
    """Random operations on random types and sizes give what a model computes from everyone's data."""
    results = harness.launch(
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
say(engine=type(dist.group.WORLD).__name__)
dist.destroy_process_group()
""",
        ranks,
        timeout=90,
    )
    check(results)
    assert {result["engine"] for result in results} == {ENGINE}


def test_every_reduction_on_every_type() -> None:
    """Each reduction on each type that it is defined on is right; each other pair is refused on all ranks, by name."""
    results = harness.launch(
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


def test_sixteen_bit_sums_round_once() -> None:
    """float16 and bfloat16 are summed in 32 bits: many small addends are not lost, and ranks get the same bits."""
    results = harness.launch(
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


def test_strides_scalars_and_large_tensors() -> None:
    """Tensors that are not contiguous, have no dimension, or need many chunks keep their values and their strides."""
    results = harness.launch(
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


MISMATCHES = {
    "count": ("dist.all_reduce(torch.ones(5))", "dist.all_reduce(torch.ones(6))"),
    "dtype": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4, dtype=torch.int32))"),
    "operation": ("dist.all_reduce(torch.ones(4))", "dist.broadcast(torch.ones(4), 0)"),
    "root": ("dist.broadcast(torch.ones(4), 0)", "dist.broadcast(torch.ones(4), 1)"),
    "reduction": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)"),
    "barrier": ("dist.barrier()", "dist.all_reduce(torch.ones(400_000))"),
    "gather": ("dist.all_gather([torch.ones(3)] * size, torch.ones(3))", "dist.reduce(torch.ones(3), 0)"),
    "size": (
        "dist.all_gather([torch.ones(3) for _ in range(size)], torch.ones(3))",
        "dist.all_gather([torch.ones(2) for _ in range(size)], torch.ones(2))",
    ),
    "rooted": ("dist.reduce(torch.ones(3), 0)", "dist.scatter(torch.ones(3), None, 0)"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_raises_on_every_rank(kind: str) -> None:
    """Ranks that call different things all get collective-mismatch within a second or so, with what each called.

    A rank that needs nothing from the others may be through with its call, and is told at the next one.
    """
    usual, odd = MISMATCHES[kind]
    results = harness.launch(
        FORM
        + f"""
dist.barrier()
found = attempt(lambda: {odd} if rank == 2 else {usual})
if not found["kind"]:
    assert {kind!r} in ("operation", "root", "gather", "rooted")
    found = attempt(dist.barrier)
say(found=found)
""",
        3,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert result["found"]["seconds"] < 3
        assert "script.py:" in result["found"]["text"]
    assert {tuple(result["found"]["ranks"]) for result in results} == {(2,)}


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
@pytest.mark.parametrize(
    "call", ["all_reduce(x)", "broadcast(x, 1)", "barrier()", "all_gather([x.clone() for _ in range(size)], x)"]
)
def test_a_rank_that_falls_in_a_collective_ends_it_for_the_others(how: str, call: str) -> None:
    """Survivors that wait in shared memory for a rank that dies or raises are told within a second."""
    end = {"kill": "os.kill(os.getpid(), 9)", "exit": "os._exit(3)", "raise": "raise ValueError('bad batch')"}[how]
    results = harness.launch(
        FORM
        + f"""
import os, time
x = torch.ones(1000)
dist.all_reduce(x)
if rank == 1:
    time.sleep(0.3)
    say(fell=time.time())
    {end}
found = attempt(lambda: dist.{call})
say(found=found, told=time.time())
""",
        3,
    )
    fell = results[1]["fell"]
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == ("peer-failed" if how == "raise" else "peer-lost")
        assert result["found"]["ranks"] == [1]
        assert result["told"] - fell < 1.0


def test_a_rank_that_does_not_come_is_named_with_what_it_does() -> None:
    """At the timeout the rank that skipped the call is named, with the line it is at instead."""
    results = harness.launch(
        FORM
        + """
import datetime, os, time
x = torch.ones(10)
dist.all_reduce(x)
dist.group.WORLD.set_timeout(datetime.timedelta(seconds=2))
if rank == 1:
    while not all(os.path.exists(f"{os.environ['GATES']}/told.{each}") for each in (0, 2)):
        time.sleep(0.05)
else:
    say(found=attempt(lambda: dist.all_reduce(x)))
    gate("told", 2)
""",
        3,
    )
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "collective-timeout"
        assert result["found"]["ranks"] == [1]
        assert "script.py" in result["found"]["text"]
        assert re.search(r"^all_reduce did not finish within [2-9]", result["found"]["text"])
        # One of the words that torch's own tests of a backend look for.
        assert " timeout " in result["found"]["text"]


def test_torch_trains_the_same_on_it_as_on_gloo() -> None:
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
    results = harness.launch(script, 2, timeout=60)
    check(results)
    for result in results:
        assert result["gloo"] == result["ours"]


def test_groups_overlap_and_threads_share_them() -> None:
    """Subgroups that overlap, used from several threads at once, do not disturb each other."""
    results = harness.launch(
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


def test_a_forked_child_and_a_root_that_does_not_exist_are_refused() -> None:
    """Neither may touch the segment: a child would be taken for its parent, and a root outside it is no rank."""
    results = harness.launch(
        FORM
        + """
import os
found = {
    "broadcast": attempt(lambda: dist.broadcast(torch.ones(3), size + 3)),
    "reduce": attempt(lambda: dist.reduce(torch.ones(3), size + 3)),
}
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    slugs = [attempt(lambda: library.all_reduce(torch.ones(3))).get("slug") for library in (dist, torch_dist)]
    os.write(writer, repr(slugs).encode())
    os._exit(0)
os.waitpid(child, 0)
say(found=found, child=os.read(reader, 1000).decode())
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [size] * 3
""",
        2,
    )
    check(results)
    for result in results:
        assert {found["kind"] for found in result["found"].values()} <= {"ArgumentError", "ValueError"}
        assert result["child"] == "['forked-process', 'forked-process']"


def test_groups_that_end_give_their_descriptors_back() -> None:
    """Forming and destroying groups on shared memory does not use up file descriptors."""
    results = harness.launch(
        """
import gc, os
import torch
import allhands as dist

def held():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

counts = []
for _ in range(6):
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    counts.append(held())
say(counts=counts)
""",
        2,
    )
    check(results)
    for result in results:
        assert result["counts"][-1] <= result["counts"][1], result["counts"]


@pytest.mark.parametrize("kib", ["64", "4096"])
def test_the_segment_is_as_large_as_asked(kib: str) -> None:
    """Rank 0's ALLHANDS_SLOT_KIB sets the size of everyone's segment, and results do not depend on it."""
    results = harness.launch(
        FORM
        + """
tensor = torch.arange(700_001.0) + rank
dist.all_reduce(tensor)
assert torch.equal(tensor, 2 * torch.arange(700_001.0) + 1)
parts = [torch.full((70_000,), 10.0 * rank + each) for each in range(size)]
got = [torch.empty(70_000) for _ in range(size)]
dist.all_to_all(got, parts)
assert [each[-1].item() for each in got] == [10.0 * each + rank for each in range(size)]
say(bytes=dist.group.WORLD.engine.segment_nbytes)
dist.destroy_process_group()
""",
        2,
        each={0: {"ALLHANDS_SLOT_KIB": kib}},
    )
    check(results)
    slots = 2 * 4 * int(kib) * 1024
    assert {slots <= result["bytes"] < slots + (6 << 20) for result in results} == {True}


def test_a_slot_that_is_too_small_is_refused_on_all_ranks() -> None:
    """A size that makes no sense is said before anything is shared, on every rank."""
    results = harness.launch(
        """
import allhands as dist
try:
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
except dist.ArgumentError as problem:
    say(text=str(problem))
""",
        2,
        each={0: {"ALLHANDS_SLOT_KIB": "8"}},
    )
    check(results)
    assert all("ALLHANDS_SLOT_KIB=8" in result["text"] for result in results)
