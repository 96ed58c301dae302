"""The bench of collectives, small: real ranks, real peers, and ranks that die or hang while they are measured."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import leaks
from allhands.bench.config import CollectiveConfig
from allhands.bench.processes import RankProcesses
from allhands.errors import AllhandsError
from ranks.harness import environment, launch

# A run of seconds; torch is imported by each rank, which takes long on a machine that others use.
DEADLINE_S = 120.0

# Long enough to be disturbed in the middle.
LONG = CollectiveConfig("all_reduce", 2, (4, 1024), 500)


def no_mpi() -> str:
    """Return why MPI cannot be measured here, or ""."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (make mpi)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (make mpi)"
    return ""


needs_mpi = pytest.mark.skipif(bool(no_mpi()), reason=no_mpi())
both_ways = pytest.mark.parametrize(
    "peers", [(), pytest.param(("mpi",), marks=[needs_mpi, pytest.mark.soak])], ids=["plain", "mpirun"]
)


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `allhands bench` as a user does, with ``folder`` for its temporary files."""
    return subprocess.run(
        [sys.executable, "-m", "allhands", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=environment({"TMPDIR": str(folder)}),
    )


def check(rows: list[dict[str, Any]], sizes: list[int], engines: set[str]) -> None:
    """Assert that ``rows`` hold positive figures of each size and engine."""
    assert [row["bytes"] for row in rows] == sizes
    for row in rows:
        assert set(row["engines"]) == engines
        for values in row["engines"].values():
            assert 0 < values["least_s"] <= values["median_s"]
            assert values["bus_bytes_per_s"] > 0
            assert values["ratio"] > 0
            assert values["version"]


def test_a_small_bench(tmp_path: Path) -> None:
    """Rows for programs hold each engine and the floor, nothing else is printed, and nothing stays."""
    done = bench(
        *("all_reduce", "--ranks", "2", "--sizes", "4,1K", "--rounds", "2"),
        *("--against", "gloo", "--floor", "--json"),
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    check(rows, [4, 1024], {"allhands", "gloo"})
    for row in rows:
        assert row["floor"]["memcpy_bytes_per_s"] > 0
        assert row["floor"]["stream_bytes_per_s"] > 0
        assert row["floor"]["moved_bytes"] == 5 * row["bytes"]
        assert 0 < row["floor"]["floor_s"] < row["engines"]["allhands"]["median_s"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@needs_mpi
def test_a_small_bench_against_mpi(tmp_path: Path) -> None:
    """MPI, Gloo and allhands are measured in the same ranks; the third rank of a ping-pong is idle."""
    done = bench(
        *("send_recv", "--ranks", "3", "--sizes", "4,1K", "--rounds", "2", "--against", "gloo,mpi", "--json"),
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    check(rows, [4, 1024], {"allhands", "gloo", "mpi"})
    assert "mpi4py" in rows[0]["engines"]["mpi"]["version"]
    assert list(tmp_path.iterdir()) == []


@needs_mpi
@pytest.mark.soak
@pytest.mark.parametrize("against", ["mpi", "none"])
def test_a_small_bench_of_the_engine_mpi(tmp_path: Path, against: str) -> None:
    """Our engine over MPI is measured beside mpi4py itself, and alone without mpirun."""
    done = bench(
        *("all_reduce", "--engine", "mpi", "--sizes", "4,64K", "--rounds", "2", "--against", against, "--json"),
        folder=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    check(rows, [4, 65536], {"allhands", *({"mpi"} if against == "mpi" else ())})
    assert "(engine mpi)" in rows[0]["engines"]["allhands"]["version"]
    assert list(tmp_path.iterdir()) == []


CHECKED = """
    import allhands
    from allhands.bench.collective_rank import Buffers, Engines
    from allhands.bench.config import CollectiveConfig
    from allhands.bench.operations import OPERATIONS

    for operation, what in OPERATIONS.items():
        count = what.size(1000, size)
        engines = Engines(CollectiveConfig(operation, size, (count,), 1, ("gloo",)), rank)
        buffers = Buffers(operation, count, rank, size)
        for name, call in engines.calls(buffers, count).items():
            buffers.fill()
            before = buffers.right()
            allhands.barrier()
            call(1)
            say(operation=operation, engine=name, before=before, after=buffers.right())
            allhands.barrier()
            buffers.clear()
        allhands.destroy_process_group()
