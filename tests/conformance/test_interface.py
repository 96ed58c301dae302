"""The interface `engines.base.Engine` itself: operations on memory, typed failures with their culprit, abort, close.

Ranks form engines directly, without a coordinator or a process group.
"""

from __future__ import annotations

import signal

import pytest

from conformance.engines import OnEngine, check
from ranks import harness

# Forms an engine of the wanted kind under a key of its own, as often as the script wants.
ENGINE = """
import datetime, os, threading, time
import torch
import torch.distributed as torch_dist
from allhands import _core, _torch
from allhands.engines import base, dtypes
from allhands.engines.base import parts_of
from allhands.engines.gloo.engine import GlooEngine
from allhands.engines.hierarchical import engine as hierarchical
from allhands.engines.shm import engine as shm

torch.set_num_threads(1)
store = torch_dist.FileStore(os.environ["GATES"] + "/store", size)
NS = 20_000_000_000
SUM, MAX = 1, 5
F32 = dtypes.DTYPES[torch.float32]
names = [10 + each for each in range(size)]

def form(key):
    sub = torch_dist.PrefixStore(key, store)
    gloo = _torch.gloo(torch_dist.PrefixStore("gloo", sub), rank, size, datetime.timedelta(seconds=20))
    if os.environ["KIND"] == "shm":
        made = shm.form(sub, rank, size, 20.0, lambda: None)
    elif os.environ["KIND"] == "gloo":
        made = GlooEngine(gloo, rank, names)
    else:
        made = hierarchical.form(sub, gloo, rank, names, address="", timeout_s=20.0, check=lambda: None)
    assert made.name == os.environ["KIND"], made
    made.site, made.shape, made.torchs = f"script.py:{rank}", "[1]", gloo
    return made

def place(tensor):
    return tensor.data_ptr(), tensor.nbytes

def failed(call, *args):
    began = time.monotonic()
    try:
        call(*args)
    except base.EngineFailure as problem:
        judgement = getattr(problem, "judgement", None)
        return {"kind": type(problem).__name__, "culprit": problem.culprit, "seconds": time.monotonic() - began,
                "odd": judgement.odd if judgement else None, "lines": judgement.lines if judgement else [],
                "message": getattr(problem, "message", None)}
    return {"kind": "", "seconds": time.monotonic() - began}
"""

AT_ONCE_S = 8.0


@pytest.fixture
def direct(engine: OnEngine) -> OnEngine:
    """An engine that a script can form by itself."""
    if engine.name == "mpi":
        pytest.skip("ranks form it through a process group only")
    return OnEngine(engine.name, {"KIND": engine.name, "GLOO_SOCKET_IFNAME": "lo"}, engine.prelude + ENGINE)


