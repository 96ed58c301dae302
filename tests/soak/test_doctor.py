"""`allhands doctor` 200 times without a fault on a machine under load: not one false alarm."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts.conftest import Making, cables
from hosts.machine import Machine, finish, typed
from ranks import harness
from ranks.runner import running

pytestmark = pytest.mark.soak

# How often it is run, of the machine and into a job that moves; and how many processes take the cores away meanwhile.
RUNS, LOAD = 100, 4

__all__ = ["cables"]


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Keep every core busy several times over."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"]) for _ in range(LOAD)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def look(*words: str) -> tuple[float, dict[str, Any]]:
    """Return how long it took, and the report."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "allhands", "doctor", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=harness.environment({}),
    )
    assert done.returncode in {0, 1}, done.stderr
    return time.monotonic() - began, json.loads(done.stdout)


def alarms(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings that are not green. A stalled job of another user on this machine is no false alarm."""
    others = not report["target"] and len(report["findings"]) > 1
    found = [each for each in report["findings"] if each["level"] != "green"]
    return [each for each in found if not (others and each["section"] == "job")]


def test_no_false_alarm_under_load() -> None:
    """On this machine, which has no fault, everything is green every time, and so is a job that moves."""
    source = """
    import os
    import torch
    import allhands as dist
    dist.init_process_group("allhands", timeout=300)
    print("ready", flush=True)
    while True:
        dist.all_reduce(torch.ones(1000))
        over = torch.tensor([int(os.path.exists("over"))])
        dist.broadcast(over, src=0)
        if over:
            break
    """
    times = []
    with running(source, ranks=2) as job, load():
        job.wait_for("ready", 2)
        for _ in range(RUNS):
            seconds, report = look()
            times.append(seconds)
            assert alarms(report) == []
            _, report = look("--pid", str(job.process.pid))
            assert alarms(report) == []
            sys.stdout.write(".")
            sys.stdout.flush()
        (job.folder / "over").touch()
        assert job.result().code == 0
    times.sort()
    sys.stdout.write(f"\ndoctor under load: median {times[len(times) // 2]:.2f} s, longest {times[-1]:.2f} s\n")


@pytest.mark.hosts
def test_no_false_alarm_between_machines_under_load(cables: Making, tmp_path: Path) -> None:  # the fixture
    """Two compatible machines are green in both directions, every time."""
    a, b = cables().hosts
    for host in (a, b):
        host.hosts_file.write_text(f"127.0.0.1 localhost\n{a.ipv4} {a.name}\n{b.ipv4} {b.name}\n")
    listener = Machine(a, a.name, tmp_path).type(f"exec {sys.executable} -m allhands doctor --listen")
    with load(), typed(listener):
        listener.wait_for("listening on")
        visitor = Machine(b, b.name, tmp_path)
        for _ in range(20):
            (said,) = finish([visitor.type(f"exec {sys.executable} -m allhands doctor {a.ipv4}:29500 --json")])
            assert alarms(json.loads(said)) == []
