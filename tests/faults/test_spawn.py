"""Failures under `allhands.spawn`: the culprit is named, and no process is left."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import pytest

import leaks
from ranks.spawning import finish, gone, program

# All failures in one program, forked, because importing torch needs seconds.
FAILURES = """
import ctypes, json, os, pickle, signal, subprocess, sys, time
import torch, torch.multiprocessing
import allhands

class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(first)

def fail(rank, how):
    if how in ("group", "early"):
        allhands.init_process_group()
        x = torch.ones(2)
        allhands.all_reduce(x)
    if how == "early" and rank == 1:
        return
    if rank == 1:
        match how:
            case "raise" | "group": raise KeyError("the third shelf")
            case "odd": raise Odd("no such", "thing")
            case "exit": sys.exit(3)
            case "silent": os._exit(4)
            case "kill": os.kill(os.getpid(), signal.SIGKILL)
            case "crash": ctypes.string_at(0)
            case "value": return lambda: 0
            case "nothing": os._exit(0)
    if how in ("group", "early"):
        allhands.all_reduce(x)
        return
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"deaf{rank}", "w").close()
        if rank == 0:
            while not os.path.exists("deaf2"):
                time.sleep(0.01)
            raise KeyError("after that nobody listens")
        time.sleep(1000)
    if how not in ("value", "nothing"):
        time.sleep(1000)

for how in ("raise", "group", "odd", "exit", "silent", "kill", "crash", "value", "nothing", "early", "deaf"):
    children = allhands.spawn(fail, (how,), 3, join=False, start_method="fork", results=True)
    begun = time.monotonic()
    try:
        while not children.join(grace_period=0.3):
            pass
    except allhands.AllhandsError as problem:
        again = pickle.loads(pickle.dumps(problem))
        said = {"how": how, "text": str(problem), "slug": problem.slug, "ranks": problem.ranks,
                "kind": type(problem).__name__, "cause": repr(problem.__cause__),
                "seconds": time.monotonic() - begun, "alike": str(again) == str(problem)}
        if isinstance(problem, allhands.SpawnFailed):
            kinds = (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException)
            assert isinstance(problem, kinds)
            said |= {"index": problem.error_index, "pid": problem.error_pid == children.pids()[problem.error_index],
                     "same": again.error_index == problem.error_index and again.error_pid == problem.error_pid}
        if isinstance(problem, torch.multiprocessing.ProcessExitedException):
            said |= {"code": problem.exit_code, "signal": problem.signal_name}
        try:
            children.join()
        except allhands.AllhandsError as second:
            said["twice"] = second is problem
        print(json.dumps(said))
"""


SHELF = {"cause": "KeyError('the third shelf')"}


@functools.cache
def failures() -> dict[str, dict[str, Any]]:
    """Run all cases once; return their results by name."""
    return {said["how"]: said for said in finish(FAILURES)}


@pytest.mark.parametrize(
    ("how", "kind", "words", "more"),
    [
        ("raise", "SpawnRaised", "rank 1 raised KeyError: 'the third shelf'", SHELF),
        (
            "group",
            "SpawnRaised",
            "ranks 0 and 2 only followed: raised PeerFailed",
            SHELF,
        ),
        ("odd", "SpawnRaised", "rank 1 raised Odd: no such", {"cause": "None"}),
        ("exit", "SpawnExited", "rank 1 called sys.exit(3)", {"code": 3, "signal": None}),
        ("silent", "SpawnExited", "rank 1 ended with exit status 4 without a message", {"code": 4, "signal": None}),
        ("kill", "SpawnExited", "rank 1 was ended by SIGKILL", {"code": -9, "signal": "SIGKILL"}),
        ("crash", "SpawnExited", "in string_at", {"code": -11, "signal": "SIGSEGV"}),
        ("value", "SpawnRaised", "what rank 1 returned cannot be handed to the parent", {}),
    ],
)
def test_the_culprit_is_named(how: str, kind: str, words: str, more: dict[str, Any]) -> None:
    """Rank 1 is to blame, with torch's types and attributes; the exception survives pickling and a second join."""
    said = failures()[how]
    assert words in said["text"]
    expected = {"kind": kind, "slug": "spawn-failed", "ranks": [1], "index": 1, "pid": True, "same": True, **more}
    expected |= {"alike": True, "twice": True}
    assert {name: said[name] for name in expected} == expected
    assert said["seconds"] < 20


def test_rank_exits_too_early() -> None:
    """The rank that left is to blame, not those that waited for it."""
    said = failures()["early"]
    assert said["ranks"] == [1]
    assert "rank 1 ended well, but before the others were done" in said["text"]


def test_rank_without_result() -> None:
    """A process that ends by os._exit(0) has returned nothing, which is not None."""
    said = failures()["nothing"]
    assert (said["slug"], said["ranks"]) == ("invalid-argument", [1])
    assert "there is no result of rank 1" in said["text"]


def test_ranks_that_ignore_sigterm() -> None:
    """SIGTERM first, SIGKILL after the grace; the rank that raised is still the one to blame."""
    said = failures()["deaf"]
    assert said["ranks"] == [0]
    assert "ranks 1 and 2 only followed: ended by allhands (SIGTERM)" in said["text"]


