"""Messages between ranks through shared memory, with real processes: in any order, from anyone, and never a hang."""

from __future__ import annotations

import signal
import time

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("nursery")

# The same in other words, for `make soak`.
soak = pytest.mark.soak

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""

# Forming a group may take longer than a test can wait for a message in vain.
BRIEF = (
    FORM
    + """
from datetime import timedelta
dist.group.WORLD.set_timeout(timedelta(seconds=2))
"""
)


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's own words where it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


def test_random_messages_agree_with_gloo() -> None:
    """A random plan of messages, blocking and not, with tags, gives on this backend just what it gives on Gloo."""
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
        # In torch 2.11, Gloo's cannot say it in Python.
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
    check(results)
    for result in results:
        assert result["gloo"] == result["ours"] != []


@pytest.mark.parametrize("library", ["dist", "torch_dist"])
def test_messages_in_any_order(library: str) -> None:
    """Large before small, both ways at once, receives before and after sends, rings: nothing waits for ever."""
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

# Everyone sends and then receives, and the other way round.
works = [lib.isend(huge, other), lib.irecv(large.zero_(), before)]
[work.wait() for work in works]
assert torch.equal(large, want)
works = [lib.irecv(large.zero_(), before), lib.isend(huge, other)]
[work.wait() for work in reversed(works)]
assert torch.equal(large, want)

# A ring both ways, batched, and nothing but waiting for the last.
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
    check(results)


def test_messages_move_while_nobody_waits() -> None:
    """What isend and irecv begin is done beside the caller: a rank that only sleeps finds its large message there."""
    results = harness.launch(
        FORM
        + """
import threading, time
data = torch.arange(4_000_000.0)
got = torch.empty_like(data)
told = threading.Event()
if rank == 0:
    work = dist.isend(data, 1)
    del data  # torch keeps neither the Work nor the tensor for a caller who forgets them
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
    assert "allhands-mail" in names
else:
    dist.isend(torch.ones(2_000_000), 1, tag=3)  # forgotten at once
if rank == 1:
    late = torch.empty(2_000_000)
    dist.recv(late, 0, tag=3)
    assert torch.equal(late, torch.ones(2_000_000))
dist.destroy_process_group()
deadline = time.monotonic() + 5
while any(thread.name == "allhands-mail" for thread in threading.enumerate()):
    assert time.monotonic() < deadline
    time.sleep(0.01)
""",
        2,
    )
    check(results)


def test_from_anyone_in_a_group_of_some() -> None:
    """A receive from any source says who sent, in global ranks, also in a group that not everyone is in."""
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
    check(results)


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
    check(results)
    for result in results:
        assert {found["slug"] for found in result["found"].values()} == {"invalid-argument"}


def test_threads_and_collectives_beside_messages() -> None:
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
    check(results)


MISMATCHES = {
    "small": ("torch.ones(5)", "torch.ones(6)"),
    "large": ("torch.ones(50_000)", "torch.ones(60_000)"),
    "shorter": ("torch.ones(50_000)", "torch.ones(6)"),
    "type": ("torch.ones(50_000)", "torch.ones(50_000, dtype=torch.int32)"),
    "small type": ("torch.ones(4)", "torch.ones(2, dtype=torch.float64)"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
@pytest.mark.parametrize("how", ["recv", pytest.param("irecv", marks=soak), pytest.param("anyone", marks=soak)])
def test_a_message_that_does_not_fit_raises_on_both(kind: str, how: str) -> None:
    """Another size or type than was sent: both ranks get collective-mismatch, with what each had, and nobody hangs."""
    sent, wanted = MISMATCHES[kind]
    receive = {
        "recv": "dist.recv(target, 0)",
        "irecv": "dist.irecv(target, 0).wait()",
        "anyone": "dist.recv(target)",
    }[how]
    results = harness.launch(
        FORM
        + f"""
dist.barrier()
target = {wanted}
def send():
    dist.send({sent}, 1)
    dist.barrier()  # a small message is on its way at once: the next call tells
found = attempt(send if rank == 0 else lambda: {receive})
say(found=found, intact=bool((target == 1).all()))
""",
        2,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert result["found"]["kind"] == "CollectiveMismatch"
        assert result["found"]["ranks"] == [0, 1]
        assert result["found"]["seconds"] < 5
        assert result["intact"]
    text = results[1]["found"]["text"]
    count = {"small": 5, "large": 50000, "shorter": 50000, "type": 50000, "small type": 4}[kind]
    expected = {
        "small": "float32 x 6",
        "large": "float32 x 60000",
        "shorter": "float32 x 6",
        "type": "int32 x 50000",
        "small type": "float64 x 2",
    }[kind]
    assert f"rank 0 sent float32 x {count} with tag 0 to rank 1" in text
    assert f"rank 1 expected {expected}" in text


@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=soak)])
@pytest.mark.parametrize(
    "call",
    [
        "dist.recv(x, 1)",
        "dist.recv(x)",
        "dist.irecv(x, 1).wait()",
        "torch_dist.irecv(x).wait()",
        "dist.send(x, 1)",
        "[work.wait() for work in (dist.isend(x, 1), dist.irecv(x, 1))]",
    ],
)
def test_a_rank_that_falls_ends_its_messages(how: str, call: str) -> None:
    """Survivors that send to or receive from a rank that dies or raises are told within a second."""
    end = {"kill": "os.kill(os.getpid(), 9)", "raise": "raise ValueError('bad batch')"}[how]
    results = harness.launch(
        FORM
        + f"""
import os, time
x = torch.ones(500_000)
dist.barrier()
if rank == 1:
    time.sleep(0.3)
    say(fell=time.time())
    {end}
found = attempt(lambda: {call})
say(found=found, told=time.time())
""",
        3,
    )
    fell = results[1]["fell"]
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == ("peer-failed" if how == "raise" else "peer-lost"), result["found"]
        assert result["found"]["ranks"] == [1]
        assert result["told"] - fell < 2.0


