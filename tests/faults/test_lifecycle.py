"""How a group ends: in good order, by an exception, by a signal, by silence. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import leaks
from ranks.harness import Result, launch, running

pytestmark = pytest.mark.usefixtures("nursery")

# How soon survivors must know. The promise is one second.
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
    """A rank that raises ends its peers' pending call within a second, with its traceback, and says the same to all."""
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
    # torch itself writes a line about a monitored barrier; nothing else may stand there.
    noise = [
        line for number in (0, 2) for line in results[number].stderr.splitlines() if "monitoredBarrier" not in line
    ]
    assert noise == []


def test_an_exception_that_leaves_the_with_block_reaches_peers() -> None:
    """`with process_group()` announces what leaves the block, the culprit goes on, and a new group forms afterwards."""
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


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=SOAK), "torch"])
def test_an_exception_in_a_child_of_multiprocessing_reaches_peers(how: str) -> None:
    """In children of multiprocessing, whose exceptions pass by sys.excepthook, peers are told all the same."""
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
        # Its children find the prelude only where the interpreter itself looks for modules.
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
    """Inside torch's DDP, whose backward is not ours, a peer's exception still ends the call and its cause is told."""
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
say(ready=dist.session.current().beside.pid if rank == 0 else 0)
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
say(coordinator=dist.session.current().beside.pid if rank == 0 else 0)
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
    """SIGSTOP shows as peer-silent at the timeout, never as peer-lost, with the same words on all; it may go on."""
    script = """
import allhands as dist, torch, time
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=1.5)
gate("formed")
say(ready=True)
if rank == 1:
    time.sleep(1)
say(blocked=attempt(dist.all_reduce, torch.ones(3)))
dist.destroy_process_group()
"""
    with running(script, 3) as job:
        job.wait_for("ready")
        job.signal(1, signal.SIGSTOP)
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
    """A collective that times out names who did not come and the line it was at, alike on all ranks."""
    results = launch(
        """
import allhands as dist, torch, time
def elsewhere():
    while not dist.session.current().member.verdict:
        time.sleep(0.05)
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=1.5)
gate("formed")
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


# Ending in good order --------------------------------------------------------------------------------------------


def test_destroy_is_safe_anywhere_in_a_program() -> None:
    """destroy_process_group does nothing before init, twice, after a failed init, in an except block and at exit."""
    results = launch(
        """
import allhands as dist, atexit, os, sys, torch
atexit.register(dist.destroy_process_group)
dist.destroy_process_group()
say(hook=sys.excepthook is sys.__excepthook__)
say(failed=attempt(dist.init_process_group, "glooo", rank=rank, world_size=size, timeout=5))
dist.destroy_process_group()
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
try:
    raise ValueError("handled")
except ValueError:
    dist.destroy_process_group()
dist.destroy_process_group()
dist.destroy_process_group(dist.group.WORLD)
dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
x = torch.ones(1)
part = dist.new_group([0, 1])
dist.all_reduce(x, group=part)
dist.destroy_process_group(part)
dist.destroy_process_group(part)
dist.all_reduce(x)
say(x=x.item(), alive=dist.is_initialized())
""",
        2,
    )
    for result in results:
        assert result["failed"]["slug"] == "backend-unknown"
        assert (result["x"], result["alive"]) == (4.0, True)
        assert (result.returncode, result.complaints) == (0, "")


def test_forgetting_destroy_is_clean() -> None:
    """A program that never destroys its group exits with 0, says nothing and leaves nothing, in a plain interpreter."""
    results = launch(INIT + "dist.all_reduce(x)\nsay(x=x.tolist())\n", 2, fresh=True)
    for result in results:
        assert result["x"] == [2.0] * 4
        assert (result.returncode, result.complaints) == (0, "")


def test_forgetting_destroy_while_others_go_on_is_clean() -> None:
    """Rank 0 may end early without destroy: the ranks that go on without it finish, and nobody warns."""
    results = launch(
        INIT
        + """
dist.all_reduce(x)
if rank:
    time.sleep(0.7)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"late{rank}", "value")
    say(value=store.get(f"late{rank}").decode())
