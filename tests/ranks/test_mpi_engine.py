"""The MPI engine under the mpirun of Open MPI and of MPICH. The complete suite on it is in `soak`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from allhands.engines.mpi import library
from ranks import harness, mpirun

pytestmark = pytest.mark.usefixtures("fork_server")

both = pytest.mark.parametrize("family", mpirun.FAMILIES)

# Sizes and dtypes for each way to move data, uneven parts, groups, and a second group after the first.
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
say(boxes=boxes, backend=dist.get_backend(), torchs=torch.distributed.get_backend(),
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
    """Assert that each rank of `WORK` completed, in a world of the family's library."""
    harness.well(results)
    for result in results:
        assert result["again"]
        assert (result["backend"], result["torchs"]) == ("mpi", "allhands")
        assert result["boxes"] == [*range(len(results))]
        assert result["numbers"] == len(results)
        assert {"openmpi": "Open MPI", "mpich": "MPICH"}[family] in result["library"]


def run(family: str, source: str, ranks: int, env: dict[str, str] | None = None) -> list[harness.Result]:
    """Run ``source`` under the mpirun of ``family``; skip where there is none."""
    mpirun.require(family)
    job = mpirun.start(family, source, ranks, env)
    try:
        return job.results()
    finally:
        job.kill()


@both
def test_every_operation(family: str) -> None:
    """Every operation does what it does on other engines, also where MPI numbers the ranks differently."""
    check(run(family, WORK.format(turned=True), 2), family)


@pytest.mark.soak
@both
def test_every_operation_of_three_ranks(family: str) -> None:
    """The same, with ranks that are in no pair."""
    check(run(family, WORK.format(turned=False), 3), family)


@both
def test_a_killed_rank(family: str) -> None:
    """Survivors of a kill -9 in the middle of a large all_reduce raise peer-lost within 2 s."""
    results = run(
        family,
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
    )
    for result in results[1:]:
        assert (result["found"]["slug"], result["found"]["ranks"]) == ("peer-lost", [0])
        assert result["told"] - results[0]["fell"] < 2.0
        assert result["second"]["slug"] == "peer-lost"


@both
def test_different_calls_and_a_rank_that_does_not_come(family: str) -> None:
    """A difference names the odd rank before data moves; a deadline names the absent one, and ends the wait."""
    results = run(
        family,
        """
import time
import torch
import allhands as dist
dist.init_process_group("mpi", rank=rank, world_size=size, timeout=25)
pair, trio = dist.new_group([0, 1]), dist.new_group(timeout=__import__("datetime").timedelta(seconds=1))
if rank == 2:
    gate("late")
    found = attempt(dist.barrier)
else:
    began = time.monotonic()
    found = attempt(dist.all_reduce, torch.ones(1), group=trio)
    assert 0.9 < time.monotonic() - began < 5
    gate("late")
say(found=found)
""",
        3,
    )
    assert {result["found"]["slug"] for result in results} == {"collective-timeout"}
    assert results[0]["found"]["ranks"] == [2]
    results = run(
        family,
        """
import torch
import allhands as dist
dist.init_process_group("mpi", rank=rank, world_size=size, timeout=25)
say(found=attempt(dist.all_reduce, torch.ones(3 if rank == 1 else 2)))
""",
        3,
    )
    for result in results:
        assert (result["found"]["slug"], result["found"]["ranks"]) == ("collective-mismatch", [1])
        assert "float32 x 3" in result["found"]["text"]


MISSING = """
import allhands as dist
say(found=attempt(dist.init_process_group, "mpi", None, 20, size, rank))
"""


def missing(results: list[harness.Result], fix: str) -> str:
    """Check that every rank raised mpi-missing at once with ``fix``; return rank 0's message."""
    harness.well(results)
    for result in results:
        assert result["found"]["slug"] == "mpi-missing", result["found"]
        assert result["found"]["seconds"] < 10
        assert fix in result["found"]["text"]
    return str(results[0]["found"]["text"])


def test_without_mpirun() -> None:
    """Ranks that no launcher of MPI started raise mpi-missing with the line that starts them."""
    if library.load_failure():
        pytest.skip(library.load_failure())
    text = missing(harness.launch(MISSING, 2), "mpirun -n 2 python train.py")
    assert "no mpirun, mpiexec or srun started this process" in text


def test_mpi4py_that_cannot_be_imported(tmp_path: Path) -> None:
    """Without a working mpi4py on one rank, every rank raises mpi-missing with the commands that help."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('half of it was removed')\n")
    script = f"import os, sys\nif rank == 1:\n    sys.path.insert(0, {str(tmp_path)!r})\n" + MISSING
    # As if an mpirun had started them: it is the module that is missing.
    env = {"MPI4PY_MPIABI": "openmpi", "PMIX_NAMESPACE": "x"}
    text = missing(harness.launch(script, 2, env), "pip install 'allhands[mpi]'")
    assert "half of it was removed" in text or "is not installed" in text


def test_a_library_that_is_not_there() -> None:
    """Where mpi4py is pointed at a library that does not exist, its name is in the reason."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (make mpi)")
    text = missing(harness.launch(MISSING, 2, {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}), "apt-get install")
    assert "/nonexistent/libmpi.so" in text


@pytest.mark.soak
def test_the_library_of_another_mpirun() -> None:
    """Ranks of Open MPI's mpirun that use MPICH's library form no world, which is an error."""
    mpirun.require("mpich")
    results = harness.well(run("openmpi", MISSING, 2, {"MPI4PY_MPIABI": "mpich"}))
    for result in results:
        assert result["found"]["slug"] == "mpi-missing"
        assert "does not know that they belong together" in result["found"]["text"]
        assert "mpirun.mpich" in result["found"]["text"]


def test_what_cannot_be_asked_for() -> None:
    """MPI with another backend is refused with the alternative; so is a subgroup of ranks without mpirun."""
    results = harness.launch(
        """
import torch, allhands as dist
both = attempt(dist.init_process_group, "cpu:mpi,cuda:nccl", None, 20, size, rank)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
say(both=both, pair=attempt(dist.new_group, [0, 1], backend="mpi"))
gate("reported")
""",
        3,
    )
    for result in results:
        assert result["both"]["slug"] == "invalid-argument"
        assert 'backend="mpi" alone' in result["both"]["text"]
    assert {results[rank]["pair"].get("slug") for rank in (0, 1)} == {"mpi-missing"}
