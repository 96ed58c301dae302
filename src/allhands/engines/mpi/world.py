"""This process's place in an MPI world, and the communicators of groups made from it.

MPI starts once in a process and ends once; groups come and go in between.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import library, pmi, seats
from .library import missing

__all__ = ["World", "join"]

# How often to look whether the group is over while MPI does something that cannot be asked.
_LOOK_S = 0.02

# How long a rank that is done waits for the others to end MPI with it once one of them is gone.
_LAST_S = 1.0

# MPICH's UCX ends the process where it reads from the memory of a rank that has died. Without that way of reading,
# large tensors are copied twice on one host, and whoever survives can say why.
_UCX, _WITHOUT_CMA = "UCX_TLS", "^cma"

# MPI promises tags up to here.
_MOST_TAG = 32767

_Check = Callable[[], None]

_world: World | None = None


class World:
    """The MPI world of this process."""

    def __init__(self, module: Any, *, ours: bool, launched: str) -> None:
        self.module = module
        self.comm = module.COMM_WORLD
        self.name = library.world_of(module)
        # Serialised where the library wants that; it never has to be where it gives what was asked for.
        self.lock = library.port(module, alone=module.Query_thread() != module.THREAD_MULTIPLE)
        # Whether calls were left in the middle: then the end of MPI would wait for ever.
        self.spoilt = False
        self._pidfds: dict[int, int] = {}
        self._pid = os.getpid()
        if ours and launched:
            # mpirun takes a rank that goes without this for one that failed.
            atexit.register(self._finalise)

    def handle(self, of: Any) -> int:
        """Return the number by which the library knows one of mpi4py's objects."""
        return library.handle(self.module, of)

    def communicator(
        self, store: Any, rank: int, ranks: list[int], name: str, *, deadline: float, check: _Check
    ) -> Any:
        """Return the communicator of a group of ``ranks``; each of them calls this, with the group's own store."""
        mine = {
            "rank": self.comm.Get_rank(),
            "size": self.comm.Get_size(),
            "pid": os.getpid(),
            "host": _host(),
            "library": self.name,
        }
        store.set(f"mpi/{rank}", json.dumps(mine))
        everyone = [json.loads(store.get(f"mpi/{number}").decode()) for number in range(len(ranks))]
        self._compare(everyone, ranks)
        for each in everyone:
            self._watch(each)
        group = self.comm.Get_group().Incl([each["rank"] for each in everyone])
        # Two groups may be made at once in two threads; those of one name never are.
        tag = zlib.crc32(name.encode()) % _MOST_TAG
        made = _beside(lambda: self.comm.Create_group(group, tag), deadline, check, f"MPI to make the group {name}")
        made.Set_errhandler(self.module.ERRORS_RETURN)
        return made

    def _compare(self, everyone: list[dict[str, Any]], ranks: list[int]) -> None:
        """Raise mpi-missing where the ranks are not all in one MPI world."""
        taken: dict[int, int] = {}
        for number, each in zip(ranks, everyone, strict=True):
            other = taken.setdefault(each["rank"], number)
            if other == number and each["library"] == everyone[0]["library"]:
                continue
            libraries = sorted({each["library"] for each in everyone})
            why = (
                f"rank {ranks[0]} uses {everyone[0]['library']}, rank {number} uses {each['library']}"
                if len(libraries) > 1
                else f"ranks {other} and {number} are both number {each['rank']} of an MPI world of {each['size']}: "
                f"{libraries[0]} does not know that they belong together"
            )
            raise missing(
                why,
                f"rank {number} ({each['host'].partition('/')[0]}, pid {each['pid']})",
                "start the ranks with the mpirun that belongs to the library: mpirun.openmpi for Open MPI, "
                "mpirun.mpich for MPICH; MPI4PY_MPIABI=openmpi or =mpich chooses the library",
                ranks=tuple(ranks),
            )

    def _watch(self, each: Mapping[str, Any]) -> None:
        if each["host"] == _host() and each["pid"] != os.getpid() and each["pid"] not in self._pidfds:
            with contextlib.suppress(OSError):  # Gone already, or in another pid namespace.
                self._pidfds[each["pid"]] = os.pidfd_open(each["pid"])

    def _finalise(self) -> None:
        """End MPI together with the others. A rank that is gone is not waited for, nor after a failure anyone."""
        if os.getpid() != self._pid or library.ask(None, "MPI_Finalized"):
            return
        if self.spoilt:
            _excuse()
            return
        done = threading.Event()

        def run() -> None:
            library.finalise()
            done.set()

        threading.Thread(target=run, name="allhands-mpi-end", daemon=True).start()
        poller = select.poll()
        for descriptor in self._pidfds.values():
            poller.register(descriptor, select.POLLIN)
        gone: float | None = None
        while not done.wait(_LOOK_S):
            if gone is None and poller.poll(0):
                gone = time.monotonic()
            if gone is not None and time.monotonic() - gone > _LAST_S:
                return


