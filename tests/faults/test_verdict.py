"""The ends of a job: the verdict names the culprit and the cause, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import leaks
from ranks.runner import Ran, run, running

# What the ranks that are not to blame do: something long, outside any group.
OTHERS = "\nimport time\ntime.sleep(60)\n"

ONE = "import os, sys, signal\nrank = int(os.environ['RANK'])\n"

GROUP = """
import os, sys, time, torch
import allhands as dist
dist.init_process_group("allhands")
rank = dist.get_rank()
x = torch.ones(4)
dist.all_reduce(x)
"""


def blame(ran: Ran, cause: str, culprits: list[int], code: int) -> None:
    """Assert that the report and the printed verdict agree on cause, culprits and exit status."""
    assert (ran.report["cause"], ran.report["culprits"], ran.code) == (cause, culprits, code), ran.err
    assert ran.report["exit_code"] == code
    assert ran.report["what"] in ran.verdict
    assert ran.verdict.rstrip().endswith(f"exit status {code}")


def test_exception() -> None:
    """The rank that raised is to blame, with its traceback once and without frames of allhands; the other was ended."""
    ran = run(ONE + "def work():\n    raise ValueError('boom')\nif rank == 1:\n    work()" + OTHERS)
    blame(ran, "exception", [1], 1)
    assert ran.report["what"] == "rank 1 raised ValueError: boom"
    assert ran.verdict.count("ValueError: boom\n") == 2  # headline and traceback
    assert "in work" in ran.verdict
    assert "worker.py" not in ran.err
    assert "after: rank 0: ended by allhands (SIGTERM)" in ran.verdict
    pid = ran.report["ranks"][1]["pid"]
    assert f"pid {pid}), exit status 1" in ran.verdict


def test_exception_in_a_group() -> None:
    """The pending collectives of the others raise PeerFailed, and these ranks are not the culprits."""
    ran = run(GROUP + "if rank == 1:\n    raise KeyError('x')\ndist.all_reduce(x)\ntime.sleep(60)", ranks=3)
    blame(ran, "exception", [1], 1)
    assert "after: ranks 0 and 2: raised PeerFailed" in ran.verdict
    assert "[1] all_reduce SUM of float32[4] at train.py:6: done" in ran.verdict
    assert "[0,2] all_reduce SUM of float32[4] at train.py:9: " in ran.verdict


def test_exception_with_init() -> None:
    """An exception in the script fails a group that --init formed, also on the other ranks."""
    source = """
    import time, torch, torch.distributed as dist
    if dist.get_rank() == 1:
        raise KeyError("x")
    dist.all_reduce(torch.ones(1))
    time.sleep(60)
    """
    ran = run(source, "--init")
    blame(ran, "exception", [1], 1)
    assert ran.report["ranks"][0]["follows"], ran.err


def test_a_rank_killed_in_a_group() -> None:
    """A killed rank is blamed with its signal, although the exceptions of the others are earlier."""
    ran = run(GROUP + "if rank == 0:\n    os.kill(os.getpid(), 9)\ndist.all_reduce(x)\ntime.sleep(60)", ranks=3)
    blame(ran, "signal", [0], 137)
    assert "after: ranks 1 and 2: raised PeerLost" in ran.verdict


def test_rank_exits_too_early() -> None:
    """A rank that ends well while the others still need it is to blame, and the job fails."""
    ran = run(GROUP + "if rank == 1:\n    sys.exit()\nfor _ in range(3):\n    dist.all_reduce(x)\ntime.sleep(60)")
    assert (ran.report["culprits"], ran.code) == ([1], 1), ran.err
    assert "rank 1 ended well, but before the others were done" in ran.verdict


def test_mismatch() -> None:
    """Different calls are a diagnosis that every rank raises; the odd one is to blame."""
    ran = run(GROUP + "dist.all_reduce(torch.ones(3 if rank == 2 else 4))", ranks=3)
    assert ran.report["culprits"] == [2], ran.err
    assert ran.code == 1
    assert "[collective-mismatch]" in ran.verdict


@pytest.mark.soak
def test_missing_rank() -> None:
    """A rank that does not join the roll call is to blame, not the ranks that waited for it."""
    source = """
    import os, time
    if os.environ["RANK"] == "1":
        time.sleep(60)
    import allhands
    allhands.init_process_group("gloo", timeout=3)
    """
    ran = run(source, ranks=3)
    assert (ran.report["culprits"], ran.code) == ([1], 1), ran.err
    assert {rank["diagnosis"] for rank in ran.report["ranks"]} == {"missing-ranks", ""}


def test_gloo_group_of_torch() -> None:
    """Where torch's own Gloo group breaks, its 'connection closed' only follows the rank that died."""
    source = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))
    """
    ran = run(source)
    blame(ran, "signal", [1], 137)
    assert ran.report["ranks"][0]["follows"]


def test_sys_exit() -> None:
    """sys.exit(3) is named with its line."""
    ran = run(ONE + "if rank == 1:\n    sys.exit(3)" + OTHERS)
    blame(ran, "exit", [1], 3)
    assert ran.report["what"] == "rank 1 called sys.exit(3)"
    assert "train.py:4" in ran.report["why"]


def test_os_exit() -> None:
    """os._exit(4) leaves no exit record, and the verdict states it."""
    ran = run(ONE + "if rank == 1:\n    os._exit(4)" + OTHERS)
    blame(ran, "exit", [1], 4)
    assert "os._exit" in ran.report["why"]


def test_segmentation_fault() -> None:
    """A crash in native code is shown with the Python stack that led there."""
    ran = run(ONE + "import ctypes\ndef crash():\n    ctypes.string_at(0)\nif rank == 1:\n    crash()" + OTHERS)
    blame(ran, "signal", [1], 139)
    assert ran.report["what"] == "rank 1 crashed with SIGSEGV"
    assert "in crash" in ran.verdict


def test_killed_from_outside() -> None:
    """SIGKILL of another process is distinguished from the launcher's own."""
    ran = run(ONE + "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)" + OTHERS)
    blame(ran, "signal", [1], 137)
    assert "not allhands" in ran.report["why"]