"""


@pytest.mark.usefixtures("fork_server")
def test_each_call_does_what_it_is_named_for() -> None:
    """Each operation, by ours and by Gloo, gives every rank what the others gave; before it, some rank lacks it."""
    results = launch(CHECKED, 3)
    assert [result.returncode for result in results] == [0, 0, 0], results[0].stderr
    lines = [result.lines for result in results]
    assert len(lines[0]) == 26
    for told in zip(*lines, strict=True):
        assert all(line["after"] for line in told), told
        assert told[0]["operation"] == "barrier" or not all(line["before"] for line in told), told


def gone(pids: list[int]) -> bool:
    """Tell whether all of ``pids`` end within a few seconds."""
    deadline = time.monotonic() + 10
    while any(leaks.alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def disturbed(peers: tuple[str, ...], number: signal.Signals, silence_s: float) -> tuple[AllhandsError, list[int]]:
    """Send a signal to rank 1 after the first round; return the error that followed, and the pids of the ranks."""
    plan = CollectiveConfig(LONG.operation, LONG.ranks, LONG.sizes, LONG.rounds, peers)
    pids: list[int] = []
    try:
        with RankProcesses(plan) as processes:
            for message in processes.messages():
                if "round" in message and not pids:
                    pids = list(processes.pids.values())
                    os.kill(processes.pids[1], number)
                    processes._silence_s = silence_s
    except AllhandsError as problem:
        return problem, pids
    raise AssertionError("the bench came to its end")


@both_ways
def test_a_rank_that_dies_is_reported(peers: tuple[str, ...]) -> None:
    """A killed rank ends the bench with who it was and what the ranks printed; the others are ended too."""
    problem, pids = disturbed(peers, signal.SIGKILL, DEADLINE_S)
    assert problem.slug == "engine-failed"
    # Whoever notices first is told first: the killed rank's connection, or the other rank's error about it.
    assert "rank 1" in str(problem)
    assert ("mpirun" if peers else "SIGKILL") in str(problem)
    assert gone(pids)


@pytest.mark.soak
@both_ways
def test_ranks_that_hang_are_reported(peers: tuple[str, ...]) -> None:
    """Ranks that say nothing for too long are ended, and the error says so."""
    problem, pids = disturbed(peers, signal.SIGSTOP, 2.0)
    assert problem.slug == "engine-failed"
    assert "nothing was heard for 2 s" in str(problem)
    assert gone(pids)


def test_a_rank_that_raises_is_reported() -> None:
    """An exception of a rank is the reason that is given, with its traceback."""
    with pytest.raises(AllhandsError) as caught, RankProcesses(CollectiveConfig("nonsense", 2, (4,), 1)) as processes:
        list(processes.messages())
    assert caught.value.slug == "engine-failed"
    assert "KeyError: 'nonsense'" in str(caught.value)
    assert "Traceback" in str(caught.value)


@both_ways
def test_ranks_end_with_the_command(tmp_path: Path, peers: tuple[str, ...]) -> None:
    """A command that is killed takes its ranks, their coordinator, mpirun and its files with it."""
    against = ",".join(peers) or "none"
    command = subprocess.Popen(
        [sys.executable, "-m", "allhands", "bench", "all_reduce", "--rounds", "100000", "--against", against],
        env=environment({"TMPDIR": str(tmp_path)}),
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        started: list[psutil.Process] = []
        # Ranks, and the coordinator that one of them starts once torch is imported.
        while len(started) < 3 + len(peers):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            started = psutil.Process(command.pid).children(recursive=True)
        time.sleep(1.0)
        pids = [process.pid for process in psutil.Process(command.pid).children(recursive=True)]
    finally:
        command.kill()
        command.wait()
    assert gone(pids)
    # With mpirun, in /dev/shm: whether anything of ours stays there is looked at after every test.
    assert list(tmp_path.iterdir()) == []
