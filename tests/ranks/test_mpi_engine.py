"""The engine over MPI: without mpirun and with it, both families. The complete suite on it is in `soak`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ranks import harness, mpirun

pytestmark = pytest.mark.usefixtures("nursery")

both = pytest.mark.parametrize("family", mpirun.FAMILIES)

# Everything of a kind: data that comes with the record, at once, in slices; types that MPI has none of; parts of
# different sizes; groups; the group's end and a second one.
WORK = """
import torch
import allhands as dist

torch.set_num_threads(1)
number = size - 1 - rank if {turned} else rank
dist.init_process_group("mpi", rank=number, world_size=size, timeout=25)
world = dist.group.WORLD
for count in (3, 700, 9_000, 400_001):
    for kind in (torch.float32, torch.bfloat16, torch.uint16, torch.bool, torch.complex64):
        everyone = [((torch.arange(count) + each) % 3).to(kind) for each in range(size)]
        mine = everyone[number].clone()
        dist.all_reduce(mine)
        want = everyone[0].to(torch.complex64)
        for other in everyone[1:]:
            want = want + other.to(torch.complex64)
        want = (want.real != 0) if kind is torch.bool else want.to(kind) if kind.is_complex else want.real.to(kind)
        assert torch.equal(mine, want), (count, kind)
        dist.broadcast(mine.copy_(everyone[number]), 1)
        assert torch.equal(mine, everyone[1])
mean = torch.full((5000,), float(number))
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert mean[0] == (size - 1) / 2
for scale in (1, 3000):
    parts = [torch.zeros(scale * each) for each in range(1, size + 1)]
    dist.all_gather(parts, torch.full((scale * (number + 1),), float(number)))
    assert all(torch.equal(part, torch.full_like(part, each)) for each, part in enumerate(parts))
    rows = [torch.full((scale,), 10.0 * number + each) for each in range(size)]
    came = [torch.empty(scale) for _ in range(size)]
    dist.all_to_all(came, rows)
    assert [each[0].item() for each in came] == [10.0 * each + number for each in range(size)]
    dist.reduce_scatter(came[0], rows)
    assert came[0][-1] == sum(10.0 * each + number for each in range(size))
    dist.reduce(rows[0], 1)
    assert rows[0][0] == (sum(10.0 * each for each in range(size)) if number == 1 else 10.0 * number)
boxes = [None] * size
dist.all_gather_object(boxes, number)
pair, other = dist.new_group([1, 0]), dist.new_group([0, 1], backend="mpi")
for group in (pair, other) if number < 2 else ():
    ones = torch.ones(2000)
    works = [dist.all_reduce(ones, group=group, async_op=True) for _ in range(3)]
    [work.wait() for work in works]
    assert ones[0] == 8 and dist.get_backend(group) == "mpi"
with open("/proc/self/maps") as maps:
    walls = sum("memfd:allhands-wall" in line for line in maps)
say(walls=walls, boxes=boxes, backend=dist.get_backend(), torchs=torch.distributed.get_backend(),
    library=world.engine.world.name, numbers=world.engine.comm.Get_size())
group = None
del pair, other, group, world
dist.destroy_process_group()
dist.init_process_group("mpi", rank=number, world_size=size, timeout=25)
dist.barrier()
dist.destroy_process_group()
say(again=True)
"""


def check(results: list[harness.Result], family: str) -> None:
    """See that each rank of `WORK` came to its end, in a world of the family's library."""
    harness.well(results)
    for result in results:
        assert result["again"]
        assert (result["backend"], result["torchs"]) == ("mpi", "allhands")
        assert result["boxes"] == [*range(len(results))]
        assert result["numbers"] == len(results)
        # The world's, and those of both pairs for their ranks: on one host no message says what is called.
        assert result["walls"] in {1, 3}
        assert {"openmpi": "Open MPI", "mpich": "MPICH"}[family] in result["library"]


@both
def test_without_mpirun(family: str) -> None:
    """Ranks that no mpirun started form a group over MPI, and it does what every engine does."""
    mpirun.require(family)
    check(harness.launch(WORK.format(turned=False), 3, {"MPI4PY_MPIABI": family}), family)


