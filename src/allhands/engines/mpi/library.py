"""The MPI of this process: finding mpi4py and its library, joining the world of the ranks, communicators of groups.

MPI is initialised once in a process and finalised at its exit; groups are created and destroyed in between.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from ...errors import AllhandsError, fail
from ..base import EngineTimeout

__all__ = [
    "INSTALL",
    "BlockingThread",
    "World",
    "import_mpi",
    "join",
    "launched",
    "library_name",
    "load",
    "load_failure",
    "missing",
    "unavailable",
]

# What to type where mpi4py or an MPI library is missing.
INSTALL = (
    "as root `apt-get install openmpi-bin libopenmpi-dev` (or `apt-get install mpich`), then "
    "`pip install 'allhands[mpi]'` (mpi4py and numpy); in a checkout `make mpi` does both"
)
_START = (
    "start the ranks by MPI's launcher: `mpirun -n {size} python train.py` (or mpiexec, or srun with its MPI plugin)"
)
_SELECT = (
    "start the ranks with the mpirun that belongs to the library: mpirun.openmpi for Open MPI, mpirun.mpich for MPICH; "
    "MPI4PY_MPIABI=openmpi or =mpich selects the library"
)

# Set by the launchers: mpirun of Open MPI and Slurm's PMIx plugin; mpiexec of MPICH and Intel MPI and Slurm's PMI-2.
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE")
_MPICH = ("PMI_SIZE", "PMI_RANK", "PMI_FD", "PMI_PORT")

# The name that mpi4py's extension for MPICH's ABI is linked to, and the name that Debian gives to MPICH's library.
_STANDARD_NAME, _DEBIAN_NAME = "libmpi.so.12", "libmpich.so.12"

# MPI_THREAD_MULTIPLE in both ABIs, and the least tag that every MPI accepts as its largest.
_MULTIPLE, _MAX_TAG = 3, 32767

# How often the wait for a blocking function returns to Python, for signals, the deadline and the end of the group.
_POLL_S = 0.02

_Check = Callable[[], None]

_world: World | None = None
_lock = threading.Lock()


def launched(env: Mapping[str, str] = os.environ) -> str:
    """Return the ABI of the MPI launcher that started this process: openmpi, mpich, or "" for no launcher."""
    if any(name in env for name in _OPEN_MPI):
        return "openmpi"
    return "mpich" if any(name in env for name in _MPICH) else ""


def unavailable(size: int) -> tuple[str, str]:
    """Return why this rank of ``size`` cannot use MPI, and what to do; ("", "") where it can. Initialises nothing."""
    if reason := load_failure():
        return reason, INSTALL
    if not launched() and not _flag("MPI_Initialized"):
        return "no mpirun, mpiexec or srun started this process: its MPI knows no other rank", _START.format(size=size)
    return "", ""


@functools.cache
def load_failure() -> str:
    """Return why no MPI library can be loaded, "" where one can."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"the module mpi4py is not installed in {sys.prefix}"
    try:
        load()
    except (ImportError, OSError, RuntimeError) as problem:
        lines = "; ".join(str(problem).splitlines()[:3]) or type(problem).__name__
        return f"mpi4py is installed, but finds no MPI library that it can load: {lines}"
    return ""


@functools.cache
def load() -> ctypes.CDLL:
    """Load mpi4py's extension module with its MPI library, without importing it; return a handle to both."""
    if family := launched():
        # mpi4py's wheels have an extension for each ABI; by itself mpi4py takes that of the library it finds first.
        os.environ.setdefault("MPI4PY_MPIABI", family)
    spec = importlib.util.find_spec("mpi4py.MPI")
    if spec is None or not spec.origin:
        raise ImportError("mpi4py has no extension module for this MPI")
    try:
        return ctypes.CDLL(spec.origin)
    except OSError as problem:
        # A library from PyPI is in the environment's lib, where the linker does not look.
        name = str(problem).partition(":")[0]
        if (installed := Path(sys.prefix, "lib", name)).is_file():
            ctypes.CDLL(str(installed))
        elif name == _STANDARD_NAME:
            _load_debian_mpich()
        else:
            raise
        return ctypes.CDLL(spec.origin)


