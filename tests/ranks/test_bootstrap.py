"""Every rendezvous forms a group, and our functions behave like those of torch.distributed."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks.harness import Result, free_port, ipv6, launch

pytestmark = pytest.mark.usefixtures("fork_server")

# What every rank does once it has a group: the group must carry tensors and objects and end without a word.
USE = """
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, f"rank {dist.get_rank()}")
say(x=x.tolist(), names=names, rank=dist.get_rank(), size=dist.get_world_size(), backend=dist.get_backend())
dist.destroy_process_group()
say(over=not dist.is_initialized(), interface=os.environ.get("GLOO_SOCKET_IFNAME"))
"""

HEAD = """
import allhands as dist, os, torch
"""


def worked(results: list[Result]) -> None:
    """Assert that the ranks of `USE` met and ended in good order."""
    size = len(results)
    for number, result in enumerate(results):
        # torch itself warns about cpu:gloo, whose group has no name for it.
        assert [line for line in result.complaints.splitlines() if "hasHooks" not in line] == []
        assert result.returncode == 0
        assert result["x"] == [size * (size + 1) / 2] * 3
        assert result["names"] == [f"rank {other}" for other in range(size)]
        assert (result["rank"], result["size"]) == (number, size)
        assert result["over"]
        assert result["interface"] is None


WAYS = {
    "env": "dist.init_process_group('gloo')",
    "env-url": "dist.init_process_group('gloo', 'env://', timeout=20)",
    "tcp": "dist.init_process_group('gloo', os.environ['TCP'], rank=rank, world_size=size, timeout=20)",
    "tcp-query": "dist.init_process_group(init_method=f\"{os.environ['TCP']}?rank={rank}&world_size={size}\")",
    "tcp6": "dist.init_process_group('gloo', os.environ['TCP6'], rank=rank, world_size=size, timeout=20)",
    "localhost": "dist.init_process_group('gloo', os.environ['NAME'], rank=rank, world_size=size, timeout=20)",
    "file": "dist.init_process_group('gloo', os.environ['FILE'], rank=rank, world_size=size, timeout=20)",
    "nothing": "dist.init_process_group(rank=rank, world_size=size, timeout=20)",
    "tcpstore": """
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=20)
""",
    "filestore": """
store = dist.FileStore(os.environ["FILE"][7:], size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=20)
""",
    "prefixstore": """
store = dist.PrefixStore("mine", dist.FileStore(os.environ["FILE"][7:], size))
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=20)
""",
    "none": "dist.init_process_group(None, os.environ['TCP'], rank=rank, world_size=size)",
    "allhands": "dist.init_process_group('allhands', os.environ['TCP'], rank=rank, world_size=size)",
    "cpu:gloo": "dist.init_process_group('cpu:gloo', os.environ['TCP'], rank=rank, world_size=size)",
    "upper case": "dist.init_process_group('GLOO', os.environ['TCP'], rank=rank, world_size=size)",
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_meet(way: str, tmp_path: Path) -> None:
    """Each init_method, store and backend of torch forms a group that works and leaves nothing behind."""
    if way == "tcp6" and not ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    port = free_port()
    env = {
        "TCP": f"tcp://127.0.0.1:{port}",
        "TCP6": f"tcp://[::1]:{port}",
        "NAME": f"tcp://localhost:{port}",
        "FILE": f"file://{tmp_path}/meeting",
        "MASTER_PORT": str(port),
    }
    each = {}
    if way.startswith("env"):
        env["MASTER_ADDR"] = "127.0.0.1"
        each = {number: {"RANK": str(number), "WORLD_SIZE": "2"} for number in range(2)}
    if way == "nothing":
        del env["MASTER_PORT"]
    results = launch(HEAD + WAYS[way] + USE, 2, env, each=each)
    worked(results)
    expected = {"none": "allhands", "allhands": "allhands", "nothing": "allhands"}
    if way in expected:
        # torch's word for "none named", or what serves both kinds of tensor where there is a GPU.
        assert {result["backend"] for result in results} <= {expected[way], "undefined", "cpu:gloo,cuda:nccl"}
    if way == "file":
        assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize(
    "how", ["dist.init_process_group()", "dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)"]
)
def test_a_world_of_one(how: str) -> None:
    """One process forms a group with itself, with nothing given at all or a store that only it can see."""
    worked(launch(HEAD + how + USE, 1))


def test_several_worlds_of_one_rank() -> None:
    """Programs of one shell, each with a world size of one and no address, do not interfere."""
    results = launch(
        HEAD
        + """