SLEEPERS = """
import json, os, subprocess, sys, threading, time
import allhands

def sleep(rank, how):
    below = subprocess.Popen(["sleep", "1000"]).pid
    if how != "spawn":
        forked = os.fork()
        if forked == 0:
            time.sleep(1000)
    # One write, which the other rank's does not get into.
    sys.stdout.write(json.dumps({"pids": [os.getpid(), below, *([forked] if how != "spawn" else [])]}) + "\\n")
    sys.stdout.flush()
    open(f"said{rank}", "w").close()
    if how == "killed" and rank == 0:
        while not os.path.exists("said1"):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    if how not in ("leaves", "killed"):
        time.sleep(1000)

def main(how):
    method = how if how in ("fork", "forkserver") else "spawn"
    if how == "thread":
        made = []
        thread = threading.Thread(target=lambda: made.append(allhands.spawn(sleep, (how,), 2, join=False)))
        thread.start()
        thread.join()
        time.sleep(0.3)
        print(json.dumps({"alive": made[0].join(0)}), flush=True)
        while not made[0].join():
            pass
    elif how == "unjoined":
        children = allhands.spawn(sleep, (how,), 2, join=False)
        time.sleep(1000)
    else:
        allhands.spawn(sleep, (how,), 2, start_method=method)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver", "unjoined"])
@pytest.mark.parametrize("group", [True, False], ids=["terminal", "parent"])
def test_ctrl_c(how: str, *, group: bool) -> None:
    """Ctrl-C, to all or to the parent alone, ends the parent, the ranks and the processes that they started."""
    with program(SLEEPERS, how) as running:
        pids = [pid for pids in running.wait_for("pids", 2) for pid in pids]
        (os.killpg if group else os.kill)(running.process.pid, signal.SIGINT)
        assert running.end() in {-signal.SIGINT, 128 + signal.SIGINT}
        assert gone(pids)
        assert "KeyboardInterrupt" in running.err


@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver", "thread"])
def test_killed_parent(how: str) -> None:
    """Kill -9 of the parent ends every rank, with each start method; the end of the starting thread does not."""
    with program(SLEEPERS, how) as running:
        ranks = [pids[0] for pids in running.wait_for("pids", 2)]
        others = [pid for pids in running.wait_for("pids", 2) for pid in pids[1:]]
        if how == "thread":
            assert running.wait_for("alive") == [False]
        assert all(map(leaks.alive, ranks))
        running.process.kill()
        assert gone(ranks)
        for pid in others:
            leaks.end(pid)


@pytest.mark.parametrize(("how", "code"), [("leaves", 0), ("killed", 1)])
def test_leftover_processes(how: str, code: int) -> None:
    """Processes that a rank started or forked do not outlive spawn, though the rank is gone."""
    with program(SLEEPERS, how) as running:
        pids = [pid for pids in running.wait_for("pids", 2) for pid in pids]
        assert running.end() == code, running.err
        assert gone(pids, 5)
        assert "left behind: pid" in running.err


def test_fork_of_a_rank() -> None:
    """start_method="fork" in a process that has a group, or that serves another spawn, is an error with its fix."""
    source = """
    import json, time
    import allhands
    def nothing(rank):
        time.sleep(0.2)
    def main():
        children = allhands.spawn(nothing, nprocs=1, join=False)
        for _ in range(2):
            try:
                allhands.spawn(nothing, nprocs=1, start_method="fork")
            except allhands.ArgumentError as problem:
                print(json.dumps({"said": str(problem)}))
            while not children.join():
                pass
            if not allhands.is_initialized():
                allhands.init_process_group(rank=0, world_size=1)
        allhands.destroy_process_group()
        assert allhands.spawn(nothing, nprocs=1, start_method="fork") is None
    if __name__ == "__main__":
        main()
    """
    source = source.replace(
        "allhands.init_process_group(rank=0", "allhands.is_initialized() or allhands.init_process_group(rank=0"
    )
    first, second = [said["said"] for said in finish(source)]
    assert "while this process serves the ranks of another spawn" in first
    assert "in a process that has a process group" in second


def test_ranks_not_joined() -> None:
    """A program that exits without join waits for its ranks, and names those that failed."""
    source = """
    import allhands
    def fail(rank):
        if rank == 1:
            raise ValueError("nobody looks")
    if __name__ == "__main__":
        allhands.spawn(fail, nprocs=2, join=False)
    """
    begun = time.monotonic()
    with program(source) as running:
        assert running.end() == 0
        assert "rank 1 raised ValueError: nobody looks" in running.err
    assert time.monotonic() - begun < 60


def test_script_that_cannot_be_imported() -> None:
    """A rank that fails before the function is called is reported as such, with a fix."""
    source = """
    import sys
    import allhands
    if __name__ != "__main__":
        raise ImportError("not twice")
    def train(rank):
        pass
    if __name__ == "__main__":
        allhands.spawn(train, nprocs=1)
    """
    with program(source) as running:
        assert running.end() == 1
        assert "it ended before the function was called" in running.err
        assert "not twice" in running.err