def import_mpi() -> Any:
    """Import mpi4py.MPI, which initialises MPI only where the program imported it before."""
    load()
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    return importlib.import_module("mpi4py.MPI")


def library_name() -> str:
    """Return name and version of the MPI library."""
    version = str(import_mpi().Get_library_version())
    return version.split("\0", maxsplit=1)[0].split(",", maxsplit=1)[0].splitlines()[0].strip()


def _load_debian_mpich() -> None:
    """Load Debian's MPICH under the name that mpi4py's extension is linked to.

    The linker compares the name inside the library (DT_SONAME), so a symbolic link would not do: load a copy in memory
    that has the standard name, which is shorter, in its place.
    """
    ctypes.CDLL(_DEBIAN_NAME)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    path = next(line.split(maxsplit=5)[5] for line in maps if f"/{_DEBIAN_NAME}" in line)
    old, new = f"{_DEBIAN_NAME}\0".encode(), f"{_STANDARD_NAME}\0".encode()
    descriptor = os.memfd_create(_STANDARD_NAME, os.MFD_CLOEXEC)
    try:
        os.write(descriptor, Path(path).read_bytes().replace(old, new.ljust(len(old), b"\0")))
        ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _flag(question: str) -> bool:
    """Return the answer of MPI_Initialized or MPI_Finalized."""
    answer = ctypes.c_int()
    getattr(load(), question)(ctypes.byref(answer))
    return bool(answer.value)


def missing(why: str, fix: str, **who: Any) -> AllhandsError:
    """Return mpi-missing, about ``who`` (and ``ranks`` and ``hosts``)."""
    return fail("mpi-missing", "mpi was asked for, but no MPI can be used here", why=why, fix=fix, **who)


def join(rank: int, size: int, *, subset: bool, deadline: float, check: _Check) -> World:
    """Return this process's MPI world, after initialising MPI where the program has not done so.

    All ranks of the job call this, or only a ``subset``, which can use a world but not initialise it. Raises
    mpi-missing, EngineTimeout at the deadline, or what ``check`` raises once the group is over.
    """
    global _world  # noqa: PLW0603  # a process has one MPI
    with _lock:
        if _world is None:
            why, fix = unavailable(size)
            initialised = not why and _flag("MPI_Initialized")
            if not why and subset and not initialised:
                why = (
                    "the default group does not use MPI, and some of the ranks cannot initialise it without the others"
                )
                fix = 'form the default group with init_process_group("mpi")'
            if why:
                raise missing(why, fix, who=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})")
            if not initialised:
                _interruptible(_initialise, deadline, check, "MPI_Init")
            _world = World(owned=not initialised)
        return _world


def _initialise() -> None:
    # MPICH's UCX ends the process when it reads the memory of a rank that died. Without this transport large messages
    # on one host are copied twice, and the survivors can report the death.
    os.environ.setdefault("UCX_TLS", "^cma")
    # Through ctypes, which releases the GIL; mpi4py holds it here and in MPI_Finalize, which wait for other ranks.
    if status := load().MPI_Init_thread(None, None, _MULTIPLE, ctypes.byref(ctypes.c_int())):
        raise RuntimeError(f"MPI_Init_thread failed with error {status}")


def _interruptible(function: Callable[[], Any], deadline: float, check: _Check, name: str) -> Any:
    """Run a blocking function of MPI in a thread, which is abandoned at the deadline or when ``check`` raises."""
    results: list[Any] = []
    thread = BlockingThread()
    thread.start(lambda: results.append(function()))
    try:
        while not thread.Test():
            check()
            if time.monotonic() > deadline:
                raise EngineTimeout(f"Timed out waiting for the other ranks in {name}")
    finally:
        thread.close()
    return results[0]


