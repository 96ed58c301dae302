"""How a group ends in good order, or by a signal; and what children of a rank see. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import time

import pytest

import leaks
from ranks.harness import launch, running

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

SOAK = pytest.mark.soak


# Ending in good order --------------------------------------------------------------------------------------------


def test_destroy_is_safe_anywhere_in_a_program() -> None:
    """destroy_process_group does nothing before init, twice, after a failed init, in an except block and at exit."""
    results = launch(
        """
import allhands as dist, atexit, os, pathlib, sys, time, torch
atexit.register(dist.destroy_process_group)
dist.destroy_process_group()
say(hook=sys.excepthook is sys.__excepthook__)
say(failed=attempt(dist.init_process_group, "glooo", rank=rank, world_size=size, timeout=5))
# A rank that is still in the first attempt would report its error to the second one of a faster rank.
folder = pathlib.Path(__file__).parent
(folder / f"failed.{rank}").touch()
while len(list(folder.glob("failed.*"))) < size:
    time.sleep(0.01)
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
    """A program that never destroys its group exits with 0 and leaves nothing behind, in a plain interpreter."""
    results = launch(INIT + "dist.all_reduce(x)\nsay(x=x.tolist())\n", 2, fresh=True)
    for result in results:
        assert result["x"] == [2.0] * 4
        assert (result.returncode, result.complaints) == (0, "")


def test_threads_of_gloo_end_with_the_group() -> None:
    """They are freed by destroy without a garbage collection: one that outlives the interpreter crashes it."""
    results = launch(
        """
import gc
gc.disable()
"""
        + INIT
        + """
from pathlib import Path

def gloo():
    return sorted(name for each in Path("/proc/self/task").iterdir() if "gloo" in (name := (each / "comm").read_text()))

part = dist.new_group([0, 1])
dist.all_reduce(x, group=part)
dist.all_reduce(x)
del part
say(during=len(gloo()))
dist.destroy_process_group()
say(after=gloo())
""",
        2,
    )
    for result in results:
        assert result["during"] > 0
        assert result["after"] == []
        assert (result.returncode, result.complaints) == (0, "")


def test_forgetting_destroy_while_others_go_on_is_clean() -> None:
    """Rank 0 may end early without destroy: the other ranks finish without a warning."""
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


def test_using_no_group_is_an_error() -> None:
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


def test_destroy_waits_a_bounded_time_and_names_the_busy_rank() -> None:
    """Leaving while a peer still computes waits ALLHANDS_DESTROY_TIMEOUT, then names its line; the peer goes on."""
    results = launch(
        INIT
        + """
def compute():
    while not os.path.exists(left): time.sleep(0.05)
left = os.environ["GATES"] + "/left.0"
dist.all_reduce(x)
if rank == 0:
    time.sleep(0.3)
if rank == 1:
    compute()
    say(blocked=attempt(dist.all_reduce, x))
started = time.monotonic()
dist.destroy_process_group()
say(seconds=time.monotonic() - started)
gate("left", 1)
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
    """Destroying a group whose other rank was killed returns at once, without output, also inside the except block."""
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
        HANDLER
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
        HANDLER.replace("timeout=20", "timeout=6")
        + """
gate("formed")
say(ready=True)
say(blocked=attempt(dist.recv, x, src=1 - rank))
dist.destroy_process_group()
"""
    )
    # The peer's call may last its 6 s, and destroy waits for it.
    with running(script, 2, {"ALLHANDS_DESTROY_TIMEOUT": "20"}) as job:
        job.wait_for("ready")
        sent = job.signal(0, signal.SIGTERM)
        results = job.results()
    assert (results[0].returncode, results[0].complaints) == (7, "")
    assert results[1]["blocked"]["over"] - sent < 6 + 3 * SOON_S
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
    # After waiting for rank 0 it prints the reason; there may be no other output.
    assert [line for line in results[1].complaints.splitlines() if "although others were still busy" not in line] == []
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
while True:
    time.sleep(0.05)  # A signal that a process gets while it is stopped may come to any thread, and wakes only that.
"""
    )
    with running(script, 2) as job:
        job.wait_for("ready")
        time.sleep(0.2)
        # To both at once: a rank that learns of the other's end before its own signal would name that as the cause.
        for each in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
            for entry in job.ranks:
                os.killpg(entry.pid, each)
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


def test_a_forked_child_has_no_group() -> None:
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
say(coordinator=dist.groups.session.current().coordinator_process.pid)
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
    assert result.complaints == ""
    if how == "thread":
        assert result["x"] == 1.0


def test_a_block_reports_a_mismatch_once() -> None:
    """A diagnosis leaves a `with` block unchanged, not as the cause of another one."""
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