dist.init_process_group("gloo", rank=0, world_size=1, timeout=20)
gate("formed")
say(size=dist.get_world_size())
gate("said")
dist.destroy_process_group()
""",
        2,
    )
    for result in results:
        assert (result["size"], result.returncode) == (1, 0)


def test_forming_and_ending_ten_times() -> None:
    """The same processes form and end groups one after another, at an address and at none, also with torch's end."""
    results = launch(
        HEAD
        + f"""
import sys
hook = sys.excepthook
for turn in range(10):
    where = ["tcp://127.0.0.1:{free_port()}", None][turn % 2]
    dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=20)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size
    assert sys.excepthook is not hook
    if turn == 4:
        torch.distributed.destroy_process_group()
    else:
        dist.destroy_process_group()
        assert sys.excepthook is hook
say(turns=turn + 1, threads=sorted(thread.name for thread in __import__("threading").enumerate()))
raise ValueError("once")
""",
        2,
    )
    for result in results:
        assert result["turns"] == 10
        assert [name for name in result["threads"] if name.startswith("allhands")] == []
        # Nothing of torch's or ours is wrapped around the interpreter's own hook any more.
        assert result.stderr.startswith("Traceback (most recent call last):")
        assert result.stderr.count("ValueError: once") == 1


def test_what_the_group_changed_is_put_back() -> None:
    """GLOO_SOCKET_IFNAME and sys.excepthook are after destroy what they were before init, set or not."""
    results = launch(
        HEAD
        + """
import sys
def mine(*_):
    pass
sys.excepthook = mine
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
with dist.process_group("gloo", rank=rank, world_size=size, timeout=20):
    say(during=os.environ["GLOO_SOCKET_IFNAME"])
say(after=os.environ["GLOO_SOCKET_IFNAME"], hook=sys.excepthook is mine)
del os.environ["GLOO_SOCKET_IFNAME"]
with dist.process_group("gloo", rank=rank, world_size=size, timeout=20):
    say(chosen=os.environ["GLOO_SOCKET_IFNAME"])
say(unset="GLOO_SOCKET_IFNAME" not in os.environ)
""",
        2,
    )
    for result in results:
        assert (result["during"], result["after"], result["hook"], result["unset"]) == ("lo", "lo", True, True)
        assert result["chosen"]
        assert (result.returncode, result.complaints) == (0, "")


# torchrun --------------------------------------------------------------------------------------------------------

TORCHRUN = (
    HEAD
    + """
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
say(world=dist.get_world_size(), x=x.item(), me=dist.get_rank())
dist.destroy_process_group()
dist.init_process_group()
dist.barrier()
say(again=dist.get_rank())
"""
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--standalone"], id="c10d"),
        pytest.param(["--nnodes", "1", "--rdzv-backend", "static"], id="static", marks=pytest.mark.soak),
    ],
)
def test_under_torchrun(flags: list[str]) -> None:
    """A script under torchrun forms its group, twice, although torchrun's own store has MASTER_PORT."""
    if "static" in flags:
        flags = [*flags, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, "--nproc-per-node", "2"]
    result = launch(TORCHRUN, 1, {"OMP_NUM_THREADS": "1"}, command=command)[0]
    assert result.returncode == 0, result.stderr
    said = [line for line in result.lines if "world" in line]
    assert sorted((line["me"], line["world"], line["x"]) for line in said) == [(0, 2, 2.0), (1, 2, 2.0)]
    assert sorted(line["again"] for line in result.lines if "again" in line) == [0, 1]
    assert "EADDRINUSE" not in result.stderr
    assert "Traceback" not in result.stderr


# torch's own front door ------------------------------------------------------------------------------------------


def test_torchs_own_init_with_our_backend(tmp_path: Path) -> None:
    """torch.distributed.init_process_group("allhands") calls the roll too, twice in a row, and ends clean."""
    results = launch(
        """
import torch, torch.distributed as dist, os
def use(turn):
    x = torch.ones(2)
    dist.all_reduce(x)
    say(**{f"x{turn}": x.tolist(), f"backend{turn}": dist.get_backend()})
for turn in range(2):
    dist.init_process_group("allhands", init_method=os.environ["FILE"] + str(turn), rank=rank, world_size=size)
    use(turn)
    dist.destroy_process_group()
import allhands
dist.init_process_group("allhands", init_method=os.environ["FILE"] + "2", rank=rank, world_size=size)
use(2)
say(session=allhands.groups.session.current() is not None)
""",
        2,
        {"FILE": f"file://{tmp_path}/store"},
    )
    for result in results:
        assert [result[f"x{turn}"] for turn in range(3)] == [[2.0, 2.0]] * 3
        assert result["backend0"] == "allhands"
        assert result["session"]
        assert (result.returncode, result.complaints) == (0, "")


