"""One rank of a bench of collectives: ours, Gloo, MPI, and plain copies for the floor, in turn in one process.

Each call is text that `timeit` compiles, as in a user's script: no function of this package is timed. Gloo is called
through torch's own functions and MPI through mpi4py's buffer forms, on the same memory, with all arguments prepared.
"""

from __future__ import annotations

import ctypes
import os
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

import allhands

from .config import CollectiveConfig
from .operations import COPIES, OPERATIONS, copied_bytes
from .processes import CommandConnection, serve

__all__ = ["Buffers", "Engines", "main"]

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

# Ranks start within seconds of each other, and a collective of the bench takes seconds at most: more is a hang.
_TIMEOUT_S = 60.0


_Call = Callable[[int], float]


class Buffers:
    """One rank's tensors for one operation and size: float32, zero, so that summing them again changes nothing."""

    def __init__(self, operation: str, size: int, rank: int, ranks: int, device: str = "cpu") -> None:
        self._operation = OPERATIONS[operation]
        self._rank = rank
        self._ranks = ranks
        self._tensors = {
            name: torch.zeros(size // 4 // (ranks if name == "part" else 1), device=device)
            for name in self._operation.buffers
            if name == "part" or rank == 0 or not self._operation.rooted
        }

    def _parts(self, name: str) -> list[torch.Tensor]:
        """Return a tensor in one part for each rank, or as its only part if the operation does not divide it."""
        if name not in self._tensors:
            return []
        whole = name == "part" or not self._operation.divided
        return list(self._tensors[name].chunk(1 if whole else self._ranks))

    def names(self) -> dict[str, Any]:
        """Return the names that the text of a call may use."""
        parts = {"parts": self._parts("whole") or None, "others": self._parts("other") or None}
        return {"whole": None, **self._tensors, **parts}

    def _given(self, rank: int, part: int) -> int:
        """Return the value that `fill` writes into a part of the input of ``rank``; each is different."""
        return rank * self._ranks + part + 1

    def fill(self) -> None:
        """Fill the input, so that `right` can check the output."""
        for part, tensor in enumerate(self._parts(self._operation.buffers[0]) if self._operation.buffers else []):
            tensor.fill_(self._given(self._rank, part))

    def right(self) -> bool:
        """Return whether the output of this rank is right."""
        what = self._operation
        if not what.buffers or (what.receivers and self._rank >= what.receivers):
            return True
        mine = self._rank if what.divided and what.buffers[0] == "whole" else 0
        for part, tensor in enumerate(self._parts(what.buffers[-1])):
            givers = {"sum": range(self._ranks), "root": (0,), "each": (part,)}[what.result]
            expected = sum(self._given(rank, mine) for rank in givers)
            if not bool(torch.all(tensor == expected)):
                return False
        return True

    def clear(self) -> None:
        """Write zeros everywhere."""
        for tensor in self._tensors.values():
            tensor.zero_()


class Engines:
    """The groups of a rank. All ranks construct it, and call its methods, at the same time."""

    def __init__(self, plan: CollectiveConfig, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        if plan.device != "cpu":
            torch.cuda.set_device(0)
        allhands.init_process_group("allhands", rank=rank, world_size=plan.ranks, timeout=_TIMEOUT_S)
        # Ranks synchronise through the default group, in shared memory, whichever engine is measured.
        self._ours: Any = allhands.group.WORLD
        if plan.engine != "shm":
            # A group reads the setting when it is formed.
            os.environ["ALLHANDS_ENGINE"] = plan.engine
            self._ours = allhands.new_group(backend="allhands")
        self._gloo = torch_dist.new_group(backend="gloo") if "gloo" in plan.peers else None

    def calls(self, buffers: Buffers, size: int) -> dict[str, _Call]:
        """Return the calls to measure for ``buffers``: the engines, and the copies where the floor is wanted."""
        what, device = OPERATIONS[self._plan.operation], self._plan.device
        text, mpi_text = what.calls(self._rank)
        # barrier() has no argument before the group.
        group = ", group=group" if what.buffers else "group=group"
        ours = text.format(group="" if self._plan.engine == "shm" else group)
        texts: dict[str, tuple[str, dict[str, Any]]] = {"allhands": (ours, {"dist": allhands, "group": self._ours})}
        names = buffers.names()
        if self._gloo is not None:
            texts["gloo"] = text.format(group=group), {"dist": torch_dist, "group": self._gloo}
        if "mpi" in self._plan.peers:
            texts["mpi"] = mpi_text, self._mpi_names(names)
        made = {name: _timed(call, {**names, **found}, device, what.trips) for name, (call, found) in texts.items()}
        if self._plan.floor and size:
            copy, found = _copy(copied_bytes(size), device)
            for name, everyone in COPIES.items():
                takes_part = bool(text) if everyone else self._rank == 0
                made[name] = _timed(copy if takes_part else "", found, device)
        return made

    def _mpi_names(self, names: dict[str, Any]) -> dict[str, Any]:
        from mpi4py import MPI as mpi  # noqa: N811  # lower case, as other modules

        # A list of array and type is the form that mpi4py parses fastest.
        found: dict[str, Any] = {
            name: [tensor.numpy(), mpi.FLOAT] for name, tensor in names.items() if isinstance(tensor, torch.Tensor)
        }
        found = {"whole": None, **found, "MPI": mpi, "comm": mpi.COMM_WORLD}
        root = self._rank == 0
        found |= {"give": mpi.IN_PLACE if root else found["whole"], "take": found["whole"] if root else None}
        return found

    def versions(self) -> dict[str, str]:
        """Return the versions of the engines that are measured."""
        if self._plan.engine == "shm":
            shared = getattr(self._ours.engine, "segment_nbytes", 0) / 2**20
            on_each = " on each host" if self._plan.hosts > 1 else ""
            ours = f"{allhands.__version__} ({shared:.1f} MiB of shared memory{on_each}, whatever the size)"
        else:
            ours = f"{allhands.__version__} (engine {self._plan.engine})"
        found = {"allhands": ours, "gloo": f"torch {torch.__version__}"}
        if "mpi" in self._plan.peers:
            import mpi4py
            from mpi4py import MPI

            library = MPI.Get_library_version().split("\0")[0].split(",")[0].splitlines()[0].strip()
            found["mpi"] = f"{library}, mpi4py {mpi4py.__version__}"
        return {name: text for name, text in found.items() if name in {"allhands", *self._plan.peers}}


def _copy(size: int, device: str) -> tuple[str, dict[str, Any]]:
    """Return the text, and its names, of a copy of ``size`` bytes on the device."""
    # Not zeros: pages that were never written are all the same page, which stays in the cache.
    source, target = torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)
    names = {"source": source, "target": target}
    if device != "cpu":
        return "target.copy_(source)", names
    places = {"to": target.data_ptr(), "origin": source.data_ptr()}
    return "move(to, origin, count)", {**names, **places, "move": ctypes.memmove, "count": size}


def _timed(text: str, names: dict[str, Any], device: str, trips: int = 1) -> _Call:
    """Return the function that runs ``text`` a number of times and returns the seconds of one direction.

    The text is "" on a rank that is idle.
    """
    if not text:
        return lambda _: 0.0
    if device != "cpu":
        # A call on a GPU only queues its work.
        text, names = f"{text}; finish()", {**names, "finish": torch.cuda.synchronize}
    timer = timeit.Timer(text, globals=names)
    return lambda times: timer.timeit(times) / trips


def _mpi_rank(plan: CollectiveConfig) -> int:
    """Initialise MPI and return its rank."""
    import mpi4py

    # mpi4py asks for MPI_THREAD_MULTIPLE, whose locks one thread does not need. Our own engine needs it, and both are
    # measured in one process.
    mpi4py.rc.thread_level = "multiple" if plan.engine == "mpi" else "funneled"
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())


