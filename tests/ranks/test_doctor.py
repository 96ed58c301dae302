"""`allhands doctor` of a stalled job of four ranks: it names the rank, the line and the collective it misses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from allhands.doctor import Finding, jobs
from allhands.doctor.jobs import examine_job
from allhands.errors import ArgumentError
from allhands.observe import stacks
from ranks import harness
from ranks.runner import running

pytestmark = pytest.mark.usefixtures("fork_server")

# Each stage blocks rank 2 in another way until the test opens its gate; the last one blocks it for ever.
STAGES = """
import os, re, threading, time
from pathlib import Path
import torch
import allhands as dist

torch.set_num_threads(1)
gates = Path(os.environ["GATES"])

def is_open(name):
    return (gates / f"open-{name}").exists()

def later(name, call):
    def wait():
        while not is_open(name):
            time.sleep(0.01)
        call()
    threading.Thread(target=wait, daemon=True).start()

def sleeps():
    while not is_open("sleeps"):
        time.sleep(0.2)

def locked():
    lock = threading.Lock()
    lock.acquire()
    later("locked", lock.release)
    lock.acquire()

def branches():
    dist.recv(torch.zeros(2), src=0)

def loops():
    re.match(r"(a+)+$", "a" * 60 + "b")

FORM
for number, stage in enumerate((sleeps, locked, branches, loops)):
    dist.barrier()
    if rank == 0 and stage is branches:
        later("branches", lambda: dist.send(torch.ones(2), dst=2))
    say(stage=stage.__name__)
    if rank == 2:
        stage()
    dist.all_reduce(torch.ones(number + 3))
"""

# The cause that blocks rank 2, by function: text of the line, and wait channel of the kernel.
HELD = {
    "sleeps": ("time.sleep(0.2)", "sleeping"),
    "locked": ("lock.acquire()", "waiting for a lock"),
    "branches": ("dist.recv(", "recv"),
    "loops": ("re.match(", "computing without a pause"),
}


def until(look: Callable[[], Any], good: Callable[[Any], bool], deadline_s: float = 20.0) -> Any:
    """Look again and again until what is seen is good; return it."""
    end = time.monotonic() + deadline_s
    while not good(seen := look()):
        assert time.monotonic() < end, seen
        time.sleep(0.05)
    return seen


def blamed(found: list[Finding]) -> bool:
    """Tell whether only rank 2 is blamed, and all others wait."""
    return len(found) == 1 and found[0].slug == "rank-behind" and found[0].details["waiting"] == [0, 1, 3]


def line_of(script: str, words: str, at: str) -> bool:
    """Tell whether ``at`` is a line of ``script`` that holds ``words``."""
    number = int(at.partition(" ")[0].rpartition(":")[2])
    return words in script.splitlines()[number - 1]


def check_stages(job: harness.Job, pid: Callable[[], int]) -> None:
    """Go through all stages; at each the doctor must name rank 2, its line and the collective that it misses."""
    script = (job.folder / "script.py").read_text()
    for number, (stage, (words, doing)) in enumerate(HELD.items()):
        until(lambda: [line.get("stage") for line in job.ranks[0].said()][-1:], lambda seen, now=stage: seen == [now])

        def good(found: list[Finding], wanted: tuple[int, str] = (number, doing)) -> bool:
            return (
                blamed(found)
                and found[0].details["misses"] == f"all_reduce SUM of float32[{wanted[0] + 3}]"
                and found[0].details["doing"] == wanted[1]
            )

        (found,) = until(lambda: examine_job(pid(), None), good)
        assert found.details["rank"] == 2
        assert line_of(script, words, found.details["line"]), found
        assert line_of(script, "dist.all_reduce(", found.details["misses_at"])
        assert found.fix
        (job.folder / "gates" / f"open-{stage}").touch()


@pytest.mark.parametrize("backend", ["allhands", pytest.param("gloo", marks=pytest.mark.soak)])
def test_ranks_that_were_started_by_hand(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping rank, a deadlocked lock, another branch, a loop in C: each is named, without a launcher's help."""
    form = f'dist.init_process_group("{backend}", rank=rank, world_size=size, timeout=60)'
    source = STAGES.replace("FORM", form)
    if backend == "gloo":
        # torch's own Gloo orders messages and collectives of one group, and its reductions are not recorded.
        source = source.replace("sleeps, locked, branches, loops", "sleeps, locked, loops")
    with harness.running(source, 4) as job:
        job.wait_for("stage", [0, 1, 2, 3])
        if backend == "allhands":
            # `allhands doctor` without --job refers to it once the job has been stalled for long.
            first = job.ranks[0].pid
            mine = f"job-{first}"
            assert [each.level for each in jobs.list_jobs() if each.check == mine] == ["green"]
            monkeypatch.setattr(jobs, "_STALLED_S", 0.0)
            until(
                lambda: [each.commands for each in jobs.list_jobs() if each.check == mine],
                lambda seen: seen == [(f"allhands doctor --pid {first}",)],
            )
            check_stages(job, lambda: job.ranks[3].pid)
            return
        (found,) = until(lambda: examine_job(job.ranks[3].pid, None), blamed)
        assert found.details["rank"] == 2
        assert found.details["misses"] == "all_reduce of float32[3]"
        assert line_of((job.folder / "script.py").read_text(), "time.sleep(0.2)", found.details["line"])


