"""One rank of a bench: forms the groups, measures each size, and sends the times to the command.

Rank 0 sends one JSON object a line and waits for a byte in reply, so that nothing is measured while the command draws
its progress. If the connection of a rank to the command breaks, the command is gone, and the rank exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from .config import CollectiveConfig
from .operations import COPIES
from .processes import short_path

__all__ = ["CommandConnection", "main", "serve"]

# How long an engine, and a copy, is measured at a time: enough calls for a mean at small sizes, and few enough
# seconds for a whole range of sizes in a minute.
_SAMPLE_S = 0.1
_COPY_SAMPLE_S = 0.03

# A sample ends early, after one of its parts, where calls take longer than in the trial: an engine that spins is a
# thousand times slower when another process uses its core.
_PARTS = 5

# The length of the trial that determines how many calls make a sample; the minimum of a few, because another process
# may disturb one.
_TRIAL_S = 0.01
_TRIALS = 2

# More calls in a part do not make the mean more precise.
_MOST = 5_000


class CommandConnection:
    """The connection to the command."""

    def __init__(self, path: str, folder: str) -> None:
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with short_path(Path(path).parent) as place:
                self._socket.connect(f"{place}/{Path(path).name}")
        except OSError:
            self._alone()
        self._answers = threading.Semaphore(0)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # A command that is killed before it has read all messages resets the connection instead of closing it.
        with contextlib.suppress(ConnectionResetError):
            while data := self._socket.recv(64):
                for _ in data:
                    self._answers.release()
        self._alone()

    def _alone(self) -> NoReturn:
        """Remove the folder of the command, which was killed, and exit."""
        shutil.rmtree(self._folder, ignore_errors=True)
        # Other threads may be inside an engine that nothing else would end.
        os._exit(1)

    def tell(self, *, wait: bool = False, **message: Any) -> None:
        """Send ``message``; with ``wait``, return when the command has processed it."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._alone()
        if wait:
            self._answers.acquire()


def main() -> None:
    """Run one rank. argv holds the command's socket, a folder for the output, the plan, and the rank (-1: ask MPI)."""
    serve(CollectiveConfig, _measure)


def serve(kind: type[Any], measure: Callable[[Any, int, Any, CommandConnection], None]) -> None:
    """Run ``measure`` with the plan in argv, which is of ``kind``."""
    path, folder, order, number = sys.argv[1:5]
    plan = msgspec.json.decode(order.encode(), type=kind)
    line = CommandConnection(path, folder)
    rank = int(number)
    try:
        mpi = None
        if rank < 0:
            from .competitors import start_mpi

            mpi = start_mpi(getattr(plan, "engine", "shm"))
            rank = mpi.COMM_WORLD.Get_rank()
            # Not through mpirun, which would mix the output of the ranks.
            with Path(folder, str(rank)).open("ab") as printed:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
        line.tell(rank=rank, pid=os.getpid())
        measure(plan, rank, mpi, line)
        if mpi is not None:
            mpi.Finalize()
    except BaseException as problem:  # noqa: BLE001  # reported, whatever it is
        traceback.print_exc()
        line.tell(rank=rank, failed="".join(traceback.format_exception_only(problem)).strip())
        sys.stderr.flush()
        # A normal exit would run MPI's finalizer, which waits for ranks that wait for this one.
        os._exit(1)
    line.tell(rank=rank, done=True)


def _measure(plan: CollectiveConfig, rank: int, mpi: Any, line: CommandConnection) -> None:
    import torch

    from .competitors import Buffers, Engines

    torch.set_num_threads(1)
    engines = Engines(plan, rank, mpi)
    for size in plan.sizes:
        buffers = Buffers(plan.operation, size, rank, plan.ranks, plan.device)
        calls = engines.calls(buffers, size)
        for name, call in calls.items():
            _check(name, call, buffers, engines)
        limits = {name: _COPY_SAMPLE_S if name in COPIES else _SAMPLE_S for name in calls}
        repeats = {name: _repeats(call, engines, limits[name]) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(plan.rounds):
            # Each engine follows each other one in some round, so none always has the same predecessor.
            shift = turn % len(calls)
            for name in [*calls][shift:] + [*calls][:shift]:
                times[name].append(_sample(calls[name], engines, repeats[name], limits[name]))
            if rank == 0:
                line.tell(size=size, round=turn + 1, wait=True)
        if rank == 0:
            line.tell(size=size, times=times, versions=engines.versions(), wait=True)
    engines.end()


def _check(name: str, call: Any, buffers: Any, engines: Any) -> None:
    """Call it once and check the result: the time of a wrong result is meaningless."""
    buffers.fill()
    engines.meet()
    call.run(1)
    wrong = name not in COPIES and not buffers.right()
    if engines.slowest(float(wrong)):
        raise RuntimeError(f"{name} gave a wrong result" + (" on this rank" if wrong else " on another rank"))
    buffers.clear()


def _repeats(call: Any, engines: Any, limit_s: float) -> int:
    """Return how many calls make a part of a sample: the same number on every rank, from the slowest rank's time."""
    times, took = 1, 0.0
    while took < _TRIAL_S and times < _MOST:
        times *= 4 if took else 1
        engines.meet()
        took = engines.slowest(call.run(times))
    for _ in range(_TRIALS if took < limit_s else 0):
        engines.meet()
        took = min(took, engines.slowest(call.run(times)))
    return max(1, min(_MOST, int(times * limit_s / took / _PARTS)))


def _sample(call: Any, engines: Any, repeats: int, limit_s: float) -> float:
    """Return the seconds of one call on the slowest rank: a root that returns early does not count."""
    engines.meet()
    if repeats > 1:
        call.run(1)  # Wakes threads that slept while other engines were measured.
    took, done = 0.0, 0
    while took < limit_s and done < _PARTS * repeats:
        engines.meet()
        took += engines.slowest(call.run(repeats))
        done += repeats
    return float(took / done)
