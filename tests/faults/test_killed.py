"""A rank is killed, exits, raises or stops in the middle of a collective: the others get its number in time."""

from __future__ import annotations

import random
import signal
import time

import pytest

from faults.calls import NAMES
from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

WORLD = 4
FALLS = 2

# Beside every collective: several reductions in flight, and a ring of sends and receives.
OPERATIONS = (*NAMES, "all_reduce, async", "send and receive")

# The promise is a second; survivors notice in 50 ms or so. Wider, because others use the machine too.
MOST_S = 5.0

# Timeout of a call in which a rank stops; the transfer takes some 50 ms.
TIMEOUT_S = 2.0

# How long forming the group may take; sends and receives keep that limit (Gloo's cannot be set later).
FORMING_S, FORMING_SENDS_S = 20.0, 6.0

SCRIPT = """
import os, signal, threading, time, warnings
from datetime import timedelta
import torch
import allhands as dist
from faults.calls import Call, issue, tensors

warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
NAME, HOW, EARLY, DELAY, FALLS = {name!r}, {how!r}, {early!r}, {delay!r}, {falls!r}
dist.init_process_group("allhands", rank=rank, world_size=size, timeout={forming!r})

# Tens of MiB, so many chunks; lists have a part of it for each rank.
LARGE = 1 << 23
call = Call(NAME.partition(",")[0], count=LARGE if NAME in ("all_reduce", "reduce", "broadcast") else LARGE // size)
if NAME == "send and receive":
    given, taken = torch.ones(LARGE), torch.empty(LARGE)
else:
    made = tensors(call, rank, size)

def once():
    if NAME == "send and receive":
        sent = dist.isend(given, (rank + 1) % size)
        dist.recv(taken, (rank - 1) % size)
        sent.wait()
    elif NAME.endswith("async"):
        for work in [issue(dist, call, made, None, later=True) for _ in range(3)]:
            work.wait()
    else:
        issue(dist, call, made, None)

def fall(*_):
    say(fell=time.time())
    if HOW == "exit":
        os._exit(3)
    if HOW == "raise":
        raise ValueError("bad batch")

once()
if HOW == "stop":
    dist.group.WORLD.set_timeout(timedelta(seconds={timeout!r}))
once()
say(ready=True)
if rank == FALLS:
    if EARLY and HOW in ("kill", "stop"):
        say(waits=True)
        time.sleep(60)
    if EARLY:
        time.sleep(0.2)
        fall()
    if HOW == "exit":
        threading.Timer(DELAY, fall).start()
    if HOW == "raise":
        signal.signal(signal.SIGALRM, fall)
        signal.setitimer(signal.ITIMER_REAL, DELAY)

def work():
    while True:
        once()

if rank == FALLS:
    work()
found = attempt(work)
say(told=time.time(), found=found)
"""