def test_every_operation_type_reduction_and_root(direct: OnEngine) -> None:
    """Each operation has the model's result, for all dtypes, reductions, roots, empty and uneven parts; same bits."""
    results = direct.launch(
        """
import hashlib
engine = form("operations")
digest = hashlib.blake2b()
count = 0
def data(each, length, dtype):
    return ((torch.arange(length) * 3 + each * 5) % 4 + (each % 2)).to(dtype)
for dtype, code in dtypes.DTYPES.items():
    for reduction in range(1, len(dtypes.REDUCTION_NAMES)):
        if not dtypes.reducible(code, reduction):
            continue
        count += 1
        length, root = (0, 1, 7, 300, 70_001)[count % 5], count % size
        everyone = [data(each, length, dtype) for each in range(size)]
        want = dtypes.reduce_rows(everyone, reduction) if length else everyone[0]
        mine = everyone[rank].clone()
        engine.all_reduce(*place(mine), code, reduction, NS)
        assert torch.equal(mine, want), ("all_reduce", dtype, reduction, length)
        mine = everyone[rank].clone()
        engine.reduce(*place(mine), code, reduction, root, NS)
        assert torch.equal(mine, want if rank == root else everyone[rank]), ("reduce", dtype, reduction, length)
        given, mine = [each.clone() for each in everyone], torch.empty_like(everyone[0])
        rows = [everyone[rank]] * size
        engine.reduce_scatter(parts_of(given), *place(mine), code, reduction, NS)
        assert not length or torch.equal(mine, dtypes.reduce_rows(rows, reduction)), ("scatter", dtype, reduction)
        pair = [everyone[rank].clone(), data(rank, 5, dtype)]
        engine.all_reduce_list(parts_of(pair), code, reduction, NS)
        assert torch.equal(pair[0], want), ("list", dtype, reduction)
        mine = everyone[rank].clone()
        engine.broadcast(*place(mine), code, root, NS)
        assert torch.equal(mine, everyone[root])
assert count > 80
for length in (3, 1000, 1_000_003):
    values = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    for dtype in (torch.float32, torch.float64, torch.float16):
        mine = values.to(dtype)
        engine.all_reduce(*place(mine), dtypes.DTYPES[dtype], SUM, NS)
        digest.update(mine.view(torch.uint8).numpy().tobytes())
for scale in (1, 1000):
    sizes = [each * scale for each in range(size)]
    want = [torch.full((each,), number, dtype=torch.float32) for number, each in enumerate(sizes)]
    mine, got = want[rank].clone(), [torch.zeros_like(each) for each in want]
    engine.all_gather(*place(mine), parts_of(got), F32, NS)
    assert all(map(torch.equal, got, want))
    for root in range(size):
        got = [torch.zeros_like(each) for each in want]
        engine.gather(*place(mine), parts_of(got) if rank == root else None, F32, root, NS)
        assert rank != root or all(map(torch.equal, got, want))
        out = torch.zeros_like(mine)
        engine.scatter(parts_of(want) if rank == root else None, *place(out), F32, root, NS)
        assert torch.equal(out, want[rank])
    table = [[(i * 2 + j) % 4 * scale for j in range(size)] for i in range(size)]
    given = [torch.full((table[rank][j],), rank * 10.0 + j) for j in range(size)]
    came = [torch.zeros(table[i][rank]) for i in range(size)]
    engine.all_to_all(parts_of(given), parts_of(came), F32, NS)
    assert all(torch.equal(came[i], torch.full((table[i][rank],), i * 10.0 + rank)) for i in range(size))
before = engine.sequence()
engine.barrier(NS)
assert engine.sequence() == before + 1 and not engine.in_call
x = torch.ones(3)
engine.compare_only(dtypes.DELEGATED + dtypes.operation_code("all_reduce"), SUM, F32, 12, -1, NS)
engine.delegate(engine.torchs.allreduce, [x], torch_dist.AllreduceOptions())
assert x.tolist() == [size] * 3
engine.barrier(NS)
engine.close(1.0)
say(digest=digest.hexdigest())
""",
        3,
    )
    check(results)
    assert len({result["digest"] for result in results}) == 1


MISMATCHES = {
    "operation": ("engine.all_reduce(*place(x), F32, SUM, NS)", "engine.barrier(NS)"),
    "size": ("engine.all_reduce(*place(x), F32, SUM, NS)", "engine.all_reduce(x.data_ptr(), 4, F32, SUM, NS)"),
    "dtype": ("engine.all_reduce(*place(x), F32, SUM, NS)", "engine.all_reduce(*place(x), 6, SUM, NS)"),
    "reduction": ("engine.all_reduce(*place(x), F32, SUM, NS)", "engine.all_reduce(*place(x), F32, MAX, NS)"),
    "delegated": ("engine.compare_only(66, SUM, F32, 12, -1, NS)", "engine.compare_only(66, SUM, F32, 16, -1, NS)"),
    "uneven": (
        "engine.all_to_all(parts_of([x] * size), parts_of(room), F32, NS)",
        "engine.all_to_all(parts_of([x[:2]] * size), parts_of(room), F32, NS)",
    ),
}


def test_a_mismatch_is_a_call_mismatch_on_every_rank(direct: OnEngine) -> None:
    """Each kind of difference raises CallMismatch at once on all ranks; engines that judge it name the odd rank."""
    calls = "".join(
        f"""
engine = form("mismatch {kind}")
x, room = torch.ones(3), list(torch.empty(size, 3))
engine.barrier(NS)
found = failed(lambda: {odd} if rank == 1 else {usual})
say(**{{"{kind}": found, "again": failed(engine.barrier, NS) if engine.in_call else None}})
gate("{kind}")
engine.abort(rank)
"""
        for kind, (usual, odd) in MISMATCHES.items()
    )
    results = direct.launch(calls, 3)
    check(results)
    for kind in MISMATCHES:
        for result in results:
            found = result[kind]
            assert found["kind"] == "CallMismatch", (kind, found)
            assert found["seconds"] < AT_ONCE_S
            assert found["odd"] in (None, [1]) or kind == "uneven", (kind, found)
            if found["odd"] is not None:
                assert any("rank 11" in line and "script.py:1" in line for line in found["lines"]), found["lines"]
            else:
                assert direct.name == "shm"
        assert all((result["again"] or {"kind": "EngineAborted"})["kind"] == "EngineAborted" for result in results)


