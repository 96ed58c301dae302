"""The engine for several hosts, on one: the tests of shared memory hold on it, and some of what it does differently."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from ranks import harness, test_shm
from ranks.test_shm import (
    FORM,
    check,
    test_a_forked_child_and_a_root_that_does_not_exist_are_refused,
    test_a_mismatch_raises_on_every_rank,
    test_a_rank_that_does_not_come_is_named_with_what_it_does,
    test_every_reduction_on_every_type,
    test_groups_overlap_and_threads_share_them,
    test_random_operations_agree_with_a_model,
    test_sixteen_bit_sums_round_once,
    test_strides_scalars_and_large_tensors,
    test_torch_trains_the_same_on_it_as_on_gloo,
)

# Tests of another module: pytest finds them here too, and the fixture below turns them to this engine.
__all__ = [
    "test_a_forked_child_and_a_root_that_does_not_exist_are_refused",
    "test_a_mismatch_raises_on_every_rank",
    "test_a_rank_that_does_not_come_is_named_with_what_it_does",
    "test_every_reduction_on_every_type",
    "test_groups_overlap_and_threads_share_them",
    "test_random_operations_agree_with_a_model",
    "test_sixteen_bit_sums_round_once",
    "test_strides_scalars_and_large_tensors",
    "test_torch_trains_the_same_on_it_as_on_gloo",
]

pytestmark = pytest.mark.usefixtures("nursery")

GLOO = {"ALLHANDS_ENGINE": "gloo"}
BOTH = [pytest.param("shm", id="shm"), pytest.param("gloo", id="gloo")]

# A deadline, not a figure: what is seen at once on an idle machine takes longer on a busy one.
AT_ONCE_S = 5.0


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every rank use this engine, unless a test says otherwise."""
    start = harness.start

    def on_gloo(source: str, ranks: int, env: Any = None, **kw: Any) -> harness.Job:
        return start(source, ranks, {**GLOO, **(env or {})}, **kw)

    monkeypatch.setattr(harness, "start", on_gloo)
    monkeypatch.setattr(test_shm, "ENGINE", "WideGroup")


def mismatched(results: list[harness.Result]) -> str:
    """Check that every rank was told of a mismatch at once, blaming the same; return what rank 0 was told."""
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert result["found"]["seconds"] < AT_ONCE_S
        assert result["found"]["ranks"] == results[0]["found"]["ranks"]
    return str(results[0]["found"]["text"])


