"""Edge cases of sizes, threads and groups: no data, one number, many at once or one after the other."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

FORM = """
import gc, os, threading, time, warnings
from pathlib import Path
import torch
import torch.distributed as torch_dist
import allhands as dist
from faults.calls import NAMES, Call, issue, tensors

warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""


def test_tensors_without_elements_go_through_every_operation() -> None:
    """No data is moved, no rank hangs, and the next call is right."""
    results = harness.launch(
        FORM
        + """
for library in (dist, torch_dist):
    for later in (False, True):
        for name in NAMES:
            for kind in ("float32", "bool", "float8_e4m3fn"):
                if "reduce" in name and kind == "float8_e4m3fn":
                    continue
                call = Call(name, dtype=kind, count=0, root=1)
                made = tensors(call, rank, size)
                work = issue(library, call, made, None, later=later)
                if later:
                    work.wait()
                assert all(each.numel() == 0 for each in made.taken)
            x = torch.tensor([float(rank)])
            library.all_reduce(x)
            assert x.item() == sum(range(size)), name
# Rows without columns, and parts without rows.
dist.all_to_all_single(torch.empty(6, 0), torch.empty(6, 0), [2, 2, 2], [2, 2, 2])
come = torch.full((size,), -1)
dist.all_to_all_single(come[: size if rank == 0 else 0], torch.tensor([rank]), [1] * size if rank == 0 else [0] * size,
                       [1] + [0] * (size - 1))
assert come.tolist() == (list(range(size)) if rank == 0 else [-1] * size)
outs = [torch.full((each,), -1.0) for each in range(size)]
dist.all_gather(outs, torch.full((rank,), float(rank)))
assert [out.tolist() for out in outs] == [[float(each)] * each for each in range(size)]
""",
        3,
    )
    harness.well(results)


def test_tensors_without_dimension_go_through_every_operation() -> None:
    """A single number, as a tensor without dimension, keeps its shape."""
    results = harness.launch(
        FORM
        + """
def one(value):
    return torch.tensor(float(value))

for library in (dist, torch_dist):
    x = one(rank); library.all_reduce(x)
    assert (x.item(), x.dim()) == (3.0, 0)
    x = one(rank); library.reduce(x, 1)
    assert (x.item(), x.dim()) == (3.0 if rank == 1 else rank, 0)
    x = one(rank); library.broadcast(x, 2)
    assert (x.item(), x.dim()) == (2.0, 0)
    xs = [one(-1) for _ in range(size)]; library.all_gather(xs, one(rank))
    assert [(x.item(), x.dim()) for x in xs] == [(each, 0) for each in range(size)]
    whole = torch.zeros(size); library.all_gather_into_tensor(whole, one(rank))
    assert whole.tolist() == list(range(size))
    xs = [one(-1) for _ in range(size)] if rank == 1 else None; library.gather(one(rank), xs, 1)
    assert xs is None or [x.item() for x in xs] == list(range(size))
    x = one(-1); library.scatter(x, [one(10 + each) for each in range(size)] if rank == 0 else None, 0)
    assert (x.item(), x.dim()) == (10 + rank, 0)
    x = one(-1); library.reduce_scatter(x, [one(each) for each in range(size)])
    assert (x.item(), x.dim()) == (rank * size, 0)
    x = one(-1); library.reduce_scatter_tensor(x, torch.arange(float(size)))
    assert (x.item(), x.dim()) == (rank * size, 0)
    xs = [one(-1) for _ in range(size)]; library.all_to_all(xs, [one(10 * rank + each) for each in range(size)])
    assert [x.item() for x in xs] == [10 * each + rank for each in range(size)]
""",
        3,
    )
    harness.well(results)


def test_many_threads_use_many_groups_at_once() -> None:
    """Five threads of each rank, each with a group of the same or overlapping ranks, do not disturb each other."""
    results = harness.launch(
        FORM
        + """
members = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 3)]
groups = [dist.new_group(list(each)) for each in members]
problems = []

def work(number, group, ranks):
    try:
        flying = []
        for step in range(60):
            count = [5, 3000, 200_000][step % 3]
            x = torch.full((count,), float(step + number + rank))
            want = float(sum(step + number + each for each in ranks))
            if step % 4 == 0:
                flying.append((dist.all_reduce(x, group=group, async_op=True), x, want))
            elif step % 4 == 1:
                dist.broadcast(x, ranks[step % len(ranks)], group=group)
                assert x[-1].item() == step + number + ranks[step % len(ranks)], (number, step)
            elif step % 4 == 2:
                outs = [torch.empty(count) for _ in ranks]
                dist.all_gather(outs, x, group=group)
                assert [out[-1].item() for out in outs] == [step + number + each for each in ranks], (number, step)
            else:
                dist.all_reduce(x, group=group)
                assert torch.equal(x, torch.full((count,), want)), (number, step)
            if len(flying) == 3:
                for pending, y, expected in flying:
                    pending.wait()
                    assert torch.equal(y, torch.full_like(y, expected)), (number, step)
                flying.clear()
    except BaseException as problem:
        problems.append(repr(problem))

threads = [
    threading.Thread(target=work, args=(number, group, ranks))
    for number, (group, ranks) in enumerate(zip(groups, members))
    if rank in ranks
]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not problems, problems
dist.barrier()
""",
        4,
        timeout=90,
    )
    harness.well(results)


def test_a_hundred_groups_leave_nothing_behind() -> None:
    """Descriptors, mappings and threads are what they were before a hundred groups were made, used and destroyed."""
    results = harness.launch(
        FORM
        + """
def held():
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": len({line.split()[0] for line in maps.splitlines() if "memfd:allhands (" in line}),
        "threads": len(os.listdir("/proc/self/task")),
    }

def use(group):
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    assert x.tolist() == [size * size] * 3

def turn():
    group = dist.new_group(list(range(size)))
    use(group)
    torch_dist.destroy_process_group(group)

for _ in range(3):
    turn()
before = held()
during = []
for each in range(100):
    turn()
    if each % 25 == 0:
        during.append(held())
dist.barrier()
after = held()
say(before=before, during=during, after=after)
dist.destroy_process_group()
say(ended=held())
""",
        2,
        timeout=120,
    )
    for result in harness.well(results):
        before, after = result["before"], result["after"]
        assert before["segments"] == 1
        assert after["segments"] == 1, (before, result["during"], after)
        assert after["descriptors"] <= before["descriptors"] + 2, (before, result["during"], after)
        assert after["threads"] <= before["threads"] + 2, (before, result["during"], after)
        assert result["ended"]["segments"] == 0


def test_recording_a_call_site_keeps_no_references() -> None:
    """Objects of a function are freed when it returns, although a thread inspected its frame and no collector runs."""
    results = harness.launch(
        FORM
        + """
import weakref
from allhands.groups.session import current

class Held: ...

def hold(held):
    looking = threading.Thread(target=lambda: said.append(current().member.describe()[0]))
    looking.start()
    looking.join()
    return weakref.ref(held)

gc.disable()
said = []
held = hold(Held())
assert said[0].startswith("at script.py:"), said
assert held() is None, gc.get_referrers(held())
""",
        1,
    )
    harness.well(results)
