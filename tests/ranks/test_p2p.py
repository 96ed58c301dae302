"""Messages between ranks through shared memory, with real processes: in any order, from any source, without hangs."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""


def test_random_messages_agree_with_gloo() -> None:
    """A random plan of messages, blocking and not, with tags, has the same results on this backend and on Gloo."""
    results = harness.launch(
        """
import random
import torch
import allhands as dist

torch.set_num_threads(1)
KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64,
         torch.uint8, torch.bool, torch.complex64]

def run():
    choose, digest, pending = random.Random(3), [], []
    for step in range(150):
        source = choose.randrange(size)
        target = choose.choice([other for other in range(size) if other != source])
        kind, shape, tag = choose.choice(KINDS), choose.choice([(), (1,), (5, 3), (1023,), (70_001,), (400_000,)]), step
        blocking = choose.random() < 0.4
        data = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(step)).to(kind)
        if rank == source:
            if blocking:
                dist.send(data, target, tag=tag)
            else:
                pending.append((dist.isend(data, target, tag=tag), None))
        elif rank == target:
            got = torch.zeros(shape, dtype=kind)
            if blocking:
                assert dist.recv(got, source, tag=tag) == source
                assert torch.equal(got, data), step
            else:
                pending.append((dist.irecv(got, source, tag=tag), (step, got, data)))
            digest.append(got)
    choose.shuffle(pending)
    for work, expected in pending:
        assert work.wait()
        assert work.is_completed() and work.is_success()
        # In torch 2.11, Gloo's Work has no such method in Python.
        assert backend == "gloo" or work.exception() is None
        if expected is not None:
            assert torch.equal(expected[1], expected[2]), expected[0]
    return [each.to(torch.complex128).sum().real.item() for each in digest]

found = {}
for backend in ("gloo", "allhands"):
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=30)
    found[backend] = run()
    dist.destroy_process_group()
say(gloo=found["gloo"], ours=found["allhands"])
""",
        3,
        timeout=80,
    )
    harness.well(results)
    for result in results:
        assert result["gloo"] == result["ours"] != []


@pytest.mark.parametrize("library", ["dist", "torch_dist"])
def test_messages_in_any_order(library: str) -> None:
    """Large before small, both directions at once, receives before and after sends, rings: no deadlock."""
    results = harness.launch(
        FORM
        + f"""
lib = {library}
other = (rank + 1) % size
before = (rank - 1) % size
huge = torch.arange(3_000_000, dtype=torch.float32) + rank
want = torch.arange(3_000_000, dtype=torch.float32) + before

# The small one, sent later, is received first.
first, second = lib.isend(huge, other, tag=1), lib.isend(torch.tensor([float(rank)]), other, tag=2)
small, large = torch.empty(1), torch.empty_like(huge)
lib.recv(small, before, tag=2)
lib.recv(large, before, tag=1)
assert small.item() == before and torch.equal(large, want)
first.wait(), second.wait()

# All ranks send and then receive, and the reverse.
works = [lib.isend(huge, other), lib.irecv(large.zero_(), before)]
[work.wait() for work in works]
assert torch.equal(large, want)
works = [lib.irecv(large.zero_(), before), lib.isend(huge, other)]
[work.wait() for work in reversed(works)]
assert torch.equal(large, want)

# A ring in both directions, batched, waiting only for the last request.
left, right = torch.empty_like(huge), torch.empty_like(huge)
works = lib.batch_isend_irecv([
    lib.P2POp(lib.isend, huge, other, tag=5), lib.P2POp(lib.isend, huge, before, tag=6),
    lib.P2POp(lib.irecv, left, before, tag=5), lib.P2POp(lib.irecv, right, other, tag=6),
])
[work.wait() for work in works]
assert torch.equal(left, want) and torch.equal(right, torch.arange(3_000_000, dtype=torch.float32) + other)

# Many with one tag stay in their order.
works = [lib.isend(torch.full((step * 1000,), float(step)), other) for step in range(30)]
for step in range(30):
    got = torch.empty(step * 1000)
    lib.recv(got, before)
    assert torch.equal(got, torch.full((step * 1000,), float(step))), step
[work.wait() for work in works]

# Objects.
if rank == 0:
    lib.send_object_list(["text", {{"n": 1}}, list(range(10_000))], other)
if rank == 1:
    boxes = [None] * 3
    lib.recv_object_list(boxes, before)
    assert boxes == ["text", {{"n": 1}}, list(range(10_000))]
dist.barrier()
""",
        3,
    )
    harness.well(results)


def test_messages_progress_without_waiters() -> None:
    """Messages of isend and irecv progress in the background: a rank that only sleeps receives a large one."""
    results = harness.launch(
        FORM
        + """
import threading, time
data = torch.arange(4_000_000.0)
got = torch.empty_like(data)
told = threading.Event()
if rank == 0:
    work = dist.isend(data, 1)
    del data  # torch keeps neither the Work nor the tensor if the caller drops them
else:
    work = torch_dist.irecv(got, 0)
    assert not work.is_success() and work.source_rank() == -1
work.get_future().add_done_callback(lambda future: told.set())
assert told.wait(15)
if rank == 1:
    assert torch.equal(got, torch.arange(4_000_000.0))
    assert work.get_future().value()[0] is got and work.result()[0] is got
    assert work._source_rank() == 0 and work.wait() and work.is_completed()
    names = {thread.name for thread in threading.enumerate()}
    assert "allhands-p2p" in names
