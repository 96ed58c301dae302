"""The script behind `make mpi`, where it installs nothing."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "install_mpi.py"


def run(path: str) -> subprocess.CompletedProcess[str]:
    """Run the script with only ``path`` to find programs on."""
    return subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_apt_it_says_so(tmp_path: Path) -> None:
    """A system that has neither mpirun nor apt-get is told to use its own means."""
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert "install Open MPI (or another MPI) by this system's own means" in done.stdout


def test_without_root_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installing packages needs root; without it nothing is tried, and the commands are shown."""
    (tmp_path / "apt-get").write_text("#!/bin/sh\ntouch tried\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert caught.value.code == 1
    said = capsys.readouterr().out
    assert "sudo apt-get update && sudo apt-get install --yes openmpi-bin libopenmpi-dev" in said
    assert "make bench AGAINST=gloo" in said
    assert not (tmp_path / "tried").exists()


def test_where_all_is_there_it_does_nothing() -> None:
    """With mpirun and mpi4py in place it is silent and succeeds."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpirun or mpi4py is not installed (make mpi)")
    done = run(os.environ["PATH"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
