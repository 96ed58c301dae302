"""Reading plain command lines without click, and what is imported before the workers run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allhands.launch import options
from allhands.launch.command import command
from allhands.launch.job import Job


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Return a script."""
    path = tmp_path / "train.py"
    path.write_text("pass")
    return str(path)


def by_click(line: list[str]) -> Job:
    """Return what click makes of ``line``."""
    made: list[Job] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("allhands.launch.agent.main", lambda job: made.append(job) or 0)
        command.main(line, standalone_mode=False)
    return made[0]


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["-n", "3"],
        ["--nproc_per_node=2", "--max-restarts", "4", "--fold", "--no-prefix"],
        ["--nproc-per-node", "2", "-r", "1:1", "--tee=3", "--log-dir", "logs"],
        ["--nnodes=2", "--node-rank", "1", "--coordinator", "[::1]:4000", "--timeout", "2.5"],
        ["--standalone", "--master-port", "4000", "--role", "trainer", "--hang-timeout=7", "--grace", "0"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint", "a:1", "--report", "r.json", "--init"],
    ],
)
def test_plain_lines_mean_what_click_says(line: list[str], script: str) -> None:
    """The short reader and click make the same job, with what is the script's left to it."""
    whole = ["--rdzv-id", "x", *line, script, "--lr", "1", "-n", "9"]
    found = options.plain(whole, {})
    assert found is not None
    assert options.make(*found) == by_click(whole)


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["-n"],
        ["--help", "x.py"],
        ["-h"],
        ["-n2", "x.py"],
        ["-n=2", "x.py"],
        ["--fold=1", "x.py"],
        ["--nproc", "2", "x.py"],
        ["--max-restarts", "some", "x.py"],
        ["--", "x.py"],
    ],
)
def test_all_else_is_left_to_click(line: list[str]) -> None:
    """Help, mistakes and rarer spellings are not taken, and neither is anything with a PET_ variable."""
    assert options.plain(line, {}) is None
    assert options.plain(["x.py"], {"PET_NNODES": "1"}) is None


def test_nothing_slow_is_imported_before_the_workers() -> None:
    """What the agent imports first leaves out all that takes long: it would stand before every job."""
    code = "import sys, allhands.__main__, allhands.launch.start; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    slow = {
        "asyncio",
        "click",
        "dataclasses",
        "json",
        "logging",
        "msgspec",
        "pathlib",
        "psutil",
        "rich",
        "ssl",
        "torch",
    }
    assert slow & set(done.stdout.split()) == set()