else:
    dist.isend(torch.ones(2_000_000), 1, tag=3)  # forgotten at once
if rank == 1:
    late = torch.empty(2_000_000)
    dist.recv(late, 0, tag=3)
    assert torch.equal(late, torch.ones(2_000_000))
dist.destroy_process_group()
deadline = time.monotonic() + 5
while any(thread.name == "allhands-p2p" for thread in threading.enumerate()):
    assert time.monotonic() < deadline
    time.sleep(0.01)
""",
        2,
    )
    harness.well(results)


def test_any_source_in_a_subgroup() -> None:
    """A receive from any source returns the sender's global rank, also in a subgroup."""
    results = harness.launch(
        FORM
        + """
some = dist.new_group([1, 2, 3])
if rank == 1:
    seen = []
    for size_each in (1, 1, 50_000, 50_000):
        got = torch.empty(size_each)
        source = dist.recv(got, group=some, tag=size_each)
        assert got[0].item() == source and got[-1].item() == source
        seen.append(source)
    work = torch_dist.irecv(torch.empty(3), group=some, tag=7)
    work.wait()
    assert sorted(seen[:2]) == sorted(seen[2:]) == [2, 3], seen
    assert work._source_rank() == 1  # the group's own rank
    dist.send(torch.ones(1), 3, group=some)
elif rank > 1:
    for size_each in (1, 50_000):
        dist.send(torch.full((size_each,), float(rank)), 1, group=some, tag=size_each)
    if rank == 2:
        dist.isend(torch.ones(3), group_dst=0, group=some, tag=7).wait()
    else:
        assert dist.recv(torch.empty(1), 1, group=some) == 1
dist.barrier()
# Groups do not take each other's messages.
if rank == 1:
    dist.send(torch.ones(1), 2)
    dist.send(torch.zeros(1), 2, group=some)
if rank == 2:
    got = torch.full((1,), 5.0)
    dist.recv(got, 1, group=some)
    assert got.item() == 0
    dist.recv(got, 1)
    assert got.item() == 1
dist.barrier()
""",
        4,
    )
    harness.well(results)


def test_strides_scalars_empty_and_own() -> None:
    """Tensors that are not contiguous, have no dimension or no element arrive; so does a message to oneself."""
    results = harness.launch(
        FORM
        + """
grid = torch.arange(40_000.0).view(200, 200)
for step, (source, target) in enumerate([(0, 1), (1, 0)]):
    for later in (False, True):
        if rank == source:
            works = [dist.isend(each, target, tag=step) for each in
                     (grid.t()[1::2], torch.tensor(3.0), torch.empty(0), torch.ones(2, dtype=torch.complex64))]
            [work.wait() for work in works]
        else:
            into = torch.zeros(200, 200)
            one, pair = torch.tensor(0.0), torch.zeros(2, dtype=torch.complex64)
            for each in (into.t()[1::2], one, torch.empty(0), pair):
                if later:
                    dist.irecv(each, source, tag=step).wait()
                else:
                    dist.recv(each, source, tag=step)
            assert torch.equal(into[:, 1::2], grid[:, 1::2]) and (into[:, ::2] == 0).all()
            assert one.item() == 3.0 and torch.equal(pair, torch.ones(2, dtype=torch.complex64))
got = torch.empty(300_000)
works = [dist.isend(torch.full((300_000,), 2.0), rank), dist.irecv(got, rank)]
[work.wait() for work in works]
assert torch.equal(got, torch.full((300_000,), 2.0))
found = {
    "rank": attempt(lambda: dist.group.WORLD.send([torch.ones(1)], size, 0)),
    "tag": attempt(lambda: dist.isend(torch.ones(1), 1 - rank, tag=-1)),
    "two": attempt(lambda: dist.group.WORLD.recv([torch.ones(1), torch.ones(1)], 1 - rank, 0)),
}
say(found=found)
dist.barrier()
""",
        2,
    )
    harness.well(results)
    for result in results:
        assert {found["slug"] for found in result["found"].values()} == {"invalid-argument"}


def test_threads_and_collectives_with_messages() -> None:
    """Several threads send and receive at once, while the main thread reduces: neither holds the other up."""
    results = harness.launch(
        FORM
        + """
import threading
problems = []
def work(tag):
    try:
        other = 1 - rank
        for step in range(40):
            data = torch.full((step * 3000 + 1,), float(tag * 100 + step))
            got = torch.empty_like(data)
            send = torch_dist.isend(data, other, tag=tag)
            torch_dist.recv(got, other, tag=tag)
            send.wait()
            assert torch.equal(got, data), (tag, step)
    except BaseException as problem:
        problems.append(repr(problem))
threads = [threading.Thread(target=work, args=(tag,)) for tag in range(3)]
[thread.start() for thread in threads]
for step in range(100):
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1000,), 2.0))
[thread.join() for thread in threads]
assert not problems, problems
# A rank that is in a collective still has its messages moved on.
x = torch.ones(2_000_000)
if rank == 0:
    pending = dist.irecv(x, 1)
    dist.barrier()
    assert pending.wait() and (x == 5).all()
else:
    dist.send(x.fill_(5), 0)
    dist.barrier()
""",
        2,
    )
    harness.well(results)
