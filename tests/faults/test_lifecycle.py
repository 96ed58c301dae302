"""How a group ends by an exception, by a death, by silence. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import leaks
from ranks.harness import Result, launch, running

pytestmark = pytest.mark.usefixtures("fork_server")

# How soon survivors must know.
SOON_S = 1.0

INIT = """
import allhands as dist
import os, signal, sys, threading, time
import torch
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
x = torch.ones(4)
"""

# What a rank may be waiting in when another one fails.
BLOCKED = {
    "all_reduce": "dist.all_reduce(x)",
    "barrier": "dist.barrier()",
    "recv-src": "dist.recv(x, src=1)",
    "recv-any": "dist.recv(x)",
    "broadcast": "dist.broadcast(x, src=1)",
    "all_gather_object": "dist.all_gather_object([None] * size, 1)",
    "work.wait": "dist.all_reduce(x, async_op=True).wait()",
    "irecv-any": "dist.irecv(x).wait()",
    "store.wait": "dist.distributed_c10d._get_default_store().wait(['never'])",
    "subgroup": "dist.all_reduce(x, group=part)",
    "monitored_barrier": "dist.monitored_barrier()",
    "between": "time.sleep(0.8) or dist.all_reduce(x)",
}

SOAK = pytest.mark.soak
# Close relatives of the others.
RARE = {"all_gather_object", "irecv-any", "subgroup", "monitored_barrier", "between"}


def failures(results: list[Result], *survivors: int) -> list[dict[str, Any]]:
    """Return what the survivors ran into."""
    return [results[number]["blocked"] for number in survivors]


# A rank that raises ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call", [pytest.param(call, id=name, marks=SOAK if name in RARE else ()) for name, call in BLOCKED.items()]
)
def test_an_uncaught_exception_reaches_peers_wherever_they_wait(call: str) -> None:
    """A rank that raises ends its peers' pending call within a second, with its traceback, the same on all."""
    results = launch(
        INIT
        + f"""
part = dist.new_group([0, 1, 2])
gate("formed")
if rank == 1:
    def broken():
        raise ValueError("boom in rank one")
    time.sleep(0.3)
    say(raised=True)
    broken()
else:
    say(blocked=attempt(lambda: {call}))
    dist.destroy_process_group()
""",
        3,
    )
    assert results[1].returncode == 1
    assert "boom in rank one" in results[1].stderr
    raised = next(line["at"] for line in results[1].lines if "raised" in line)
    texts = set()
    for found in failures(results, 0, 2):
        assert (found["kind"], found["slug"], found["ranks"]) == ("PeerFailed", "peer-failed", [1])
        assert "ValueError: boom in rank one" in found["traceback"]
        assert "in broken" in found["traceback"]
        assert "RuntimeError" in found["bases"]
        assert found["over"] - raised < SOON_S
        texts.add(found["text"])
    assert len(texts) == 1
    assert [results[number].returncode for number in (0, 2)] == [0, 0]
    # torch itself writes a line about a monitored barrier; there may be no other output.
    noise = [
        line for number in (0, 2) for line in results[number].complaints.splitlines() if "monitoredBarrier" not in line
    ]
    assert noise == []


def test_an_exception_that_leaves_the_with_block_reaches_peers() -> None:
    """`with process_group()` reports an exception that leaves the block; afterwards a new group forms."""
    results = launch(
        """
import allhands as dist, torch, time
x = torch.ones(2)
def work():
    with dist.process_group("gloo", rank=rank, world_size=size, timeout=20) as group:
        assert group is dist.group.WORLD
        if rank == 1:
            time.sleep(0.3)
            say(raised=True)
            raise KeyError("left the block")
        dist.all_reduce(x)
say(blocked=attempt(work), initialised=dist.is_initialized())
with dist.process_group("gloo", rank=rank, world_size=size, timeout=20):
    dist.all_reduce(x)
say(x=x.tolist())
""",
        2,
    )
    raised = next(line["at"] for line in results[1].lines if "raised" in line)
    found = results[0]["blocked"]
    assert (found["slug"], found["ranks"]) == ("peer-failed", [1])
    assert "KeyError: 'left the block'" in found["traceback"]
    assert found["over"] - raised < SOON_S
    assert results[1]["blocked"]["kind"] == "KeyError"
    for result in results:
        assert not result["initialised"]
        assert result["x"] == [2.0, 2.0]
        assert (result.returncode, result.complaints) == (0, "")


