"""The Gloo engine where it differs from shared memory. The rest is in `conformance`."""

from __future__ import annotations

import signal
import time

import pytest

from conformance.engines import ENGINES, FORM, OnEngine, check
from conformance.test_failures import AT_ONCE_S, mismatched

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.fixture
def engine() -> OnEngine:
    """The engine for several hosts, on one."""
    return ENGINES["gloo"]


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
def test_sizes_that_do_not_fit_each_other(engine: OnEngine, kind: str) -> None:
    """If a part is larger than its output on another rank, all ranks get an error with both ranks and sizes."""
    results = engine.launch(FORM + SIZES[kind] + "say(found=attempt(call))", 3)
    text = mismatched(results)
    assert "gives rank" in text
    assert 0 in results[0]["found"]["ranks"]


def test_a_mismatch_states_the_call_and_line_of_each_rank(engine: OnEngine) -> None:
    """The message has each side's ranks, operation, dtype, count, shape and line of the script."""
    results = engine.launch(
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


def test_a_call_that_one_rank_cannot_make_is_an_error_on_all(engine: OnEngine) -> None:
    """A list of the wrong length on one rank: the others get an error at once, with that rank's reason."""
    results = engine.launch(
        FORM
        + """
got = [torch.empty(3) for _ in range(size - (rank == 1))]
say(found=attempt(lambda: torch_dist.group.WORLD.allgather([got], [torch.ones(3)]).wait()))
""",
        3,
    )
    assert "rank 1 cannot do its all_gather" in mismatched(results)
    assert results[0]["found"]["ranks"] == [1]


def test_pending_calls_keep_their_order_and_fail_in_wait(engine: OnEngine) -> None:
    """Many calls in flight run in the order issued; a mismatch among them raises at its wait and in its future."""
    results = engine.launch(
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
def test_one_member_of_a_subgroup_is_named(engine: OnEngine) -> None:
    """At the deadline only ranks of the waiting group are named, not ranks outside of it."""
    results = engine.launch(
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


def test_ctrl_c_ends_a_wait_and_is_reported_to_the_others(engine: OnEngine) -> None:
    """A rank that is interrupted in a call raises KeyboardInterrupt at once; the others raise peer-failed."""
    with engine.running(
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


def test_what_torch_builds_on_a_group(engine: OnEngine) -> None:
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
    results = engine.launch(script, 2, timeout=60)
    check(results)
    for result in results:
        assert result["gloo"] == result["ours"]


def test_rank_0_decides_about_the_engine(engine: OnEngine) -> None:
    """If settings differ between ranks, that of rank 0 counts."""
    results = engine.launch(
        FORM + "x = torch.ones(3)\ndist.all_reduce(x)\nsay(engine=type(dist.group.WORLD).__name__, sum=x[0].item())",
        2,
        each={0: {"ALLHANDS_ENGINE": ""}, 1: {"ALLHANDS_ENGINE": "gloo"}},
    )
    check(results)
    assert [(result["engine"], result["sum"]) for result in results] == [("Group", 2.0)] * 2


def test_an_engine_that_does_not_exist_is_named(engine: OnEngine) -> None:
    """A setting that names no engine is refused with its value, on every rank, without waiting."""
    results = engine.launch(
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
