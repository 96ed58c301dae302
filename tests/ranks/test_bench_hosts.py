"""`allhands bench` on several hosts: real ranks in network namespaces of their own, which leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "allhands", "bench", "all_reduce"]
SMALL = ["--hosts", "2", "--ranks", "3", "--sizes", "4,256K", "--rounds", "1", "--json"]


def test_ranks_on_two_hosts_are_measured() -> None:
    """Three ranks on two hosts give right results by both engines, and a time for each size."""
    done = subprocess.run([*COMMAND, *SMALL], capture_output=True, text=True, check=False, timeout=120)
    if "[namespaces-refused]" in done.stderr:
        pytest.skip("network namespaces cannot be made here")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["hosts"], row["ranks"], row["bytes"]) for row in rows] == [(2, 3, 4), (2, 3, 256 << 10)]
    for row in rows:
        assert all(engine["median_s"] > 0 for engine in row["engines"].values())
        assert "shared memory on each host" in row["engines"]["allhands"]["version"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give its rights up")
def test_namespaces_refused_is_reported(tmp_path: Path) -> None:
    """Without the right to make namespaces nothing is started, and the message names the missing right."""
    script = tmp_path / "bench.py"
    # Bit 21 is CAP_SYS_ADMIN: taken from the bounding set and, by the exec, from the process.
    script.write_text(
        "import ctypes, os, sys\n"
        "assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0\n"
        "os.execv(sys.executable, sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), *COMMAND, *SMALL], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "[namespaces-refused]" in done.stderr
    assert "Operation not permitted" in done.stderr


@pytest.mark.parametrize("wrong", [["--ranks", "2", "--hosts", "3"], ["--hosts", "2", "--floor"]], ids=["few", "floor"])
def test_what_makes_no_sense_on_several_hosts(wrong: list[str]) -> None:
    """More hosts than ranks, or the floor of shared memory, is refused as a mistake before anything is made."""
    done = subprocess.run([*COMMAND, *wrong], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "[invalid-argument]" in done.stderr