# Measurement ------------------------------------------------------------------------------------------------


def main() -> None:
    """Run one rank; see `processes.serve`."""
    serve(CollectiveConfig, _measure, _mpi_rank)


def _measure(plan: CollectiveConfig, rank: int, line: CommandConnection) -> None:
    torch.set_num_threads(1)
    engines = Engines(plan, rank)
    for size in plan.sizes:
        buffers = Buffers(plan.operation, size, rank, plan.ranks, plan.device)
        calls = engines.calls(buffers, size)
        for name, call in calls.items():
            _check(name, call, buffers)
        limits = {name: _COPY_SAMPLE_S if name in COPIES else _SAMPLE_S for name in calls}
        repeats = {name: _repeats(call, limits[name]) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(plan.rounds):
            # Each engine follows each other one in some round, so none always has the same predecessor.
            shift = turn % len(calls)
            for name in [*calls][shift:] + [*calls][:shift]:
                times[name].append(_sample(calls[name], repeats[name], limits[name]))
            if rank == 0:
                line.tell(size=size, round=turn + 1, wait=True)
        if rank == 0:
            line.tell(size=size, times=times, versions=engines.versions(), wait=True)
    allhands.destroy_process_group()


def _slowest(seconds: float) -> float:
    """Return the longest time of all ranks; idle ranks wait here."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    allhands.all_reduce(slowest, op=allhands.ReduceOp.MAX)
    return float(slowest)


def _check(name: str, call: _Call, buffers: Buffers) -> None:
    """Call it once and check the result: the time of a wrong result is meaningless."""
    buffers.fill()
    allhands.barrier()
    call(1)
    wrong = name not in COPIES and not buffers.right()
    if _slowest(float(wrong)):
        raise RuntimeError(f"{name} gave a wrong result" + (" on this rank" if wrong else " on another rank"))
    buffers.clear()


def _repeats(call: _Call, limit_s: float) -> int:
    """Return how many calls make a part of a sample: the same number on every rank, from the slowest rank's time."""
    times, took = 1, 0.0
    while took < _TRIAL_S and times < _MOST:
        times *= 4 if took else 1
        allhands.barrier()
        took = _slowest(call(times))
    for _ in range(_TRIALS if took < limit_s else 0):
        allhands.barrier()
        took = min(took, _slowest(call(times)))
    return max(1, min(_MOST, int(times * limit_s / took / _PARTS)))


def _sample(call: _Call, repeats: int, limit_s: float) -> float:
    """Return the seconds of one call on the slowest rank: a root that returns early does not count."""
    allhands.barrier()
    if repeats > 1:
        call(1)  # Wakes threads that slept while other engines were measured.
    took, done = 0.0, 0
    while took < limit_s and done < _PARTS * repeats:
        allhands.barrier()
        took += _slowest(call(repeats))
        done += repeats
    return took / done