def test_parts_of_different_sizes() -> None:
    """Uneven lists of all_gather, gather, scatter and all_to_all arrive whole, empty parts among them."""
    results = harness.launch(
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


SIZES = {
    "all_to_all_single": """
rows = [2, 2, 2] if rank else [2, 2, 3]
call = lambda: dist.all_to_all_single(torch.empty(6), torch.ones(sum(rows)), [2, 2, 2], rows)
""",
    "all_gather": """
sizes = [1, 2, 3]
room = [1, 2, 4] if rank == 0 else sizes
call = lambda: dist.all_gather([torch.empty(each) for each in room], torch.ones(sizes[rank]))
""",
    "gather": """
sizes = [1, 2, 3]
room = [torch.empty(each) for each in [1, 2, 4]] if rank == 0 else None
call = lambda: dist.gather(torch.ones(sizes[rank]), room, 0)
""",
}


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_that_do_not_fit_each_other(kind: str) -> None:
    """Where one rank gives what another has no room for, all are told which two, and how much."""
    results = harness.launch(FORM + SIZES[kind] + "say(found=attempt(call))", 3)
    text = mismatched(results)
    assert "gives rank" in text
    assert 0 in results[0]["found"]["ranks"]


def test_a_mismatch_says_what_each_rank_called_and_where() -> None:
    """The words have each side's ranks, operation, type, count, shape and line of the script."""
    results = harness.launch(
        FORM
        + """
if rank == 1:
    call = lambda: dist.all_reduce(torch.ones(2, 4))
else:
    call = lambda: dist.all_reduce(torch.ones(3, 4), op=dist.ReduceOp.MAX)
say(found=attempt(call))
""",
        3,
    )
    text = mismatched(results)
    assert "ranks 0 and 2 called all_reduce of float32 x 12 by MAX, [3, 4], at script.py:" in text
    assert "rank 1 called all_reduce of float32 x 8 by SUM, [2, 4], at script.py:" in text
    assert results[0]["found"]["ranks"] == [1]


@pytest.mark.parametrize("engine_name", BOTH)
def test_sparse_tensors(engine_name: str) -> None:
    """Sparse sums go through Gloo in their turn; everything else about them is refused and the group goes on."""
    results = harness.launch(
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
        {"ALLHANDS_ENGINE": engine_name},
    )
    check(results)
    for result in results:
        assert result["refused"] == ["invalid-argument"] * 2


@pytest.mark.parametrize("engine_name", BOTH)
@pytest.mark.parametrize("odd", ["torch.ones(5)", "torch.sparse_coo_tensor([[0]], [1.0], (6,))"], ids=["dense", "size"])
def test_a_sparse_mismatch(engine_name: str, odd: str) -> None:
    """A sparse tensor meets a dense one, or one of another size: a mismatch on every rank, not a hang."""
    results = harness.launch(
        FORM
        + f"""
x = {odd} if rank == 2 else torch.sparse_coo_tensor([[0]], [1.0], (5,))
say(found=attempt(lambda: dist.all_reduce(x)))
""",
        3,
        {"ALLHANDS_ENGINE": engine_name},
    )
    assert "all_reduce through Gloo of float32" in mismatched(results)
    assert results[0]["found"]["ranks"] == [2]


def test_a_call_that_one_rank_cannot_make_is_told_to_all() -> None:
    """A list of the wrong length on one rank: the others are told at once, with that rank's reason."""
    results = harness.launch(
        FORM
        + """
got = [torch.empty(3) for _ in range(size - (rank == 1))]
say(found=attempt(lambda: torch_dist.group.WORLD.allgather([got], [torch.ones(3)]).wait()))
""",
        3,
    )
    assert "rank 1 cannot do its all_gather" in mismatched(results)
    assert results[0]["found"]["ranks"] == [1]


def test_a_rank_that_falls_ends_the_call_for_the_others() -> None:
    """Survivors of a kill -9 raise peer-lost with its rank within a second or so."""
    results = harness.launch(
        FORM
        + """
import os, time
x = torch.ones(100_000)
dist.all_reduce(x)
if rank == 1:
    time.sleep(0.3)
    say(fell=time.time())
    os.kill(os.getpid(), 9)
say(found=attempt(lambda: dist.all_reduce(x)), told=time.time())
""",
        3,
    )
    for result in (results[0], results[2]):
        assert (result["found"]["slug"], result["found"]["ranks"]) == ("peer-lost", [1])
        assert result["told"] - results[1]["fell"] < AT_ONCE_S


def test_calls_under_way_keep_their_order_and_fail_where_waited() -> None:
    """Many calls in flight run in the order issued; a mismatch among them raises at its wait and in its future."""
    results = harness.launch(
        FORM
        + """
tensors = [torch.full((1 + 500 * (step % 3),), float(rank + step)) for step in range(30)]
work = [dist.all_reduce(x, async_op=True) for x in tensors]
for step, (each, x) in enumerate(zip(work, tensors)):
    each.wait()
    assert torch.equal(x, torch.full_like(x, sum(range(size)) + size * step))
good = dist.all_reduce(torch.ones(3), async_op=True)
bad = dist.all_reduce(torch.ones(4 + (rank == 0)), async_op=True)
good.wait()
future = bad.get_future()
say(found=attempt(bad.wait), future=attempt(future.wait))
""",
        3,
    )
    mismatched(results)
    for result in results:
        assert "different calls" in result["future"]["text"], result["future"]


@pytest.mark.soak
def test_one_member_of_a_subgroup_is_named() -> None:
    """At the deadline only ranks of the group that waits are named; who is outside of it owes nothing."""
    results = harness.launch(
        FORM
        + """
import time
from datetime import timedelta
pair = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
if rank == 0:
    say(found=attempt(lambda: dist.all_reduce(torch.ones(3), group=pair)))
else:
    time.sleep(4)
""",
        3,
    )
    assert results[0]["found"]["slug"] == "collective-timeout"
    assert results[0]["found"]["ranks"] == [1]
    assert "script.py" in results[0]["found"]["text"]


def test_ctrl_c_ends_a_wait_and_tells_the_others() -> None:
    """A rank that is interrupted in a call raises KeyboardInterrupt at once; the others hear of it."""
    with harness.running(
        FORM
        + """
import os, time
dist.barrier()
say(ready=True)
if rank == 2:
    while not os.path.exists(f"{os.environ['GATES']}/interrupted.1"):
        time.sleep(0.01)
try:
    dist.all_reduce(torch.ones(1000))
except KeyboardInterrupt:
    say(interrupted=time.time())
    gate("interrupted", 1)
    raise SystemExit(0)
except dist.AllhandsError as problem:
    say(slug=problem.slug, ranks=list(problem.ranks), told=time.time())
""",
        3,
    ) as job:
        job.wait_for("ready")
        time.sleep(0.3)
        sent = job.signal(1, signal.SIGINT)
        results = job.results()
    assert results[1]["interrupted"] - sent < 1.0
    for result in (results[0], results[2]):
        assert (result["slug"], result["ranks"]) == ("peer-failed", [1])


def test_what_torch_builds_on_a_group() -> None:
    """Point to point, objects, FSDP2, DTensor and functional collectives give what they give on Gloo."""
    script = """
import torch
import torch.distributed as torch_dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import allhands as dist
torch.set_num_threads(1)
found = {}
for backend in ("gloo", "allhands"):
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=20)
    world = dist.group.WORLD
    seen = []
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (size,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    model(torch.full((3, 6), 1.0 + rank)).sum().backward()
    seen.append([parameter.grad.full_tensor().tolist() for parameter in model.parameters()])
    spread = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    seen.append(spread.redistribute(mesh, [Replicate()]).to_local().tolist())
    seen.append(functional.all_gather_tensor(torch.ones(3) * rank, 0, world).tolist())
    seen.append(functional.reduce_scatter_tensor(torch.arange(2.0 * size) + rank, "sum", 0, world).tolist())
    seen.append(functional.all_to_all_single(torch.arange(2.0 * size) + rank, None, None, world).tolist())
    seen.append(functional.broadcast(torch.ones(3) * rank, 1, world).tolist())
    boxes = [None] * size
    dist.all_gather_object(boxes, {"rank": rank})
    one = [f"from {rank}"]
    dist.broadcast_object_list(one, 1)
    seen += [boxes, one]
    other = torch.zeros(3)
    ops = [dist.P2POp(dist.isend, torch.ones(3) * rank, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    [work.wait() for work in dist.batch_isend_irecv(ops)]
    seen.append(other.tolist())
    found[backend] = seen
    dist.destroy_process_group()
say(gloo=found["gloo"], ours=found["allhands"])
"""
    results = harness.launch(script, 2, timeout=60)
    check(results)
    for result in results:
        assert result["gloo"] == result["ours"]


def test_results_are_the_same_bits_on_every_rank() -> None:
    """Sums of random numbers of any size and type are the same on every rank, bit for bit."""
    results = harness.launch(
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


def test_rank_0_decides_about_the_engine() -> None:
    """Ranks whose settings differ still meet: rank 0's counts."""
    results = harness.launch(
        FORM + "x = torch.ones(3)\ndist.all_reduce(x)\nsay(engine=type(dist.group.WORLD).__name__, sum=x[0].item())",
        2,
        each={0: {"ALLHANDS_ENGINE": ""}, 1: GLOO},
    )
    check(results)
    assert [(result["engine"], result["sum"]) for result in results] == [("Group", 2.0)] * 2


def test_an_engine_that_does_not_exist_is_named() -> None:
    """A setting that names no engine is refused with its value, on every rank, and nobody waits."""
    results = harness.launch(
        """
import allhands as dist
say(found=attempt(dist.init_process_group, "allhands", None, 20, size, rank))
""",
        2,
        {"ALLHANDS_ENGINE": "warp"},
    )
    check(results)
    assert results[0]["found"]["slug"] == "invalid-argument"
    assert "ALLHANDS_ENGINE='warp'" in results[0]["found"]["text"]
    assert results[1]["found"]["seconds"] < AT_ONCE_S
