"""The engines of one rank, all in one process: ours, Gloo, MPI, and plain copies for the floor.

Each call is text that `timeit` compiles, as in a user's script: no function of this package is timed. Gloo is called
through torch's own functions and MPI through mpi4py's buffer forms, on the same memory, with all arguments prepared.
"""

from __future__ import annotations

import ctypes
import os
import timeit
from typing import Any

import torch
import torch.distributed as torch_dist

import allhands

from .config import CollectiveConfig
from .operations import COPIES, OPERATIONS, copied_bytes

__all__ = ["Buffers", "Call", "Engines", "start_mpi"]

# Ranks start within seconds of each other, and a collective of the bench takes seconds at most: more is a hang.
_TIMEOUT_S = 60.0


class Buffers:
    """One rank's tensors for one operation and size: float32, zero, so that summing them again changes nothing."""

    def __init__(self, operation: str, size: int, rank: int, ranks: int, device: str = "cpu") -> None:
        self._operation = OPERATIONS[operation]
        self._rank = rank
        self._ranks = ranks
        self.tensors: dict[str, Any] = {"whole": None, "other": None, "part": None}
        for name in self._operation.buffers:
            if name == "part" or rank == 0 or not self._operation.rooted:
                self.tensors[name] = torch.zeros(size // 4 // (ranks if name == "part" else 1), device=device)

    def _parts(self, name: str) -> list[torch.Tensor]:
        """Return a tensor in one part for each rank, or as its only part if the operation does not divide it."""
        tensor = self.tensors[name]
        if tensor is None:
            return []
        return [tensor] if name == "part" or not self._operation.divided else list(tensor.chunk(self._ranks))

    def names(self) -> dict[str, Any]:
        """Return the names that the text of a call may use."""
        return {**self.tensors, "parts": self._parts("whole") or None, "others": self._parts("other") or None}

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
        for tensor in self.tensors.values():
            if tensor is not None:
                tensor.zero_()


class Call:
    """One operation by one engine, as this rank calls it. The text is "" on a rank that is idle."""

    def __init__(self, text: str, names: dict[str, Any], trips: int, device: str) -> None:
        if text and device != "cpu":
            # A call on a GPU only queues its work.
            text, names = f"{text}; finish()", {**names, "finish": torch.cuda.synchronize}
        self._timer = timeit.Timer(text, globals=names) if text else None
        self._trips = trips

    def run(self, times: int) -> float:
        """Call it ``times`` times and return the seconds of all messages of one direction."""
        return 0.0 if self._timer is None else self._timer.timeit(times) / self._trips


def start_mpi(engine: str) -> Any:
    """Initialise MPI and return mpi4py's module of it."""
    import mpi4py

    # mpi4py asks for MPI_THREAD_MULTIPLE, whose locks one thread does not need. Our own engine needs it, and both are
    # measured in one process.
    mpi4py.rc.thread_level = "multiple" if engine == "mpi" else "funneled"
    from mpi4py import MPI

    return MPI


class Engines:
    """The groups of a rank. All ranks construct it, and call its methods, at the same time."""

    def __init__(self, plan: CollectiveConfig, rank: int, mpi: Any) -> None:
        self._plan = plan
        self._rank = rank
        self._mpi = mpi
        if plan.device != "cpu":
            torch.cuda.set_device(0)
        allhands.init_process_group("allhands", rank=rank, world_size=plan.ranks, timeout=_TIMEOUT_S)
        # `meet` and `slowest` use the default group, in shared memory, whichever engine is measured.
        self._ours: Any = allhands.group.WORLD if plan.engine == "shm" else self._other(plan.engine)
        self._gloo = torch_dist.new_group(backend="gloo") if "gloo" in plan.peers else None
        self._source, self._target = self._copies()
        self._slowest = torch.zeros((), dtype=torch.float64)

    def _other(self, engine: str) -> Any:
        """Return a group of ours on another engine: a group reads the setting when it is formed."""
        os.environ["ALLHANDS_ENGINE"] = engine
        return allhands.new_group(backend="allhands")

    def _copies(self) -> tuple[Any, Any]:
        count = copied_bytes(max(self._plan.sizes)) // 4 if self._plan.floor else 0
        # Not zeros: pages that were never written are all the same page, which stays in the cache.
        return torch.ones(count, device=self._plan.device), torch.ones(count, device=self._plan.device)

    def calls(self, buffers: Buffers, size: int) -> dict[str, Call]:
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
        made = {name: Call(call, {**names, **found}, what.trips, device) for name, (call, found) in texts.items()}
        if self._plan.floor and size:
            copy, found = self._copy(copied_bytes(size))
            for name, everyone in COPIES.items():
                takes_part = bool(text) if everyone else self._rank == 0
                made[name] = Call(copy if takes_part else "", found, 1, device)
        return made

    def _copy(self, size: int) -> tuple[str, dict[str, Any]]:
        """Return the text, and its names, of a copy of ``size`` bytes on the device."""
        if self._plan.device != "cpu":
            return "to.copy_(origin)", {"to": self._target[: size // 4], "origin": self._source[: size // 4]}
        places = {"to": self._target.data_ptr(), "origin": self._source.data_ptr()}
        return "move(to, origin, count)", {"move": ctypes.memmove, "count": size, **places}

    def _mpi_names(self, names: dict[str, Any]) -> dict[str, Any]:
        mpi = self._mpi
        # A list of array and type is the form that mpi4py parses fastest.
        found: dict[str, Any] = {
            name: [tensor.numpy(), mpi.FLOAT] for name, tensor in names.items() if isinstance(tensor, torch.Tensor)
        }
        found = {"whole": None, **found, "MPI": mpi, "comm": mpi.COMM_WORLD}
        root = self._rank == 0
        found |= {"give": mpi.IN_PLACE if root else found["whole"], "take": found["whole"] if root else None}
        return found

    def meet(self) -> None:
        """Wait for all ranks. Our barrier for every engine: it sleeps, while MPI's would keep a core busy."""
        allhands.barrier()

    def slowest(self, seconds: float) -> float:
        """Return the longest time of all ranks; idle ranks wait here."""
        self._slowest.fill_(seconds)
        allhands.all_reduce(self._slowest, op=allhands.ReduceOp.MAX)
        return float(self._slowest)

    def versions(self) -> dict[str, str]:
        """Return the versions of the engines that are measured."""
        if self._plan.engine == "shm":
            shared = getattr(self._ours.engine, "segment_nbytes", 0) / 2**20
            on_each = " on each host" if self._plan.hosts > 1 else ""
            ours = f"{allhands.__version__} ({shared:.1f} MiB of shared memory{on_each}, whatever the size)"
        else:
            ours = f"{allhands.__version__} (engine {self._plan.engine})"
        found = {"allhands": ours, "gloo": f"torch {torch.__version__}"}
        if self._mpi is not None:
            import mpi4py

            library = self._mpi.Get_library_version().split("\0")[0].split(",")[0].splitlines()[0].strip()
            found["mpi"] = f"{library}, mpi4py {mpi4py.__version__}"
        return {name: text for name, text in found.items() if name in {"allhands", *self._plan.peers}}

    def end(self) -> None:
        """Leave the groups."""
        allhands.destroy_process_group()