def test_deadline_and_abort(direct: OnEngine) -> None:
    """A call ends with EngineTimeout at its deadline, and at once when another thread aborts; no call follows."""
    results = direct.launch(
        """
engine = form("deadline")
x = torch.ones(50_000)
engine.all_reduce(*place(x), F32, SUM, NS)
if rank != 2:
    say(late=failed(engine.all_reduce, *place(x), F32, SUM, 400_000_000))
gate("late")
if rank != 2:
    engine.abort(rank)
    say(after=failed(engine.barrier, NS))
gate("after")
engine = form("abort")
engine.barrier(NS)
if rank != 2:
    threading.Timer(0.3, engine.abort, [rank]).start()
    say(aborted=failed(engine.all_reduce, *place(x), F32, SUM, NS))
gate("aborted")
""",
        3,
    )
    check(results)
    for result in results[:2]:
        assert result["late"]["kind"] == "EngineTimeout", result["late"]
        assert result["late"]["culprit"] != result.rank
        assert 0.3 < result["late"]["seconds"] < AT_ONCE_S
        assert result["after"]["kind"] == "EngineAborted", result["after"]
        assert result["aborted"]["kind"] in {"EngineAborted", "TransportFailure"}, result["aborted"]
        assert result["aborted"]["seconds"] < AT_ONCE_S


def test_a_killed_rank(direct: OnEngine) -> None:
    """A rank that dies in the middle ends the calls of the others at once; the culprit is that rank where known."""
    results = direct.launch(
        """
engine = form("killed")
x = torch.ones(50_000)
engine.all_reduce(*place(x), F32, SUM, NS)
if rank == 2:
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
found = failed(engine.all_reduce, *place(x), F32, SUM, NS)
engine.abort(rank)
say(found=found)
""",
        3,
    )
    assert results[2].returncode == -signal.SIGKILL
    for result in results[:2]:
        harness.well([result])
        found = result["found"]
        assert found["kind"] in {"PeerDead", "TransportFailure", "EngineAborted"}, found
        assert found["seconds"] < AT_ONCE_S
    if direct.name == "shm":
        assert [(result["found"]["kind"], result["found"]["culprit"]) for result in results[:2]] == [
            ("PeerDead", 2)
        ] * 2
    if direct.name == "hierarchical":
        assert results[0]["found"]["culprit"] == 2


def test_a_rank_that_leaves(direct: OnEngine) -> None:
    """In shared memory a rank that closes its end without making the call raises PeerLeft with its number."""
    if direct.name != "shm":
        pytest.skip("only shared memory observes it; elsewhere the connection closes")
    results = direct.launch(
        """
engine = form("left")
engine.barrier(NS)
if rank == 1:
    engine.close(0.0)
else:
    say(found=failed(engine.barrier, NS))
gate("done")
""",
        3,
    )
    check(results)
    for result in (results[0], results[2]):
        assert (result["found"]["kind"], result["found"]["culprit"]) == ("PeerLeft", 1)


def test_a_call_that_one_rank_refuses(direct: OnEngine) -> None:
    """Where an engine reports a refusal, all ranks raise CallMismatch with the reason; if all refuse, none does."""
    if direct.name == "shm":
        pytest.skip("ranks in shared memory wait for a rank that cannot make its call")
    results = direct.launch(
        """
engine = form("refused")
x = torch.ones(4)
say(all=failed(engine.refuse, "all_reduce", "too large", NS), in_call=engine.in_call)
call = (engine.refuse, "all_reduce", "a list of 2", NS) if rank == 1 else (engine.all_reduce, *place(x), F32, SUM, NS)
say(found=failed(*call))
""",
        3,
    )
    check(results)
    for result in results:
        assert (result["all"]["kind"], result["in_call"]) == ("", False)
        assert (result["found"]["kind"], result["found"]["odd"]) == ("CallMismatch", [1])
        assert any("a list of 2" in line for line in result["found"]["lines"])
