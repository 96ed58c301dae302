"""`allhands.spawn`: the behaviour of torch.multiprocessing.spawn, and a group inside it without address or port."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import allhands
from ranks import harness
from ranks.spawning import finish, program

GROUPS = """
import json, os, sys, time
import torch
import allhands

def gone(rank, name):
    # Rank 0 serves torch's own store, at one port for both groups: an early rank would connect to the old one.
    if rank == 0:
        open(name, "w").close()
    while not os.path.exists(name):
        time.sleep(0.01)

def train(rank, factor, method):
    import torch.distributed as dist
    allhands.init_process_group()
    x = torch.ones(3) * factor * (rank + 1)
    allhands.all_reduce(x)
    backend = allhands.get_backend()
    allhands.destroy_process_group()
    sums = [x]
    for name in ("gloo", "allhands"):
        dist.init_process_group(name)
        y = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(y)
        sums.append(y)
        dist.destroy_process_group()
        gone(rank, f"{method}-{name}")
    assert dist.is_torchelastic_launched() is False
    return backend, sums

def alone(rank):
    allhands.init_process_group()
    x = torch.ones(1)
    allhands.all_reduce(x)
    allhands.destroy_process_group()
    return rank, int(x.item()), os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]

if __name__ == "__main__":
    os.environ["MASTER_PORT"] = "1"  # what a script may have left there
    for method in ("spawn", "fork"):
        found = allhands.spawn(train, args=(2.0, method), nprocs=2, start_method=method, results=True)
        assert found[0][0] == ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "allhands"), found
        print(json.dumps({method: [[each.tolist() for each in sums] for _, sums in found]}))
    for size in (1, 3, 8):
        print(json.dumps({"size": allhands.spawn(alone, nprocs=size, start_method="fork", results=True)}))
    sockets = [line for line in open("/proc/net/unix") if "allhands-" in line]
    inodes = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdecimal()
              and os.path.exists(f"/proc/self/fd/{fd}")]
    ours = [name for name in inodes if "allhands" in name or any(f"[{line.split()[6]}]" in name for line in sockets)]
    print(json.dumps({"left": ours, "memfds": [name for name in inodes if "memfd" in name]}))
"""


def test_groups_form_without_address_or_port() -> None:
    """A bare init works in each start method and for 1 to 8 ranks, torch's own env:// too; nothing is left open."""
    said = finish(GROUPS)
    for method in ("spawn", "fork"):
        (found,) = [each[method] for each in said if method in each]
        assert found == [[[6.0, 6.0, 6.0], [3.0], [3.0]]] * 2
    sizes = [each["size"] for each in said if "size" in each]
    assert sizes == [[[rank, size, str(rank), str(size)] for rank in range(size)] for size in (1, 3, 8)]
    assert said[-1] == {"left": [], "memfds": []}


# Nothing here needs torch, so that a process starts in a tenth of the time.
PLAIN = """
import json, os, sys, time
import multiprocessing
import allhands

class Own:
    def __init__(self, number):
        self.number = number

def value(rank, base):
    if rank == 1:
        sys.exit()
    return Own(base + rank), os.getpid()

def slow(rank):
    while not os.path.exists("go"):
        time.sleep(0.01)
    return multiprocessing.current_process().daemon

def huge(rank):
    return bytes(64 << 20)

if __name__ == "__main__":
    assert allhands.spawn(value, args=(5,), nprocs=1) is None
    children = allhands.spawn(slow, nprocs=2, join=False, daemon=True, results=True)
    assert len(children.pids()) == 2 and children.pids() == [each.pid for each in children.processes]
    assert children.join(timeout=0.05) is False
    open("go", "w").close()
    while not children.join():
        pass
    assert children.join() is True
    assert children.results == [True, True], children.results
    found = allhands.spawn(value, args=[5], nprocs=3, start_method="forkserver", results=True)
    assert found[1] is None and [found[0][0].number, found[2][0].number] == [5, 7], found
    assert os.getpid() not in {found[0][1], found[2][1]}
    assert len(allhands.spawn(huge, nprocs=1, results=True)[0]) == 64 << 20
    assert "torch" not in sys.modules
    print(json.dumps({"done": True}))
"""


def test_return_values() -> None:
    """None, or a context with torch's methods, or the values by rank; classes of the script and large values too."""
    assert finish(PLAIN) == [{"done": True}]


def test_interactive_function() -> None:
    """It runs with fork; with spawn it is refused before anything is started."""
    code = """
    import allhands, os, sys
    def typed(rank):
        return rank + 10
    assert allhands.spawn(typed, nprocs=2, start_method="fork", results=True) == [10, 11]
    before = os.listdir("/proc/self/task/%d" % os.getpid())
    try:
        allhands.spawn(typed, nprocs=2)
    except allhands.ArgumentError as problem:
        print(problem)
    assert not open(f"/proc/self/task/{os.getpid()}/children").read()
    """
    done = subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(code),
        env=harness.environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "typed was typed into a notebook or a prompt" in done.stdout
    assert 'start_method="fork"' in done.stdout


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_script_without_main_guard(method: str) -> None:
    """One clear error in the parent, and not a wall of text from each child."""
    source = f"""
    import allhands
    def train(rank):
        pass
    allhands.spawn(train, nprocs=3, start_method="{method}")
    """
    with program(source) as running:
        assert running.end() == 1
        assert running.err.count("Traceback") == 1
        assert "allhands.ArgumentError: the script calls spawn whenever it is imported" in running.err
        assert 'if __name__ == "__main__":' in running.err


def local() -> object:
    """Return a function that no other process can find."""

    def inner(rank: int) -> int:
        return rank

    return inner


@pytest.mark.parametrize(
    ("what", "given", "words"),
    [
        ("local", {}, "has no name at the top level"),
        ("lambda", {}, "has no name at the top level"),
        ("args", {"args": (1, lambda: 0)}, "args[1], a function, cannot be sent"),
        ("none", {"nprocs": 0}, "nprocs=0"),
        ("half", {"nprocs": 1.5}, "nprocs=1.5"),
        ("method", {"start_method": "thread"}, "start_method='thread'"),
    ],
)
def test_arguments_that_cannot_be_spawned(what: str, given: dict[str, object], words: str) -> None:
    """It is refused with the reason, and no rank is started."""
    functions = {"local": local(), "lambda": lambda rank: rank}
    with pytest.raises(allhands.ArgumentError) as caught:
        allhands.spawn(functions.get(what, harness.parse), **given)
    assert words in str(caught.value)


def test_not_a_function() -> None:
    """It is named."""
    with pytest.raises(allhands.ArgumentError, match="is not a function"):
        allhands.spawn(3)