def test_a_rank_that_is_killed_in_the_middle_of_a_transfer() -> None:
    """While gigabytes stream, one is killed: whoever sends to it and whoever receives from it raises peer-lost."""
    with harness.running(
        FORM
        + """
x = torch.ones(20_000_000)
dist.barrier()
def stream():
    for step in range(100_000):
        works = [dist.isend(x, (rank + 1) % size), dist.irecv(torch.empty_like(x), (rank - 1) % size)]
        [work.wait() for work in works]
        if step == 1:
            say(streams=True)
found = attempt(stream)
say(found=found)
""",
        3,
        timeout=60,
    ) as job:
        job.wait_for("streams")
        at = job.signal(1, signal.SIGKILL)
        results = job.results()
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "peer-lost", result["found"]
        assert result["found"]["ranks"] == [1]
        assert result["found"]["over"] - at < 3.0


def test_a_rank_that_does_not_send_is_named_with_what_it_does() -> None:
    """At the timeout the rank that was waited for is named, with the line it is at; the others are not blamed."""
    results = harness.launch(
        BRIEF
        + """
import time
x = torch.ones(10)
dist.barrier()
if rank == 0:
    say(found=attempt(lambda: dist.recv(x, 1)))
else:
    time.sleep(4)
""",
        3,
    )
    found = results[0]["found"]
    assert found["slug"] == "collective-timeout"
    assert found["ranks"] == [1]
    assert 2 <= found["seconds"] < 8
    assert "recv did not finish" in found["text"]
    assert "rank 1 is at script.py" in found["text"]


@pytest.mark.parametrize(
    "call",
    [
        "dist.recv(x, 1)",
        *(pytest.param(call, marks=soak) for call in ("dist.irecv(x, 1).wait()", "dist.send(big, 1)", "dist.recv(x)")),
    ],
)
def test_a_stopped_rank_is_named_at_the_deadline(call: str) -> None:
    """A rank that was stopped (SIGSTOP) is not dead: it is named as silent when the time is up."""
    with harness.running(
        BRIEF
        + f"""
import os, signal, time
x, big = torch.ones(10), torch.ones(1_000_000)
dist.barrier()
if rank == 1:
    say(ready=True)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2)
say(found=attempt(lambda: {call}))
""",
        2,
    ) as job:
        found = job.wait_for("found", [0])[0]
        assert found["slug"] == "peer-silent", found
        assert found["ranks"] == [1]
        job.signal(1, signal.SIGCONT)


def test_a_wait_may_have_a_limit_of_its_own() -> None:
    """wait(timeout) raises when it runs out, and the message still arrives afterwards."""
    results = harness.launch(
        FORM
        + """
from datetime import timedelta
x = torch.zeros(3)
if rank == 0:
    work = dist.irecv(x, 1)
    late = attempt(lambda: work.wait(timedelta(seconds=0.2)))
    assert late["kind"] == "RuntimeError" and "timed out" in late["text"], late
    gate("late")
    assert work.wait() and x.tolist() == [1.0] * 3
else:
    gate("late")
    dist.send(x + 1, 0)
dist.barrier()
""",
        2,
    )
    check(results)