@pytest.mark.parametrize("how", ["fork", *(pytest.param(how, marks=SOAK) for how in ("spawn", "torch"))])
def test_an_exception_in_a_child_of_multiprocessing_reaches_peers(how: str) -> None:
    """In children of multiprocessing, whose exceptions do not reach sys.excepthook, peers get the error too."""
    result = launch(
        f"""
import allhands as dist, time, torch

def work(number):
    dist.init_process_group("gloo", rank=number, world_size=2, timeout=20)
    if number == 1:
        time.sleep(0.3)
        say(raised=True)
        raise ValueError("boom in a child")
    say(blocked=attempt(dist.all_reduce, torch.ones(2)))

if __name__ == "__main__":
    if {how!r} == "torch":
        import torch.multiprocessing
        try:
            torch.multiprocessing.spawn(work, nprocs=2)
        except torch.multiprocessing.ProcessRaisedException as problem:
            say(spawn=str(problem))
    else:
        import multiprocessing
        context = multiprocessing.get_context({how!r})
        processes = [context.Process(target=work, args=(number,)) for number in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        say(codes=[process.exitcode for process in processes])
""",
        1,
        # Its children find the prelude only on the interpreter's own module path.
        fresh=how != "fork",
    )[0]
    found = result["blocked"]
    raised = next(line["at"] for line in result.lines if "raised" in line)
    assert (found["slug"], found["ranks"]) == ("peer-failed", [1])
    assert "ValueError: boom in a child" in found["traceback"]
    assert found["over"] - raised < SOON_S
    assert result.returncode == 0
    if how == "torch":
        assert "boom in a child" in result["spawn"]
    else:
        assert result["codes"] == [0, 1]


def test_torch_ddp_backward_ends_promptly_and_the_cause_is_printed() -> None:
    """Inside torch's DDP, whose backward is not ours, a peer's exception still ends the call with its cause."""
    results = launch(
        INIT
        + """
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(4, 4))
gate("formed")
loss = model(torch.ones(2, 4)).sum()
if rank == 1:
    time.sleep(0.3)
    say(raised=True)
    raise ValueError("boom beside backward")
try:
    loss.backward()
except RuntimeError:
    say(over=True)
    raise
""",
        2,
    )
    when = {key: line["at"] for result in results for line in result.lines for key in line if key != "at"}
    assert when["over"] - when["raised"] < SOON_S
    assert results[0].returncode == 1
    assert "The cause, as allhands saw it:" in results[0].stderr
    assert "[peer-failed]" in results[0].stderr
    assert "ValueError: boom beside backward" in results[0].stderr


def test_a_rank_that_exits_with_an_error_code_is_not_waited_for() -> None:
    """sys.exit(3) while peers wait ends their call at once, naming the rank that left."""
    results = launch(
        INIT
        + """
gate("formed")
if rank == 1:
    time.sleep(0.3)
    say(left=True)
    sys.exit(3)
say(blocked=attempt(dist.all_reduce, x))
""",
        2,
    )
    left = next(line["at"] for line in results[1].lines if "left" in line)
    found = results[0]["blocked"]
    assert found["slug"] in {"peer-failed", "peer-lost"}
    assert found["ranks"] == [1]
    assert found["over"] - left < 2 * SOON_S
    assert results[1].returncode == 3
    assert results[1].complaints == ""


# A rank that vanishes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_lost_within_a_second(victim: int) -> None:
    """After kill -9 of any rank, rank 0 included, ends the others' pending calls with peer-lost, alike on all."""
    script = (
        INIT
        + f"""
gate("formed")
say(ready=dist.groups.session.current().coordinator_process.pid if rank == 0 else 0)
if rank == {victim}:
    time.sleep(60)
say(blocked=attempt(dist.all_reduce, x))
dist.destroy_process_group()
"""
    )
    survivors = [number for number in range(3) if number != victim]
    with running(script, 3) as job:
        ready = job.wait_for("ready")
        time.sleep(0.2)
        killed = job.signal(victim, signal.SIGKILL)
        results = job.results()
    assert not leaks.alive(ready[0])
    assert results[victim].returncode == -signal.SIGKILL
    for found in failures(results, *survivors):
        assert (found["kind"], found["slug"], found["ranks"]) == ("PeerLost", "peer-lost", [victim])
        assert found["certain"]
        assert found["over"] - killed < SOON_S
    assert len({found["text"] for found in failures(results, *survivors)}) == 1
    assert {(results[number].returncode, results[number].complaints) for number in survivors} == {(0, "")}


