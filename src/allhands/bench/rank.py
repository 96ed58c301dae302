"""One rank of a bench: forms the groups, measures each size, and tells the command what it found.

Rank 0 sends one JSON object a line and waits for a byte of answer, so that nothing is measured while the command
draws its progress. Every rank keeps its connection: when it breaks, the command is gone, and so is the rank.
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
_SPELL_S = 0.1
_COPY_SPELL_S = 0.03

# A spell ends early, after one of its parts, where calls take longer than they did when they were counted: an engine
# that spins is a thousand times slower when someone else wants its core.
_PARTS = 5

# A trial this long says how many calls make a spell; the least of a few, because a neighbour may disturb one.
_TRIAL_S = 0.01
_TRIALS = 2

# More calls than this in a part say no more.
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
        # A command that is killed with words of ours unread resets the connection instead of closing it.
        with contextlib.suppress(ConnectionResetError):
            while data := self._socket.recv(64):
                for _ in data:
                    self._answers.release()
        self._alone()

    def _alone(self) -> NoReturn:
        """End this process and remove the command's folder: it was killed, so nobody else will."""
        shutil.rmtree(self._folder, ignore_errors=True)
        # Other threads may be inside an engine that nothing else would end.
        os._exit(1)

    def tell(self, *, wait: bool = False, **words: Any) -> None:
        """Send ``words``; with ``wait``, return when they were dealt with."""
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._alone()
        if wait:
            self._answers.acquire()


def main() -> None:
    """Be one rank: argv holds the command's socket, a folder for what is printed, the plan, and the rank.

    The rank is -1 where MPI knows it.
    """
    serve(CollectiveConfig, _measure)


def serve(kind: type[Any], measure: Callable[[Any, int, Any, CommandConnection], None]) -> None:
    """Be a rank that does ``measure`` with the plan, of the ``kind`` given, that argv holds."""
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
            _print_into(f"{folder}/{rank}")
        line.tell(rank=rank, pid=os.getpid())
        measure(plan, rank, mpi, line)
        if mpi is not None:
            mpi.Finalize()
    except BaseException as problem:  # noqa: BLE001  # reported, whatever it is
        traceback.print_exc()
        line.tell(rank=rank, failed="".join(traceback.format_exception_only(problem)).strip())
        sys.stderr.flush()
        # Not by the usual way: MPI would wait there for ranks that wait for this one.
        os._exit(1)
    line.tell(rank=rank, done=True)


def _print_into(path: str) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)


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
        repeats = {name: _repeats(call, engines, _spell_s(name)) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(plan.rounds):
            # Everyone follows everyone in time, so that nobody always comes after the same neighbour.
            shift = turn % len(calls)
            for name in [*calls][shift:] + [*calls][:shift]:
                times[name].append(_spell(calls[name], engines, repeats[name], _spell_s(name)))
            if rank == 0:
                line.tell(size=size, round=turn + 1, wait=True)
        if rank == 0:
            line.tell(size=size, times=times, versions=engines.versions(), wait=True)
    engines.end()


def _spell_s(name: str) -> float:
    return _COPY_SPELL_S if name in COPIES else _SPELL_S


def _check(name: str, call: Any, buffers: Any, engines: Any) -> None:
    """Do it once, and see that it does what it should: the time of a wrong result means nothing."""
    buffers.fill()
    engines.meet()
    call.run(1)
    wrong = name not in COPIES and not buffers.right()
    if engines.slowest(float(wrong)):
        raise RuntimeError(f"{name} gave a wrong result" + (" on this rank" if wrong else " on another rank"))
    buffers.clear()


def _repeats(call: Any, engines: Any, spell_s: float) -> int:
    """Return how many calls make a part of a spell; the same on every rank, because the slowest one's time decides."""
    times, took = 1, 0.0
    while took < _TRIAL_S and times < _MOST:
        times *= 4 if took else 1
        engines.meet()
        took = engines.slowest(call.run(times))
    for _ in range(_TRIALS if took < spell_s else 0):
        engines.meet()
        took = min(took, engines.slowest(call.run(times)))
    return max(1, min(_MOST, int(times * spell_s / took / _PARTS)))


def _spell(call: Any, engines: Any, repeats: int, spell_s: float) -> float:
    """Return the seconds of one call on the slowest rank: whoever runs ahead (a root) does not decide."""
    engines.meet()
    if repeats > 1:
        call.run(1)  # Wakes what has slept while others were measured.
    took, done = 0.0, 0
    while took < spell_s and done < _PARTS * repeats:
        engines.meet()
        took += engines.slowest(call.run(repeats))
        done += repeats
    return float(took / done)