class BlockingThread:
    """Makes blocking calls of MPI, one at a time, interruptible for the caller, who polls it as a request."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, *call: Any) -> Self:
        """Start a call: its function and arguments."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="allhands-mpi", daemon=True)
            self._thread.start()
        self._calls.put(call)
        return self

    def Test(self) -> bool:  # noqa: N802  # MPI's name
        """Wait for a moment; return whether the call is complete, or raise what it raised."""
        try:
            problem = self._results.get(timeout=_POLL_S)
        except queue.Empty:
            return False
        if problem is not None:
            raise problem
        return True

    def close(self) -> None:
        """End the thread after its call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call[0](*call[1:])
            except BaseException as problem:  # noqa: BLE001  # raised by Test
                self._results.put(problem)
            else:
                self._results.put(None)


class World:
    """MPI_COMM_WORLD of this process."""

    def __init__(self, *, owned: bool) -> None:
        """``owned`` is whether allhands initialised MPI, and so finalises it."""
        self.mpi = import_mpi()
        self.comm = self.mpi.COMM_WORLD
        # Errors become exceptions; MPI's default is to end the process.
        self.comm.Set_errhandler(self.mpi.ERRORS_RETURN)
        self.name = library_name()
        # Without MPI_THREAD_MULTIPLE only one thread may be inside MPI at a time.
        self.serialised = self.mpi.Query_thread() != self.mpi.THREAD_MULTIPLE
        self._lock = threading.Lock()
        # Whether a call was abandoned: MPI_Finalize would wait for it for ever.
        self.abandoned = False
        self._pid = os.getpid()
        if owned:
            # mpirun takes a rank that exits without MPI_Finalize for one that failed.
            atexit.register(self._finalise)
        if launched() == "mpich":
            _ignore_sigusr1()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of MPI that does not wait for other ranks."""
        if not self.serialised:
            return function(*args)
        with self._lock:
            return function(*args)

    def communicator(
        self, store: Any, rank: int, ranks: list[int], name: str, *, deadline: float, check: _Check
    ) -> Any:
        """Return a communicator of ``ranks`` in their order; each of them calls this, with the group's store."""
        who = f"{socket.gethostname()}, pid {os.getpid()}"
        store.set(f"mpi/{rank}", json.dumps([self.comm.Get_rank(), self.comm.Get_size(), self.name, who]))
        members = [json.loads(store.get(f"mpi/{number}").decode()) for number in range(len(ranks))]
        _check_world(members, ranks)
        group = self.comm.Get_group().Incl([member[0] for member in members])
        # Two threads may create groups of different names at the same time; the tag keeps their messages apart.
        tag = zlib.crc32(name.encode()) % _MAX_TAG
        found = _interruptible(lambda: self.comm.Create_group(group, tag), deadline, check, "MPI_Comm_create_group")
        found.Set_errhandler(self.mpi.ERRORS_RETURN)
        return found

    def _finalise(self) -> None:
        # Not in a forked child, nor after a failure.
        if os.getpid() == self._pid and not self.abandoned and not _flag("MPI_Finalized"):
            load().MPI_Finalize()


def _check_world(members: list[tuple[int, int, str, str]], ranks: list[int]) -> None:
    """Raise mpi-missing unless ``members``, by group rank, are different ranks of one MPI world."""
    taken: dict[int, int] = {}
    first = members[0][2]
    for number, (world_rank, size, library, who) in zip(ranks, members, strict=True):
        other = taken.setdefault(world_rank, number)
        if library != first:
            why = f"rank {ranks[0]} uses {first}, rank {number} uses {library}"
        elif other != number:
            why = f"ranks {other} and {number} are both rank {world_rank} of an MPI world of {size}: {first} does not "
            why += "know that they belong together"
        else:
            continue
        raise missing(why, _SELECT, who=f"rank {number} ({who})", ranks=tuple(ranks))


def _ignore_sigusr1() -> None:
    """Ignore SIGUSR1 unless it has a handler: mpiexec -disable-auto-cleanup sends it when another rank died.

    Through C, because Python sets signal handlers in the main thread only.
    """
    function = ctypes.CDLL(None).signal
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    if before := function(signal.SIGUSR1, ctypes.c_void_p(int(signal.SIG_IGN))):
        function(signal.SIGUSR1, before)