@pytest.mark.soak
def test_ranks_that_torchrun_started() -> None:
    """The same under torchrun, with torch's own init_process_group and our backend; its pid is as good as a rank's."""
    source = STAGES.replace("FORM", 'import torch.distributed as torch_dist\ntorch_dist.init_process_group("allhands")')
    source = "import os\nrank = int(os.environ['RANK'])\n" + source
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port"]
    with harness.running(source, 1, command=[*words, str(harness.free_port())], timeout=120) as job:
        check_stages(job, lambda: job.ranks[0].pid)
        # torchrun's workers are in sessions of their own: only it can end them.
        job.signal(0, signal.SIGTERM)
        job.results()


@pytest.mark.soak
def test_under_the_launcher() -> None:
    """Under `allhands run`, as people type it: green while it moves, red and exit status 1 once a wait is long."""
    source = """
    import os, time
    import torch
    import allhands as dist
    dist.init_process_group("allhands", timeout=120)
    rank = dist.get_rank()
    # It must end on every rank at the same step, so only what rank 0 has seen counts.
    while True:
        dist.all_reduce(torch.ones(5))
        more = torch.tensor([int(os.path.exists("hold"))])
        dist.broadcast(more, src=0)
        if more:
            break
    if rank == 2:
        while not os.path.exists("go"):
            time.sleep(0.05)
    dist.all_reduce(torch.ones(9))
    """
    with running(source, ranks=4) as job:
        pid = job.process.pid

        def look(*more: str) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-m", "allhands", "doctor", "--pid", str(pid), *more]
            return subprocess.run(words, capture_output=True, text=True, check=False, env=harness.environment({}))

        moving = until(lambda: look("--json"), lambda done: '"moving"' in done.stdout and "at work" in done.stdout, 60)
        assert moving.returncode == 0
        (job.folder / "hold").touch()
        stuck = until(lambda: look("--json"), lambda done: done.returncode == 1, 60)
        (found,) = json.loads(stuck.stdout)["findings"]
        assert (found["slug"], found["level"]) == ("rank-behind", "red")
        assert found["details"]["rank"] == 2
        assert found["details"]["waiting"] == [0, 1, 3]
        assert found["details"]["since_s"] >= 5
        assert found["details"]["misses"] == "all_reduce SUM of float32[9]"
        assert found["details"]["line"].startswith("train.py:")
        os.kill(found["details"]["pid"], signal.SIGSTOP)
        stopped = until(look, lambda done: "[peer-silent]" in done.stdout)
        assert f"kill -CONT {found['details']['pid']}" in stopped.stdout
        # The fix that is shown works.
        os.kill(found["details"]["pid"], signal.SIGCONT)
        (job.folder / "go").touch()
        assert job.result().code == 0


def test_workers_without_a_group() -> None:
    """Under the launcher every worker's line is known, whatever it does: its agent is as good as any of their pids."""
    source = """
    import os, time
    def wait_here():
        while not os.path.exists("go"):
            time.sleep(0.02)
    print("ready", flush=True)
    wait_here()
    """
    with running(source, ranks=2) as job:
        job.wait_for("ready", 2)
        (found,) = until(
            lambda: examine_job(job.process.pid, None),
            lambda seen: "wait_here" in str(seen[0].details.get("places", "")),
        )
        (job.folder / "go").touch()
        assert job.result().code == 0
    assert (found.level, found.check) == ("green", "unknown")
    for rank, place in enumerate(found.details["places"]):
        assert place.startswith(f"rank {rank} (pid ")
        assert "train.py:4 in wait_here: time.sleep(0.02)" in place


def test_ranks_that_wait_in_the_roll_call() -> None:
    """While a group forms, the waiting ranks are named with their line, and the missing ones."""
    source = """
    import allhands as dist
    if rank == 1:
        say(here=1)
        import time
        time.sleep(60)
    dist.init_process_group("allhands", rank=rank, world_size=size, timeout=60)
    """
    with harness.running(source, 2) as job:
        job.wait_for("here", [1])
        (found,) = until(
            lambda: examine_job(job.ranks[0].pid, None), lambda seen: bool(seen) and seen[0].slug == "missing-ranks"
        )
        assert found.details == {"waiting": [0], "missing": [1]}
        assert "script.py:7 in <module>: dist.init_process_group(" in found.why


def test_a_process_that_offers_nothing_is_left_alone() -> None:
    """A process without the handler is not sent the signal, which would end it; it is reported to be no rank."""
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607  # any program
        try:
            assert stacks.request(process.pid, 0.2) == ""
            assert process.poll() is None
            with pytest.raises(ArgumentError, match=f"no job with the process {process.pid}"):
                examine_job(process.pid, None)
        finally:
            process.kill()
    with pytest.raises(ArgumentError, match="there is no process"):
        examine_job(process.pid, None)
    with pytest.raises(ArgumentError, match="no job with the name nobody"):
        examine_job(None, "nobody")


def test_asking_twice_gives_the_stacks_of_now() -> None:
    """Each request returns the current stacks, and the process continues."""
    source = """
    import os, time
    from pathlib import Path
    from allhands.observe import stacks
    stacks.register()
    def first():
        say(at="first")
        while not (Path(os.environ["GATES"]) / "on").exists():
            time.sleep(0.01)
    def second():
        say(second=True)
        while not (Path(os.environ["GATES"]) / "off").exists():
            time.sleep(0.01)
    first()
    second()
    """
    with harness.running(source, 1) as job:
        job.wait_for("at")
        assert "in first\n" in stacks.request(job.ranks[0].pid, 10)
        (job.folder / "gates" / "on").touch()
        job.wait_for("second")
        again = stacks.request(job.ranks[0].pid, 10)
        assert "in second\n" in again
        assert "in first\n" not in again
        (job.folder / "gates" / "off").touch()
        harness.well(job.results())