def test_failures_are_explained_in_torchs_own_init(tmp_path: Path) -> None:
    """With torch's init and torch's all_reduce, a peer's exception still ends the call, and is what it raises."""
    results = launch(
        f"""
import torch, torch.distributed as dist, time
dist.init_process_group("allhands", init_method="file://{tmp_path}/store", rank=rank, world_size=size)
gate("formed")
if rank == 1:
    time.sleep(0.3)
    say(raised=True)
    raise ValueError("boom behind the door")
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    say(over=True)
    raise
""",
        2,
    )
    when = {key: line["at"] for result in results for line in result.lines for key in line if key != "at"}
    assert when["over"] - when["raised"] < 1.0
    assert "[peer-failed]" in results[0].stderr
    assert "ValueError: boom behind the door" in results[0].stderr


def test_the_roll_call_behind_torchs_own_front_door(tmp_path: Path) -> None:
    """Ranks whose torch versions differ are refused inside torch's own init, on both."""
    results = launch(
        f"""
import torch, torch.distributed as dist
if rank == 1:
    torch.__version__ = "1.2.3"
say(failed=attempt(dist.init_process_group, "allhands", init_method="file://{tmp_path}/store", rank=rank, world_size=2))
""",
        2,
    )
    for result in results:
        assert (result["failed"].get("slug"), result["failed"]["ranks"]) == ("version-mismatch", [1])


# In torch.distributed's place ------------------------------------------------------------------------------------


def test_every_public_name_of_torch_is_here() -> None:
    """All of torch.distributed is reachable under allhands, submodules included; what is not ours is the same."""
    import torch.distributed as theirs
    import torch.distributed.nn  # noqa: F401  # torch knows it only once it was imported

    import allhands

    names = [name for name in dir(theirs) if not name.startswith("_")]
    assert [name for name in names if not hasattr(allhands, name)] == []
    assert set(names) <= set(dir(allhands))
    assert allhands.group is theirs.group
    assert allhands.ReduceOp.SUM is theirs.ReduceOp.SUM
    assert allhands.nn is theirs.nn
    assert allhands.device_mesh is theirs.device_mesh
    assert allhands.TCPStore is theirs.TCPStore  # type: ignore[attr-defined]  # torch hides it from type checkers
    from allhands import all_reduce

    assert all_reduce.__name__ == "all_reduce"


def test_signatures_are_torchs() -> None:
    """Our functions have the same parameters as torch's, in the same order."""
    import torch.distributed as theirs

    import allhands
    from allhands.groups.collectives import GUARDED

    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in found]

    for name in [*(name for name in GUARDED if hasattr(theirs, name)), "get_rank", "get_world_size", "get_backend"]:
        assert parameters(getattr(allhands, name)) == parameters(getattr(theirs, name)), name
        if name != "monitored_barrier":  # ours also accepts seconds instead of a timedelta
            assert inspect.signature(getattr(allhands, name)) == inspect.signature(getattr(theirs, name)), name
    ours = inspect.signature(allhands.init_process_group).parameters
    torchs = inspect.signature(theirs.init_process_group).parameters
    assert list(ours)[: len(torchs)] == list(torchs)
    for name, parameter in torchs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    assert list(inspect.signature(allhands.destroy_process_group).parameters) == list(
        inspect.signature(theirs.destroy_process_group).parameters
    )