def test_the_time_of_a_message_begins_with_waiting_for_it() -> None:
    """A receive may be posted long before its message; once someone waits, or has a future, its time runs."""
    results = harness.launch(
        BRIEF
        + """
import threading, time
x = torch.zeros(3)
if rank == 0:
    early = dist.irecv(x, 1, tag=1)
    time.sleep(3)
    gate("early")
    assert early.wait() and x.tolist() == [1.0] * 3
    told = threading.Event()
    dist.irecv(x, 1, tag=2).get_future().add_done_callback(lambda future: told.set())
    started = time.monotonic()
    assert told.wait(10) and time.monotonic() - started > 1
    found = attempt(dist.barrier)
    say(found=found)
else:
    gate("early")
    dist.send(x + 1, 0, tag=1)
    time.sleep(5)
""",
        2,
    )
    assert results[0].returncode == 0, results[0].stderr
    assert results[0]["found"]["slug"] == "collective-timeout"
    assert results[0]["found"]["ranks"] == [1]


@pytest.mark.parametrize("call", ["dist.recv(x, 1)", "torch_dist.recv(x, 1)", "dist.irecv(x, 1).wait()"])
def test_signals_are_heard_while_receiving(call: str) -> None:
    """A handler runs while a receive waits, and Ctrl-C raises out of it at once; the group can still be used."""
    with harness.running(
        FORM
        + f"""
import os, signal
x = torch.zeros(3)
signal.signal(signal.SIGUSR2, lambda *_: say(handled=True))
dist.barrier()
if rank == 0:
    say(ready=True)
    try:
        {call}
    except KeyboardInterrupt:
        say(interrupted=True)
gate("over")
if rank == 1:
    dist.send(x + 1, 0, tag=4)
else:
    dist.recv(x, 1, tag=4)
    assert x.tolist() == [1.0] * 3
dist.barrier()
""",
        2,
    ) as job:
        job.wait_for("ready", [0])
        time.sleep(0.2)
        job.signal(0, signal.SIGUSR2)
        job.wait_for("handled", [0])
        job.signal(0, signal.SIGINT)
        job.wait_for("interrupted", [0])
        check(job.results())


def test_a_forked_child_is_refused_and_does_no_harm() -> None:
    """A child has copies of what its parent has under way: it may not use them, and its end does not end them."""
    results = harness.launch(
        FORM
        + """
import gc, os
x = torch.zeros(200_000)
pending = dist.irecv(x, 1 - rank)
offered = dist.isend(torch.ones(200_000), 1 - rank, tag=9)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    slugs = [attempt(lambda: lib.send(torch.ones(3), 1 - rank)).get("slug") for lib in (dist, torch_dist)]
    slugs += [attempt(call).get("slug") for call in (pending.wait, pending.is_completed)]
    os.write(writer, repr(slugs).encode())
    dist.group.WORLD.mail._pending.clear()
    del pending, offered
    gc.collect()
    raise SystemExit(0)
os.waitpid(child, 0)
say(child=os.read(reader, 1000).decode())
gate("forked")
dist.send(x + 1, 1 - rank) if rank == 0 else None
pending.wait() if rank == 1 else None
dist.send(torch.ones(200_000), 0) if rank == 1 else None
pending.wait() if rank == 0 else None
assert (x == 1).all()
dist.recv(x.zero_(), 1 - rank, tag=9)
assert offered.wait() and (x == 1).all()
""",
        2,
    )
    check(results)
    for result in results:
        assert result["child"] == str(["forked-process"] * 4)


def test_destroying_a_group_ends_what_is_under_way() -> None:
    """Receives that never come do not hold up the end of a group, and whoever waits for one is told why it ended."""
    results = harness.launch(
        FORM
        + """
import threading, time
work = dist.irecv(torch.zeros(3), 1 - rank)
own = dist.new_group([0, 1])
told = []
def receive():
    torch_dist.irecv(torch.zeros(3), 1 - rank, group=own).wait()
thread = threading.Thread(target=lambda: told.append(attempt(receive)))
thread.start()
time.sleep(0.2)
started = time.monotonic()
dist.destroy_process_group()
assert time.monotonic() - started < 15
thread.join(5)
assert not thread.is_alive()
say(found=attempt(lambda: work.wait()), told=told[0])
""",
        2,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "already-destroyed", result["found"]
        assert result["told"]["slug"] in {"already-destroyed", "peer-lost"}, result["told"]