def test_a_killed_coordinator_is_lost_within_a_second() -> None:
    """A kill -9 of the coordinator's process ends pending calls with coordinator-lost, and no rank is called dead."""
    script = (
        INIT
        + """
gate("formed")
say(coordinator=dist.groups.session.current().coordinator_process.pid if rank == 0 else 0)
say(blocked=attempt(dist.recv, x, src=1 - rank))
dist.destroy_process_group()
say(again=attempt(dist.all_reduce, x))
"""
    )
    with running(script, 2) as job:
        pid = job.wait_for("coordinator")[0]
        time.sleep(0.2)
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        results = job.results()
    for result in results:
        found = result["blocked"]
        assert (found["kind"], found["slug"]) == ("CoordinatorLost", "coordinator-lost")
        assert found["over"] - killed < SOON_S
        assert result["again"]["slug"] == "already-destroyed"
        assert (result.returncode, result.complaints) == (0, "")


HOLDING = {
    "fork": """
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
""",
    "dataloader": """
from torch.utils.data import DataLoader
batches = iter(DataLoader(list(range(100)), batch_size=2, num_workers=1))
next(batches)
""",
}


@pytest.mark.parametrize("child", HOLDING.values(), ids=HOLDING)
def test_a_killed_rank_is_lost_although_its_children_live(child: str) -> None:
    """A forked child holds copies of a killed rank's sockets open; the death is seen within a second all the same."""
    script = (
        INIT
        + f"""
gate("formed")
if rank == 1:
{child.replace(chr(10), chr(10) + "    ")}
say(ready=children())
if rank == 1:
    time.sleep(60)
say(blocked=attempt(dist.all_reduce, x))
dist.destroy_process_group()
"""
    )
    with running(script, 2) as job:
        orphan = job.wait_for("ready")[1][0]
        time.sleep(0.2)
        killed = job.signal(1, signal.SIGKILL)
        job.wait_for("blocked", [0])
        assert leaks.alive(orphan)
        os.kill(orphan, signal.SIGKILL)
        results = job.results()
    found = results[0]["blocked"]
    assert (found["slug"], found["ranks"]) == ("peer-lost", [1])
    assert found["over"] - killed < SOON_S
    assert (results[0].returncode, results[0].complaints) == (0, "")


# A rank that is late or silent -----------------------------------------------------------------------------------


def test_a_stopped_rank_is_silent_not_dead() -> None:
    """SIGSTOP is peer-silent at the timeout, never peer-lost, with the same message on all; the rank may continue."""
    script = """
import allhands as dist, datetime, os, signal, torch
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1.5))
gate("formed")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)  # before its call, even if it is late
say(blocked=attempt(dist.all_reduce, torch.ones(3)))
dist.destroy_process_group()
"""
    with running(script, 3) as job:
        job.wait_for("blocked", [0, 2])
        job.signal(1, signal.SIGCONT)
        results = job.results()
    for found in failures(results, 0, 2):
        assert (found["kind"], found["slug"], found["ranks"]) == ("PeerSilent", "peer-silent", [1])
        assert not found["certain"]
        assert "gone" not in found["text"]
        assert 1.0 < found["seconds"] < 5.0
    assert len({found["text"] for found in failures(results, 0, 1, 2)}) == 1
    assert [result.returncode for result in results] == [0, 0, 0]


def test_a_late_rank_is_named_with_what_it_does() -> None:
    """A collective that times out names the missing rank and its line, the same on all ranks."""
    results = launch(
        """
import allhands as dist, datetime, torch, time
def elsewhere():
    while not dist.groups.session.current().member.verdict:
        time.sleep(0.05)
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1.5)) or gate("formed")
if rank == 1:
    elsewhere()
say(blocked=attempt(lambda: dist.all_reduce(torch.ones(3))))
dist.destroy_process_group()
""",
        3,
    )
    for found in failures(results, 0, 1, 2):
        assert (found["kind"], found["slug"], found["ranks"]) == ("CollectiveTimeout", "collective-timeout", [1])
        assert "rank 1 is at script.py:5 in elsewhere" in found["text"]
        assert "in all_reduce at script.py:10" in found["text"]
    assert len({found["text"] for found in failures(results, 0, 1, 2)}) == 1
    assert {(result.returncode, result.complaints) for result in results} == {(0, "")}
