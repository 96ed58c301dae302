"""Ranks under a real mpirun, of Open MPI or of MPICH, with the interface of `harness`.

The file is also the program that mpirun starts once for each rank: it lets the rank run as its child, with an output of
its own, and writes down how that ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

if __name__ != "__main__":
    from ranks import harness

__all__ = ["FAMILIES", "MEANT", "require", "start"]

FAMILIES = ("openmpi", "mpich")

# Open MPI needs these to run as root and with fewer cores than ranks.
MEANT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

# A killed rank must not take the others with it before they have spoken.
SPARING = {"openmpi": ["--enable-recovery"], "mpich": ["-disable-auto-cleanup"]}

# How long a rank may take until mpirun has started it on a busy machine.
START_S = 30.0


def require(family: str) -> None:
    """Skip the test where MPI of ``family`` or mpi4py is not here."""
    if shutil.which(f"mpirun.{family}") is None:
        package = {"openmpi": "openmpi-bin", "mpich": "mpich"}[family]
        pytest.skip(f"mpirun.{family} is not installed (apt-get install {package})")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (make mpi)")


class _Told:
    """The exit status of a rank, as recorded by its parent, with the interface of Popen."""

    def __init__(self, path: Path, mpirun: subprocess.Popen[bytes]) -> None:
        self._path = path
        self._mpirun = mpirun

    def poll(self) -> int | None:
        """Return the status, once there is one and mpirun has ended: it sees to the other ranks first."""
        if self._mpirun.poll() is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            return int(self._path.read_text())
        return -9


def start(
    family: str, source: str, world_size: int, env: Mapping[str, str] | None = None, *, timeout: float = 90.0
) -> harness.Job:
    """Start ``source`` under mpirun of ``family``, once for each rank."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    (folder / "gates").mkdir()
    script = folder / "script.py"
    script.write_text(harness.PRELUDE + textwrap.dedent(source).lstrip("\n"))
    job = harness.Job(folder, time.monotonic() + timeout)
    # Ranks meet by the process that started them, which is another one for each here; a job's name does instead.
    given = {"ALLHANDS_JOB": folder.name, **(env or {}), "RANKS": str(world_size)}
    given |= {"GATES": str(folder / "gates"), "TMPDIR": str(folder)}
    with (folder / "mpirun").open("wb") as printed:
        process = subprocess.Popen(
            [f"mpirun.{family}", *SPARING[family], "-n", str(world_size), sys.executable, __file__, str(script)],
            env={**harness.environment(given), **MEANT},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    for number in range(world_size):
        pid = folder / f"{number}.pid"
        while not pid.exists():
            assert time.monotonic() < deadline, (folder / "mpirun").read_text()
            assert process.poll() is None, (folder / "mpirun").read_text()
            time.sleep(0.01)
        told: Any = _Told(folder / f"{number}.code", process)
        out, err = folder / f"{number}.out", folder / f"{number}.err"
        job.ranks.append(harness.Rank(number, int(pid.read_text()), out, err, time.monotonic(), popen=told))
    return job


def _main() -> int:
    """Be the parent of one rank."""
    script = Path(sys.argv[1])
    number = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    os.environ["RANKNO"] = number
    # Written before the fork, because readers that find the rank's pid read them.
    printed = {
        descriptor: os.open(script.with_name(f"{number}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, name in ((1, "out"), (2, "err"))
    }
    pid = os.fork()
    if not pid:
        for descriptor, opened in printed.items():
            os.dup2(opened, descriptor)
        os.execv(sys.executable, [sys.executable, str(script)])  # noqa: S606  # the rank, in this process
    # mpiexec of MPICH 5 with -disable-auto-cleanup sends this signal when another rank ends, and the rank ignores it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    new = script.with_name(f"{number}.new")
    new.write_text(str(pid))
    new.rename(script.with_name(f"{number}.pid"))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    script.with_name(f"{number}.code").write_text(str(code))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