def join(
    store: Any, rank: int, size: int, *, one_host: bool, deadline: float, check: _Check, alone: bool = False
) -> World:
    """Return this process's MPI world, after getting into one with all ``size`` ranks where it is in none yet.

    Every rank calls this, unless it is ``alone`` in a smaller group: then there must be a world already. Raises
    mpi-missing where no MPI can be had, whatever ``check`` raises where the group is over, and RuntimeError at the
    deadline.
    """
    global _world  # noqa: PLW0603  # MPI itself is one for each process
    who = f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"
    if why := library.lacking():
        raise missing(why, who)
    if _world is None:
        launched = library.launched()
        environment: dict[str, str] = {}
        if not launched and not library.ask(None, "MPI_Initialized"):
            environment = _seat(
                store, rank, size, one_host=one_host, deadline=deadline, check=check, alone=alone, who=who
            )
        if _UCX not in os.environ:
            environment = {**environment, _UCX: _WITHOUT_CMA}
        with _set(environment):
            ours = _beside(library.initialise, deadline, check, "MPI to start")
        if launched == "mpich":
            _keep_usr1()
        _world = World(library.load(), ours=ours, launched=launched)
    return _world


# What the ranks of a world without mpirun hold as long as they live.
_held: list[object] = []


def _seat(
    store: Any, rank: int, size: int, *, one_host: bool, deadline: float, check: _Check, alone: bool, who: str
) -> dict[str, str]:
    """Return the variables under which MPI's start finds the other ranks, which no mpirun started."""
    if alone:
        raise missing(
            "the default group does not use MPI, and no mpirun started these ranks: they are in no MPI world together",
            who,
            'form the default group with init_process_group("mpi"), or start the ranks with mpirun',
        )
    if library.family() == "mpich":
        manager = pmi.Manager(store, rank, size)
        _held.append(manager)
        return manager.environment
    if not one_host:
        raise missing(
            "Open MPI joins ranks of several hosts only under its own mpirun",
            who,
            "mpirun --host node1:2,node2:2 -x MASTER_ADDR=node1 -x MASTER_PORT=29500 python train.py; or take MPICH, "
            "which can: MPI4PY_MPIABI=mpich on every host",
        )
    seat = seats.take(store, rank, size, deadline, check)
    _held.append(seat)
    return seat.environment


@contextlib.contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    """Let MPI's start find ``environment``; nobody else does: it says who a rank is, and another launcher said so."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _beside(function: Callable[[], Any], deadline: float, check: _Check, what: str) -> Any:
    """Do ``function`` beside this thread, and leave it behind where the group ends or the deadline comes first."""
    outcome: list[Any] = []
    problems: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as problem:  # noqa: BLE001  # raised in the caller's thread
            problems.append(problem)
        done.set()

    threading.Thread(target=run, name="allhands-mpi-start", daemon=True).start()
    while not done.wait(_LOOK_S):
        check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"Timed out waiting for {what}")
    if problems:
        raise problems[0]
    return outcome[0]


def _excuse() -> None:
    """Tell MPICH's mpiexec that this rank goes on purpose, without MPI's end: it would kill the others at once."""
    number = os.environ.get("PMI_FD", "")
    if number.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(number), b"cmd=finalize\n")
            select.select([int(number)], [], [], _LAST_S)


def _keep_usr1() -> None:
    """Let SIGUSR1 not end this process, where nobody handles it: MPICH's mpiexec tells by it that a rank is gone.

    It does so under -disable-auto-cleanup. In C, because Python sets signals in the main thread only.
    """
    function = ctypes.CDLL(None).signal
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = function(signal.SIGUSR1, ctypes.c_void_p(int(signal.SIG_IGN)))
    if before:
        function(signal.SIGUSR1, before)


def _host() -> str:
    """Return what tells this host, and the pids seen from here, from others."""
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"