@pytest.mark.parametrize("family", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_under_mpirun(family: str) -> None:
    """Ranks of mpirun do the same, also where MPI numbers them otherwise; the library is that of the mpirun."""
    mpirun.require(family)
    job = mpirun.start(family, WORK.format(turned=True), 2)
    try:
        check(job.results(), family)
    finally:
        job.kill()


@both
def test_a_killed_rank(family: str) -> None:
    """Survivors of a kill -9 in the middle of a large all_reduce raise peer-lost within 2 s, and nothing is left."""
    mpirun.require(family)
    results = harness.launch(
        """
import os, time
import torch
import allhands as dist
dist.init_process_group("mpi", rank=rank, world_size=size, timeout=25)
x = torch.ones(4_000_000)
dist.all_reduce(x)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    time.sleep(0.05)
    say(fell=time.time())
    os.kill(os.getpid(), 9)
time.sleep(0.03 * rank)
call = lambda: [dist.all_reduce(x) for _ in range(3)]
say(found=attempt(call), told=time.time(), second=attempt(dist.barrier))
""",
        3,
        {"MPI4PY_MPIABI": family},
    )
    for result in results[1:]:
        assert (result["found"]["slug"], result["found"]["ranks"]) == ("peer-lost", [0])
        assert result["told"] - results[0]["fell"] < 2.0
        assert result["second"]["slug"] == "peer-lost"
        assert result.returncode == 0


MISSING = """
import allhands as dist
say(found=attempt(dist.init_process_group, "mpi", None, 20, size, rank))
"""


def missing(results: list[harness.Result]) -> str:
    """See that every rank was told at once that there is no MPI, and what to type; return rank 0's words."""
    harness.well(results)
    for result in results:
        assert result["found"]["slug"] == "mpi-missing", result["found"]
        assert result["found"]["seconds"] < 10
        assert "apt-get install" in result["found"]["text"]
        assert "pip install 'allhands[mpi]'" in result["found"]["text"]
    return str(results[0]["found"]["text"])


def test_mpi4py_that_cannot_be_imported(tmp_path: Path) -> None:
    """Without a working mpi4py on one rank, every rank raises mpi-missing with the commands that help."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('half of it was removed')\n")
    script = f"import sys\nif rank == 1:\n    sys.path.insert(0, {str(tmp_path)!r})\n" + MISSING
    env = {} if importlib.util.find_spec("mpi4py") is None else {"MPI4PY_MPIABI": "openmpi"}
    text = missing(harness.launch(script, 2, env))
    assert "half of it was removed" in text or "is not installed" in text


def test_a_library_that_is_not_there() -> None:
    """Where mpi4py is told of a library that does not exist, its name is in the reason."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (make mpi)")
    text = missing(harness.launch(MISSING, 2, {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}))
    assert "/nonexistent/libmpi.so" in text


@pytest.mark.soak
def test_the_library_of_another_mpirun() -> None:
    """Ranks of Open MPI's mpirun that use MPICH's library are in no world together, and are told so."""
    mpirun.require("openmpi")
    mpirun.require("mpich")
    job = mpirun.start("openmpi", MISSING, 2, {"MPI4PY_MPIABI": "mpich"})
    try:
        results = harness.well(job.results())
    finally:
        job.kill()
    for result in results:
        assert result["found"]["slug"] == "mpi-missing"
        assert "does not know that they belong together" in result["found"]["text"]
        assert "mpirun.mpich" in result["found"]["text"]


def test_what_cannot_be_asked_for() -> None:
    """MPI beside another backend is refused with what to write instead; so is a subgroup of ranks in no MPI world."""
    results = harness.launch(
        """
import torch, allhands as dist
both = attempt(dist.init_process_group, "cpu:mpi,cuda:nccl", None, 20, size, rank)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
say(both=both, pair=attempt(dist.new_group, [0, 1], backend="mpi"))
# Whoever went now would be lost to those that still ask.
gate("told")
""",
        3,
    )
    for result in results:
        assert result["both"]["slug"] == "invalid-argument"
        assert 'backend="mpi" alone' in result["both"]["text"]
    assert {results[rank]["pair"].get("slug") for rank in (0, 1)} == {"mpi-missing"}