def test_memory_refused() -> None:
    """A limit on address space is a MemoryError with its reason."""
    source = (
        "import resource\nif rank == 1:\n    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n    bytes(2**32)"
    )
    ran = run(ONE + source + OTHERS)
    blame(ran, "exception", [1], 1)
    assert "memory" in ran.report["why"]


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Make a control group that may use 150 MiB."""
    for base, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = base / f"allhands-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / name).write_text(str(150 << 20))
            except OSError:
                group.rmdir()
                continue
            with contextlib.suppress(OSError):
                (group / "memory.memsw.limit_in_bytes").write_text(str(150 << 20))
            break
    else:
        pytest.skip("no control group for memory can be made here")
    yield group
    deadline = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def test_out_of_memory(memory_group: Path) -> None:
    """The out-of-memory killer is named, with the kernel's evidence."""
    source = (
        ONE + "if rank == 1:\n    held = []\n    while True:\n        held.append(bytearray(b'x') * (8 << 20))" + OTHERS
    )
    enter = f'echo $$ > {memory_group}/cgroup.procs && exec "$@"'
    ran = run(source, before=("sh", "-c", enter, "sh"))
    blame(ran, "oom", [1], 137)
    assert ran.report["what"] == "rank 1 was killed because memory ran out"


def test_syntax_error() -> None:
    """A script that cannot be compiled is shown as Python shows it, once for all ranks."""
    ran = run("def broken(:\n    pass\n", ranks=3)
    blame(ran, "exception", [0, 1, 2], 1)
    assert "ranks 0-2 raised SyntaxError" in ran.verdict
    assert ran.verdict.count("def broken(:") == 1
    assert "Traceback" not in ran.err
    assert "worker.py" not in ran.err


def test_two_culprits() -> None:
    """Two ranks that fail by themselves are both to blame; equal tracebacks are shown once."""
    ran = run(ONE + "if rank in (1, 2):\n    raise ValueError('both')" + OTHERS, ranks=3)
    blame(ran, "exception", [1, 2], 1)
    assert "ranks 1 and 2 raised ValueError: both" in ran.verdict
    assert ran.verdict.count("Traceback") == 1


def test_two_different_culprits() -> None:
    """Two ranks that fail differently are both named with their errors, and both tracebacks are printed."""
    ran = run(
        ONE + "if rank == 1:\n    raise ValueError('one')\nif rank == 2:\n    raise KeyError('two')" + OTHERS, ranks=3
    )
    assert sorted(ran.report["culprits"]) == [1, 2]
    assert ran.verdict.count("Traceback") == 2