""",
        3,
    )
    assert [results[number]["value"] for number in (1, 2)] == ["value", "value"]
    assert {(result.returncode, result.complaints) for result in results} == {(0, "")}


def test_using_no_group_says_so() -> None:
    """Before init a call raises not-initialised (a ValueError, as torch's); after destroy, where that was."""
    result = launch(
        """
import allhands as dist, pickle, torch
x = torch.ones(1)
calls = {
    "all_reduce": lambda: dist.all_reduce(x), "barrier": dist.barrier, "new_group": dist.new_group,
    "get_rank": dist.get_rank, "get_world_size": dist.get_world_size, "get_backend": dist.get_backend,
    "isend": lambda: dist.isend(x, 0), "broadcast_object_list": lambda: dist.broadcast_object_list([1]),
}
say(before={name: attempt(call) for name, call in calls.items()})
dist.init_process_group("gloo", rank=0, world_size=1)
say(twice=attempt(dist.init_process_group, "gloo", rank=0, world_size=1))
dist.destroy_process_group()
say(after={name: attempt(call) for name, call in calls.items()})
try:
    dist.all_reduce(x)
except dist.AlreadyDestroyed as problem:
    again = pickle.loads(pickle.dumps(problem))
    say(same=(type(again) is type(problem), again.slug, str(again) == str(problem)))
""",
        1,
    )[0]
    for name, found in result["before"].items():
        assert (name, found.get("slug"), found["kind"]) == (name, "not-initialised", "NotInitialised")
        assert "ValueError" in found["bases"]
        assert found["text"].startswith(f"{name} was called, but")
    assert result["twice"]["slug"] == "already-initialised"
    assert "script.py:10" in result["twice"]["text"]
    for name, found in result["after"].items():
        assert (name, found.get("slug"), found["kind"]) == (name, "already-destroyed", "AlreadyDestroyed")
        assert "destroy_process_group ran at script.py:12" in found["text"]
    assert result["same"] == [True, "already-destroyed", True]


def test_diagnoses_of_the_dead_pickle() -> None:
    """PeerLost crosses a process boundary whole: class, slug, ranks and text."""
    script = (
        INIT
        + """
import pickle
gate("formed")
say(ready=True)
if rank == 1:
    time.sleep(60)
try:
    dist.all_reduce(x)
except dist.PeerLost as problem:
    again = pickle.loads(pickle.dumps(problem))
    say(again=outcome(again), before=outcome(problem))
try:
    dist.barrier()
except dist.PeerLost as problem:
    say(next=outcome(problem))
"""
    )
    with running(script, 2) as job:
        job.wait_for("ready")
        job.signal(1, signal.SIGKILL)
        result = job.results()[0]
    assert result["again"] == result["before"]
    assert result["next"] == result["before"]


def test_destroy_waits_a_bounded_time_and_names_who_was_busy() -> None:
    """Leaving while a peer still computes waits ALLHANDS_DESTROY_TIMEOUT, then says who was where; the peer goes on."""
    results = launch(
        INIT
        + """
def compute():
    time.sleep(2.5)
dist.all_reduce(x)
if rank == 0:
    time.sleep(0.3)
if rank == 1:
    compute()
    say(blocked=attempt(dist.all_reduce, x))
started = time.monotonic()
dist.destroy_process_group()
say(seconds=time.monotonic() - started)
""",
        2,
        {"ALLHANDS_DESTROY_TIMEOUT": "1"},
    )
    assert 0.9 < results[0]["seconds"] < 3.5
    assert "rank 0 left the process group after 1 s although others were still busy" in results[0].stderr
    assert "rank 1" in results[0].stderr
    assert "at script.py:9 in compute" in results[0].stderr
    assert results[1]["blocked"]["ranks"] == [0]
    assert results[1]["blocked"]["slug"] in {"peer-lost", "coordinator-lost"}
    assert results[1]["seconds"] < 3.0
    assert results[1].complaints == ""
    assert [result.returncode for result in results] == [0, 0]


def test_destroy_with_peers_gone_does_not_wait() -> None:
    """Destroying a group whose other rank was killed returns at once, without a word, also inside the except block."""
    script = (
        INIT
        + """
gate("formed")
say(ready=True)
if rank == 1:
    time.sleep(60)
try:
    dist.barrier()
except dist.PeerLost:
    say(destroy=attempt(dist.destroy_process_group))
"""
    )
    with running(script, 2) as job:
        job.wait_for("ready")
        job.signal(1, signal.SIGKILL)
        result = job.results()[0]
    assert result["destroy"]["kind"] == ""
    assert result["destroy"]["seconds"] < 1.5
    assert (result.returncode, result.complaints) == (0, "")


# Signals ---------------------------------------------------------------------------------------------------------

HANDLER = (
    INIT
    + """
def handler(*_):
    say(signalled=True)
    dist.destroy_process_group()
    sys.exit(7)
signal.signal(signal.SIGTERM, handler)
"""
)


# A main thread inside Gloo's C++ runs no Python signal handler until that call returns.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SOAK)])
def test_a_signal_in_a_collective_ends_it_promptly(number: signal.Signals) -> None:
    """A handler that destroys and exits runs although the rank waits inside a collective; its peer ends too."""
    script = (
        HANDLER.replace("timeout=20", "timeout=4")
        + """
signal.signal(signal.SIGINT, handler)
gate("formed")
say(ready=True)
say(blocked=attempt(dist.recv, x, src=1 - rank))
dist.destroy_process_group()
"""
    )
    with running(script, 2) as job:
        job.wait_for("ready")
        time.sleep(0.2)
        sent = job.signal(1, number)
        results = job.results()
    assert results[1].returncode == 7
    assert next(line["at"] for line in results[1].lines if "signalled" in line) - sent < 2 * SOON_S
    assert results[0]["blocked"]["ranks"] == [1]
    assert results[0]["blocked"]["over"] - sent < 2 * SOON_S


def test_sigterm_in_a_collective_still_ends_in_good_order() -> None:
    """Whenever the handler gets to run, destroy and exit inside it work; nothing is left, and the peer is not hung."""
    script = (
        HANDLER.replace("timeout=20", "timeout=2")
        + """
gate("formed")
say(ready=True)
say(blocked=attempt(dist.recv, x, src=1 - rank))
dist.destroy_process_group()
"""
    )
    with running(script, 2) as job:
        job.wait_for("ready")
        sent = job.signal(0, signal.SIGTERM)
        results = job.results()
    assert (results[0].returncode, results[0].complaints) == (7, "")
    assert results[1]["blocked"]["over"] - sent < 5.0
    assert (results[1].returncode, results[1].complaints) == (0, "")


@pytest.mark.parametrize("where", ["python", "destroy", "any"])
def test_sigterm_outside_the_engine_is_handled_at_once(where: str) -> None:
    """A handler that destroys and exits works in the middle of Python code, of destroy itself, and of recv from any."""
    script = (
        HANDLER
        + f"""
gate("formed")
say(ready=True)
if rank == 1:
    if {where!r} == "python":
        time.sleep(60)
    if {where!r} == "destroy":
        os.environ["ALLHANDS_DESTROY_TIMEOUT"] = "60"
        dist.destroy_process_group()  # waits for rank 0
    if {where!r} == "any":
        dist.recv(x)
    say(returned=True)
say(blocked=attempt(dist.all_reduce, x))
dist.destroy_process_group()
"""
    )
    with running(script, 2, {"ALLHANDS_DESTROY_TIMEOUT": "0.5"}) as job:
        job.wait_for("ready")
        time.sleep(0.3)
        sent = job.signal(1, signal.SIGTERM)
        results = job.results()
    assert results[1].returncode == 7
    assert next(line["at"] for line in results[1].lines if "signalled" in line) - sent < SOON_S
    assert not any("returned" in line for line in results[1].lines)
    # Where it waited its time for rank 0, it says what for; nothing else may stand there.
    assert [line for line in results[1].stderr.splitlines() if "although others were still busy" not in line] == []
    found = results[0]["blocked"]
    assert (found["slug"], found["ranks"]) == ("peer-lost", [1])
    assert found["over"] - sent < 3.0
    assert (results[0].returncode, results[0].complaints) == (0, "")


def test_ctrl_c_reaches_all_and_leaves_nothing() -> None:
    """SIGINT to every process at once (a terminal's Ctrl-C) ends all with a KeyboardInterrupt and no other error."""
    script = (
        INIT
        + """
gate("formed")
say(ready=True)
time.sleep(60)
"""
    )
    with running(script, 2) as job:
        job.wait_for("ready")
        time.sleep(0.2)
        for entry in job.ranks:
            os.killpg(entry.pid, signal.SIGINT)
        results = job.results()
    for result in results:
        assert result.returncode in {-signal.SIGINT, 1}
        assert result.stderr.splitlines()[-1].endswith("KeyboardInterrupt")
        assert "The cause" not in result.stderr


# Children of a rank, and the coordinator's own end ---------------------------------------------------------------


def test_workers_of_a_dataloader_do_not_disturb() -> None:
    """Forked DataLoader workers come and go while the group lives; collectives go on between and after."""
    results = launch(
        INIT
        + """
from torch.utils.data import DataLoader
total = 0.0
for epoch in range(2):
    for batch in DataLoader(list(range(8)), batch_size=2, num_workers=2):
        y = batch.sum().float()
        dist.all_reduce(y)
        total += y.item()
say(total=total)
dist.destroy_process_group()
""",
        2,
    )
    for result in results:
        assert result["total"] == 2 * 2 * sum(range(8))
        assert (result.returncode, result.complaints) == (0, "")


def test_a_forked_child_is_told_that_it_has_no_group() -> None:
    """A child forked from a rank that uses the group gets forked-process at once, and the rank's group is unharmed."""
    results = launch(
        INIT
        + """
pid = os.fork()
if pid == 0:
    say(child=[
        attempt(dist.all_reduce, x),
        attempt(dist.barrier),
        attempt(dist.distributed_c10d._get_default_store().set, "key", "value"),
        attempt(dist.destroy_process_group),
    ])
    sys.exit(0)
os.waitpid(pid, 0)
dist.all_reduce(x)
say(x=x.tolist())
dist.destroy_process_group()
""",
        2,
    )
    for result in results:
        assert [found.get("slug", "") for found in result["child"]] == ["forked-process"] * 3 + [""]
        assert all(found["seconds"] < SOON_S for found in result["child"])
        assert result["x"] == [2.0] * 4
        assert (result.returncode, result.complaints) == (0, "")


@pytest.mark.parametrize("how", ["exit", "kill", "thread"])
def test_the_coordinator_ends_with_rank_0(how: str) -> None:
    """The coordinator's process ends after rank 0 however that ended, but not with the thread that formed the group."""
    script = f"""
import allhands as dist, threading, time, torch
def init():
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=20)
if {how!r} == "thread":
    thread = threading.Thread(target=init)
    thread.start()
    thread.join()
    time.sleep(0.5)
    x = torch.ones(1)
    dist.all_reduce(x)
    say(x=x.item())
else:
    init()
say(coordinator=dist.session.current().beside.pid)
if {how!r} == "kill":
    time.sleep(60)
"""
    with running(script, 1) as job:
        pid = job.wait_for("coordinator")[0]
        assert leaks.alive(pid) or how == "exit"
        if how == "kill":
            job.signal(0, signal.SIGKILL)
        result = job.results()[0]
    deadline = time.monotonic() + 5
    while leaks.alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not leaks.alive(pid)
    assert result.returncode == (-signal.SIGKILL if how == "kill" else 0)
    assert result.stderr == ""
    if how == "thread":
        assert result["x"] == 1.0


def test_a_block_says_a_mismatch_once() -> None:
    """An exception that says already who did what leaves a `with` block as it is, not as the cause of itself."""
    script = """
import torch
import allhands as dist

try:
    with dist.process_group("allhands", rank=rank, world_size=size, timeout=10):
        dist.all_reduce(torch.ones(3 + rank))
except dist.CollectiveMismatch as problem:
    say(cause=repr(problem.__cause__))
"""
    for result in launch(script, 2):
        assert result["cause"] == "None"
