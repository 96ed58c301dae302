"""Ranks whose helper threads reduce large tensors."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

# More than one part for each of three helper threads.
FORM = """
import contextlib, os, time
from pathlib import Path
import torch
import allhands as dist

torch.set_num_threads(1)

def threads():
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            names.append(path.read_text())
    return names.count("allhands-helper\\n")

dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""

MANY = {"ALLHANDS_HELPER_THREADS": "3"}


def test_results_do_not_depend_on_helper_threads() -> None:
    """The same bits as without, in plain memory and in a window; rank 0's setting counts; none is left at the end."""
    sums = []
    for count in ("3", "0"):
        results = harness.launch(
            FORM
            + """
import hashlib
torch.manual_seed(rank)
given = torch.randn(1_500_001)
plain, averaged = given.clone(), dist.empty(1_500_001)
averaged.copy_(given)
dist.all_reduce(plain)
dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
half = given.to(torch.bfloat16)
dist.all_reduce(half)
more = threads()
made = hashlib.sha256(plain.numpy().tobytes() + averaged.numpy().tobytes() + half.view(torch.int16).numpy().tobytes())
del averaged
dist.destroy_process_group()
say(sum=made.hexdigest(), more=more, left=threads())
""",
            2,
            {"ALLHANDS_HELPER_THREADS": "1"},
            each={0: {"ALLHANDS_HELPER_THREADS": count}},
        )
        harness.well(results)
        assert [result["more"] for result in results] == [int(count)] * 2
        assert all(result["left"] == 0 for result in results)
        sums += [result["sum"] for result in results]
    assert len(set(sums)) == 1


def test_a_killed_rank_ends_the_work_of_all_helper_threads() -> None:
    """Survivors raise peer-lost within a second of a kill -9 in the middle of a large all_reduce."""
    results = harness.launch(
        FORM
        + """
import threading
x = torch.ones(16_000_000)
dist.all_reduce(x)
if rank == 1:
    def fall():
        time.sleep(0.2)
        say(fell=time.time())
        os.kill(os.getpid(), 9)
    threading.Thread(target=fall).start()
def call():
    while True:
        dist.all_reduce(x)
say(found=attempt(call), told=time.time())
""",
        3,
        MANY,
    )
    for rank in (0, 2):
        assert (results[rank]["found"]["slug"], results[rank]["found"]["ranks"]) == ("peer-lost", [1])
        assert results[rank]["told"] - results[1]["fell"] < 1.0
        assert results[rank].returncode == 0


def test_a_rank_that_can_start_no_thread_does_their_part_itself() -> None:
    """Where there is no memory for a stack, only time is lost."""
    results = harness.launch(
        FORM
        + """
import resource
x = torch.full((2_000_000,), 1.0 + rank)
dist.all_reduce(torch.ones(1))
if rank == 1:
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (2 << 20), resource.RLIM_INFINITY))
for _ in range(3):
    x.fill_(1.0 + rank)
    dist.all_reduce(x)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
say(right=bool((x == 3).all()), more=threads())
dist.destroy_process_group()
""",
        2,
        MANY,
    )
    harness.well(results)
    assert all(result["right"] for result in results)
    # The C library may have kept the stack of a thread that ended.
    assert (results[0]["more"], results[1]["more"] < 3) == (3, True)


def test_a_forked_child_leaves_its_parents_helper_threads_alone() -> None:
    """A forked child has no helper threads, and its exit waits for none."""
    results = harness.launch(
        FORM
        + """
import gc
x = torch.ones(2_000_000)
dist.all_reduce(x)
child = os.fork()
if child == 0:
    import torch.distributed.distributed_c10d as torchs
    torchs._world.pg_map.clear()
    gc.collect()
    os._exit(7)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
dist.all_reduce(x)
say(ended=ended, right=bool((x == 4).all()))
dist.destroy_process_group()
""",
        2,
        MANY,
    )
    harness.well(results)
    assert [(result["ended"], result["right"]) for result in results] == [(7, True)] * 2