def test_exception_in_a_child() -> None:
    """An exception that a pool returned is attributed to the child process."""
    source = """
    import multiprocessing
    def bad(_):
        raise ValueError("in the child")
    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(bad, [1])
    """
    ran = run(source, ranks=1)
    blame(ran, "exception", [0], 1)
    assert "a process that this rank had started" in ran.report["why"]


def test_stall() -> None:
    """--hang-timeout ends a job in which one rank does not reach a collective, and prints its stack."""
    source = GROUP + "def elsewhere():\n    time.sleep(100)\nif rank == 1:\n    elsewhere()\ndist.all_reduce(x)"
    ran = run(source, "--hang-timeout", "2", ranks=3)
    blame(ran, "hang", [1], 124)
    assert "the others wait for rank 1" in ran.verdict
    assert "in elsewhere" in ran.verdict
    assert "in elsewhere" in ran.report["stacks"]["1"]


def test_stopped_rank() -> None:
    """A stopped rank is behind, has no stack, and is killed with the others."""
    source = GROUP + "if rank == 1:\n    os.kill(os.getpid(), 19)\ndist.all_reduce(x)"
    ran = run(source, "--hang-timeout", "2", "--grace", "1")
    blame(ran, "hang", [1], 124)
    assert "rank 1 is stopped" in ran.report["why"]


# Nothing stays ---------------------------------------------------------------------------------------------------

CHILDREN = """
import os, subprocess, sys, time
print("worker", os.getpid())
stay = '''
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("stay", os.getpid(), flush=True)
time.sleep(100)
'''
subprocess.Popen([sys.executable, "-c", stay])
subprocess.Popen([sys.executable, "-c", stay], start_new_session=True)
"""


def pids(screen: str) -> list[int]:
    """Return the processes that a job reported."""
    return [int(line.split()[-1]) for line in screen.splitlines() if " worker " in line or " stay " in line]


def gone(numbers: list[int], within_s: float = 10.0) -> bool:
    """Wait until none of the processes runs."""
    deadline = time.monotonic() + within_s
    while any(map(leaks.alive, numbers)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_leftover_processes() -> None:
    """Processes that a rank of a successful job leaves, in sessions of their own too, are ended and named."""
    ran = run(CHILDREN + "time.sleep(1)", "--grace", "1")
    assert ran.code == 0, ran.err
    assert len(ran.report["left_behind"]) == 4
    assert "ended what the ranks had left behind" in ran.err
    assert gone(pids(ran.out), 0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signals_end_everything(number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and SIGHUP end workers and grandchildren; the exit status is that of the signal."""
    with running(CHILDREN + "time.sleep(100)", "--grace", "1") as job:
        found = pids(job.wait_for(" stay ", 4))
        job.send(number)
        ran = job.result()
    assert len(found) == 6
    assert gone(found, 0.0)
    blame(ran, "stopped", [], 128 + number)


def test_second_ctrl_c() -> None:
    """Workers that ignore the first Ctrl-C are killed at the second, without waiting for --grace."""
    source = (
        "import signal, time\nsignal.signal(signal.SIGINT, lambda *_: print('deaf'))\nprint('ready')\ntime.sleep(100)"
    )
    with running(source, "--grace", "60") as job:
        job.wait_for("ready", 2)
        job.send(signal.SIGINT)
        job.wait_for("deaf", 2)
        job.send(signal.SIGINT)
        ran = job.result()
    assert ran.code == 130
    assert ran.seconds < 30


def test_killed_agent() -> None:
    """Kill -9 of the agent ends its workers, and what they started."""
    with running(CHILDREN + "time.sleep(100)") as job:
        found = pids(job.wait_for(" stay ", 4))
        job.send(signal.SIGKILL)
        assert job.process.wait(10) == -signal.SIGKILL
        assert len(found) == 6
        assert gone(found)


def test_broken_output() -> None:
    """Where the reader of the output is gone (`| head -1`), the job ends."""
    source = "import time\nfor n in range(10000):\n    print(n)\n    time.sleep(0.01)"
    ran = run(source, "--grace", "2", ranks=1, before=("sh", "-c", '"$@" | head -1; echo over', "sh"))
    assert ran.out == "[0] 0\nover\n"
    assert ran.seconds < 60


def test_missing_script() -> None:
    """A missing script is reported once, before anything is started."""
    ran = run("", script=False, arguments=("tain.py",))
    assert ran.code == 2
    assert "there is no script 'tain.py'. Did you mean 'train.py'?" in ran.err
