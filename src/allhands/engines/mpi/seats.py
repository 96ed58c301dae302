"""Seats in a world of Open MPI for ranks that its mpirun did not start.

Open MPI's ranks find each other through a daemon that only mpirun starts, which tells each rank by variables who it
is. So where something else started the ranks, one of them has mpirun start as many small processes that do nothing, and
each rank takes the variables of one: the daemon knows its ranks by those and not by their pids. The daemon and the
small processes live as long as any rank, because every rank holds the pipe that they read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...settings import SEATS as MARK
from .library import COMMANDS, missing

__all__ = ["Seat", "take"]

# Writes down what it was told, then waits for the end of all ranks. $0 is the folder.
_SITTER = (
    'env -0 >"$0/new.$OMPI_COMM_WORLD_RANK" && mv "$0/new.$OMPI_COMM_WORLD_RANK" "$0/seat.$OMPI_COMM_WORLD_RANK"; '
)
_SITTER += 'exec cat "$0/stay" >/dev/null'

# Runs mpirun until the end of all ranks, and takes its folder away. Not by asking: having lost its ranks, mpirun would
# take a second to see to processes that are gone. Whoever ends what the ranks left (SIGTERM) lets it. $0 is the folder.
_KEEPER = (
    'trap "" TERM; ("$@" >"$0/said" 2>&1 </dev/null & echo $! >"$0/pid"; wait; cp "$0/said" "$0/ended") & '
    'cat "$0/stay" >/dev/null; read it <"$0/pid"; kill -9 "$it"; wait; rm -rf "$0"'
)

# The variables that a rank needs of a seat: all of these families.
_FAMILIES = ("OMPI_", "ORTE_", "PMIX_", "PRTE_")

# Variables that say who this process is in some job: mpirun would start its ranks elsewhere because of them.
_STRANGERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_COMM_", "PBS_", "LSB_", "FLUX_", "PRTE_")

# mpirun takes a third of a second on an idle machine; how often to look whether it is there.
_LOOK_S = 0.01

_MEMORY = Path("/dev/shm")  # noqa: S108  # not for a file of a known name


# Never looked at again; without a name Python would complain that nobody waits for them.
_keepers: list[subprocess.Popen[bytes]] = []


class Seat:
    """What one rank was given: variables for the start of MPI, and the pipe that it holds until its end."""

    def __init__(self, environment: dict[str, str], pipe: Path) -> None:
        self.environment = environment
        # Not only for writing, which would wait for a reader. Closed by the kernel when this process ends.
        self._held = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)


def take(store: Any, rank: int, size: int, deadline: float, check: Callable[[], None]) -> Seat:
    """Take this rank's seat. Every rank calls this; all are on one host. ``check`` raises where the group is over."""
    held = _offer(store, size, deadline, check) if rank == 0 else -1
    try:
        offered = json.loads(store.get(f"seat/{rank}").decode())
        if "why" in offered:
            raise missing(offered["why"], offered["who"], offered["fix"])
        return Seat(offered["environment"], Path(offered["pipe"]))
    finally:
        if held >= 0:
            os.close(held)


def _offer(store: Any, size: int, deadline: float, check: Callable[[], None]) -> int:
    """Have mpirun make the seats and put them into the store; where it cannot, put the reason there.

    Returns a descriptor of the pipe, for until this rank has its own seat.
    """
    # Open MPI keeps memory that ranks share in files here; where they are memory, with the folder they go.
    place = str(_MEMORY) if os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f"allhands-mpi-{os.getpid()}-", dir=place))
    pipe = folder / "stay"
    os.mkfifo(pipe, 0o600)
    held = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = _seats(folder, size, deadline, check)
        for number, environment in enumerate(found):
            store.set(f"seat/{number}", json.dumps({"environment": environment, "pipe": str(pipe)}))
    except _NoSeats as problem:
        shutil.rmtree(folder, ignore_errors=True)
        told = {"why": str(problem), "who": f"rank 0 (pid {os.getpid()})", "fix": problem.fix}
        for number in range(size):
            store.set(f"seat/{number}", json.dumps(told))
    except BaseException:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return held


class _NoSeats(Exception):
    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


def _seats(folder: Path, size: int, deadline: float, check: Callable[[], None]) -> list[dict[str, str]]:
    program = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    if program is None:
        raise _NoSeats(
            "Open MPI's library is here, but not its mpirun, which ranks that something else started need too",
            f"{COMMANDS}; or take MPICH, which needs none: MPI4PY_MPIABI=mpich",
        )
    # No network: the ranks are on this host.
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "oob_tcp_if_include", "lo", "-n", str(size)]
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, str(folder), program, *options, "/bin/sh", "-c", _SITTER, str(folder)],
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the ranks; this one ends after them.
        start_new_session=True,
    )
    _keepers.append(keeper)
    papers = [folder / f"seat.{number}" for number in range(size)]
    while not all(paper.exists() for paper in papers):
        check()
        if (folder / "ended").exists() or keeper.poll() is not None:
            said = _read(folder / "ended")
            raise _NoSeats(
                f"{program} could not start: {said}", f"run `{program} -n {size} hostname` and mend what it says"
            )
        if time.monotonic() > deadline:
            raise _NoSeats(f"{program} did not start within the timeout", f"run `{program} -n {size} hostname`")
        time.sleep(_LOOK_S)
    return [_variables(paper) for paper in papers]


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGERS)}
    # Containers have no other user; what runs is `cat`.
    kept |= {MARK: "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": str(folder)}
    kept.setdefault("OMPI_MCA_btl_tcp_if_include", "lo")
    if folder.is_relative_to(_MEMORY):
        # Open MPI 4 and 5 call it differently.
        for engine in ("vader", "sm"):
            kept.setdefault(f"OMPI_MCA_btl_{engine}_backing_directory", str(folder))
    return kept


def _variables(paper: Path) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in paper.read_text(errors="surrogateescape").split("\0"))
    return {name: value for name, _, value in pairs if name.startswith(_FAMILIES)}


def _read(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return "it said nothing"
    return "; ".join(line for line in lines if line and set(line) != {"-"})[:300] or "it said nothing"