# A script as in a tutorial; DIST is either module. It adds its results to `found`.
TUTORIAL = """
import os, torch, warnings
warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives from one version to the next
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
import DIST as dist

dist.init_process_group(backend="gloo", init_method=os.environ["WHERE"], rank=rank, world_size=size,
                        timeout=timedelta(seconds=20))
me, n = dist.get_rank(), dist.get_world_size()
found = {}

def fresh(value=None):
    return torch.full((2,), float(me + 1 if value is None else value))

def both(name, call, result):
    for asynchronous in (False, True):
        work = call(asynchronous)
        if asynchronous:
            work.wait()
        found[f"{name} {asynchronous}"] = result()

for op in ("SUM", "PRODUCT", "MIN", "MAX"):
    x = fresh()
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
    found[f"all_reduce {op}"] = x.tolist()
x = fresh()
both("all_reduce", lambda a: dist.all_reduce(x, async_op=a), lambda: x.tolist())
y = fresh()
both("broadcast", lambda a: dist.broadcast(y, src=1, async_op=a), lambda: y.tolist())
z = fresh()
both("reduce", lambda a: dist.reduce(z, dst=0, async_op=a), lambda: z.tolist() if me == 0 else None)
parts = [torch.zeros(2) for _ in range(n)]
both("all_gather", lambda a: dist.all_gather(parts, fresh(), async_op=a), lambda: [p.tolist() for p in parts])
into = torch.zeros(2 * n)
both("all_gather_into_tensor", lambda a: dist.all_gather_into_tensor(into, fresh(), async_op=a), into.tolist)
both("gather", lambda a: dist.gather(fresh(), parts if me == 0 else None, dst=0, async_op=a),
     lambda: [p.tolist() for p in parts])
out = torch.zeros(2)
both("scatter", lambda a: dist.scatter(out, [fresh(i) for i in range(n)] if me == 0 else None, src=0, async_op=a),
     out.tolist)
both("reduce_scatter", lambda a: dist.reduce_scatter(out, [fresh() for _ in range(n)], async_op=a), out.tolist)
both("reduce_scatter_tensor", lambda a: dist.reduce_scatter_tensor(out, torch.ones(2 * n), async_op=a), out.tolist)
swapped = torch.zeros(n)
both("all_to_all_single", lambda a: dist.all_to_all_single(swapped, torch.arange(n) + 10.0 * me, async_op=a),
     swapped.tolist)
both("barrier", lambda a: dist.barrier(async_op=a), lambda: True)
dist.monitored_barrier(timeout=timedelta(seconds=5))

if me == 0:
    dist.send(fresh(7), dst=1)
    dist.isend(fresh(8), dst=1, tag=3).wait()
    dist.send(fresh(9), dst=1)
    dist.send_object_list([{"a": 1}], dst=1)
elif me == 1:
    r = torch.zeros(2)
    dist.recv(r, src=0)
    found["recv"] = r.tolist()
    dist.irecv(r, src=0, tag=3).wait()
    found["irecv"] = r.tolist()
    found["recv any"] = [dist.recv(r), r.tolist()]
    objects = [None]
    dist.recv_object_list(objects, src=0)
    found["recv_object_list"] = objects
sent, got = fresh(), torch.zeros(2)
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, sent, (me + 1) % n), dist.P2POp(dist.irecv, got, (me - 1) % n),
]):
    work.wait()
found["ring"] = got.tolist()

objects = [None] * n
dist.all_gather_object(objects, {"rank": me})
found["all_gather_object"] = list(objects)
box = [f"from {me}", me]
dist.broadcast_object_list(box, src=1)
found["broadcast_object_list"] = box
dist.gather_object(me, objects if me == 0 else None, dst=0)
found["gather_object"] = objects
mine = [None]
dist.scatter_object_list(mine, [f"for {i}" for i in range(n)] if me == 0 else None, src=0)
found["scatter_object_list"] = mine

pair = dist.new_group([0, 1])
found["in pair"] = dist.get_rank(pair)
if me < 2:
    x = fresh()
    dist.all_reduce(x, group=pair)
    found["pair"] = x.tolist()
single, _ = dist.new_subgroups(group_size=1)
x = fresh()
dist.all_reduce(x, group=single)
found["single"] = x.tolist()
found["group ranks"] = dist.get_process_group_ranks(pair) if me < 2 else None

torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
sampler = DistributedSampler(data, num_replicas=n, rank=me, seed=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=2, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
found["weights"] = [p.detach().flatten().tolist() for p in model.parameters()]
found["asked"] = [dist.get_backend(), dist.is_initialized(), dist.is_available(), dist.is_gloo_available()]
dist.destroy_process_group()
say(found=found)
"""


def test_a_tutorial_runs_unchanged() -> None:
    """Collectives, point to point, objects, subgroups and DDP training agree exactly with torch.distributed."""
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for module in ("torch.distributed", "allhands"):
        where = {"WHERE": f"tcp://127.0.0.1:{free_port()}", "GLOO_SOCKET_IFNAME": "lo"}
        results = launch(TUTORIAL.replace("DIST", module), 3, where)
        assert [result.returncode for result in results] == [0, 0, 0], results[0].stderr
        assert module != "allhands" or [result.complaints for result in results] == ["", "", ""]
        outcomes[module] = [result["found"] for result in results]
    assert outcomes["allhands"] == outcomes["torch.distributed"]
    assert outcomes["allhands"][0]["all_reduce PRODUCT"] == [6.0, 6.0]
