"""Messages between ranks through shared memory that fail: mismatches, and ranks that die, stop or leave."""

from __future__ import annotations

import signal
import time

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

# A longer run, for `make soak`.
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
    """A size or dtype other than sent: both ranks get collective-mismatch, with both sides, and no rank hangs."""
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
    dist.barrier()  # a small send completes at once: the next call raises
found = attempt(send if rank == 0 else lambda: {receive})
say(found=found, intact=bool((target == 1).all()))
""",
        2,
    )
    harness.well(results)
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
    """Survivors that send to or receive from a rank that dies or raises get the error within a second."""
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
    """A rank is killed during large transfers: its senders and receivers raise peer-lost."""
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
import os, time
x = torch.ones(10)
dist.barrier()
if rank == 0:
    say(found=attempt(lambda: dist.recv(x, 1)))
    gate("told", 1)
else:
    while not os.path.exists(f"{os.environ['GATES']}/told.0"):
        time.sleep(0.05)
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
    harness.well(results)


@pytest.mark.soak
def test_the_time_of_a_message_begins_with_waiting_for_it() -> None:
    """A receive may be posted long before its message; its timeout starts with a wait or a future."""
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
def test_signals_are_handled_while_receiving(call: str) -> None:
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
        harness.well(job.results())


def test_a_forked_child_is_refused_and_does_no_harm() -> None:
    """A child has copies of its parent's pending requests: it may not use them, and its exit does not end them."""
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
    dist.group.WORLD.messages.pending.clear()
    del pending, offered
    gc.collect()
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
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
    harness.well(results)
    for result in results:
        assert result["child"] == str(["forked-process"] * 4)


def test_destroying_a_group_ends_pending_messages() -> None:
    """Receives without a message do not delay the end of a group, and their waiters get the reason."""
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
    harness.well(results)
    for result in results:
        assert result["found"]["slug"] == "already-destroyed", result["found"]
        assert result["told"]["slug"] in {"already-destroyed", "peer-lost"}, result["told"]