def fall(name: str, how: str, *, early: bool = False) -> float:
    """End one rank (before the call if ``early``); return the time until all others had the error."""
    # Anywhere in the operation, and in any of some ten of them.
    delay = random.uniform(0.05, 0.4)  # noqa: S311  # a moment, not a secret
    forming = FORMING_SENDS_S if (name, how) == ("send and receive", "stop") else FORMING_S
    source = SCRIPT.format(
        name=name, how=how, early=early, delay=delay, falls=FALLS, timeout=TIMEOUT_S, forming=forming
    )
    others = [rank for rank in range(WORLD) if rank != FALLS]
    words = f"{name}, {how}, {'before' if early else f'{delay:.3f} s into'} the call"
    with harness.running(source, WORLD) as job:
        fell = None
        job.wait_for("ready")
        if how in {"kill", "stop"}:
            time.sleep(delay)
            fell = job.signal(FALLS, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "stop":
            job.wait_for("told", others)
            job.signal(FALLS, signal.SIGKILL)
        results = job.results()
    fell = fell or results[FALLS]["fell"]
    slugs = {"raise": {"peer-failed"}, "stop": {"peer-silent", "collective-timeout"}}.get(how, {"peer-lost"})
    for rank in others:
        found = results[rank]["found"]
        assert results[rank].returncode == 0, (words, results[rank].stderr)
        assert found["slug"] in slugs, (words, found)
        assert list(found["ranks"]) == [FALLS], (words, found)
        if how == "raise":
            assert "bad batch" in found["text"], (words, found)
    slowest: float = max(results[rank]["told"] - fell for rank in others)
    print(f"\n{words}: all ranks told {slowest:.3f} s after it")  # noqa: T201  # the measurement of the test
    limit = MOST_S + ((forming if forming != FORMING_S else TIMEOUT_S) if how == "stop" else 0)
    assert slowest < limit, words
    return slowest


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_that_is_killed_in_the_middle_ends_it_for_all(name: str) -> None:
    """One of four ranks is killed (kill -9) in the middle of large operations: the others get peer-lost with it."""
    fall(name, "kill")


@pytest.mark.parametrize("how", ["exit", "raise"])
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce, async", "all_to_all"])
def test_a_rank_that_exits_or_raises_in_the_middle_ends_it_for_all(name: str, how: str) -> None:
    """os._exit and an exception in the middle of large operations: peer-lost, or peer-failed with what it raised."""
    fall(name, how)


@pytest.mark.parametrize("name", ["all_reduce", pytest.param("gather", marks=pytest.mark.soak)])
def test_a_rank_that_stops_in_the_middle_is_named_at_the_deadline(name: str) -> None:
    """SIGSTOP proves nothing until the timeout has passed; then the rank that does not answer is named."""
    fall(name, "stop")


@pytest.mark.parametrize("sub", [False, True])
def test_a_rank_that_leaves_in_good_order_keeps_no_rank_waiting(sub: bool) -> None:
    """A rank that waits for one that destroyed the group gets the error long before the timeout."""
    results = harness.launch(
        f"""
import time
import torch
import torch.distributed as torch_dist
import allhands as dist

dist.init_process_group("allhands", rank=rank, world_size=size, timeout=30)
group = dist.new_group([0, 1, 2]) if {sub} else None
dist.barrier(group=group)
if rank == 1:
    torch_dist.destroy_process_group(group) if {sub} else dist.destroy_process_group()
    gate("told", size)
else:
    say(found=attempt(lambda: dist.all_reduce(torch.ones(5), group=group)))
    gate("told", 1)
""",
        3,
        {"ALLHANDS_DESTROY_TIMEOUT": "0.2"},
    )
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "peer-lost", result["found"]
        assert list(result["found"]["ranks"]) == [1]
        assert "left the group" in result["found"]["text"]
        assert result["found"]["seconds"] < MOST_S


LEFT = """
import os, signal
import torch
import allhands as dist

dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
value = torch.full((3,), float(rank))
dist.barrier()
if rank == 1:
    for step in range(5):
        dist.broadcast(value.fill_(step), 1)
    gate("left", 1)
    os.kill(os.getpid(), signal.SIGKILL)
gate("left")
for step in range(6):
    found = attempt(lambda: dist.broadcast(value, 1))
    if found["kind"]:
        break
    assert torch.equal(value, torch.full((3,), float(step)))
say(found=found)
"""


def test_a_root_that_is_killed_after_it_left_its_data_is_named() -> None:
    """Small broadcasts of a killed root that no rank had received yet: data received before the error is right."""
    results = harness.launch(LEFT, 3)
    assert results[1].returncode == -signal.SIGKILL
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "peer-lost", result["found"]
        assert result["found"]["ranks"] == [1]
        assert result["found"]["seconds"] < MOST_S


# A rank that is killed while the group's memory is sent: as it identifies itself, or once it has the memory.
# The others continue only once it is gone.
FD_PASSING = {
    "identifies itself": "fd_passing._Hello = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
    "has the memory": "shm._pidfds = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
}
SENT = """
import os, signal, time
import allhands as dist
from allhands.engines.shm import fd_passing
from allhands.engines.shm import engine as shm

real = shm._pidfds
def late(handover, number):
    while os.path.exists(f"/proc/{{handover.pids[1]}}"):
        time.sleep(0.01)
    return real(handover, number)

if rank == 1:
    {dies}
else:
    shm._pidfds = late
def meet():
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
    dist.barrier()
say(found=attempt(meet))
"""


@pytest.mark.parametrize("moment", FD_PASSING)
def test_a_rank_that_is_killed_while_memory_is_sent_is_named(moment: str) -> None:
    """Ranks that notice the death before or after the coordinator's message raise peer-lost with that rank."""
    results = harness.launch(SENT.format(dies=FD_PASSING[moment]), 3)
    assert results[1].returncode == -signal.SIGKILL
    for result in (results[0], results[2]):
        assert result["found"]["slug"] == "peer-lost", result["found"]
        assert result["found"]["ranks"] == [1]
