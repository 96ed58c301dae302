"""The engines of one rank, all in one process: ours, Gloo, MPI, and plain copies for the floor.

Each call is text that `timeit` compiles, so it is made as a user's script makes it: no function of ours around it,
no frame of the package below it. Gloo is called through torch's own functions and MPI through mpi4py's buffer
forms, on the same memory, with all that can be prepared prepared: both at their best.
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

# Ranks come within seconds of each other, and a collective of the bench takes at most seconds: more is a hang.
_TIMEOUT_S = 60.0


class Buffers:
    """One rank's tensors for one operation and size: float32, zero, so that summing them again changes nothing."""

    def __init__(self, operation: str, size: int, rank: int, ranks: int, device: str = "cpu") -> None:
        self._operation = operation
        self._rank = rank
        self._ranks = ranks
        what = OPERATIONS[operation]
        self.tensors: dict[str, Any] = {"whole": None, "other": None, "part": None}
        for name in what.buffers:
            if name == "part":
                self.tensors[name] = torch.zeros(size // 4 // ranks, device=device)
            elif rank == 0 or not what.rooted:
                self.tensors[name] = torch.zeros(size // 4, device=device)
        self._parts = self._cut("whole")
        self._others = self._cut("other")

    def _cut(self, name: str) -> list[torch.Tensor] | None:
        whole = self.tensors[name]
        if whole is None or not OPERATIONS[self._operation].divided:
            return None
        return list(whole.chunk(self._ranks))

    def names(self) -> dict[str, Any]:
        """Return what the text of a call may name."""
        return {**self.tensors, "parts": self._parts, "others": self._others}

    def fill(self) -> None:
        """Write what each rank gives, so that `right` can tell whether the others got it."""
        whole, part, parts = self.tensors["whole"], self.tensors["part"], self._parts or []
        match self._operation:
            case "all_reduce" | "reduce":
                whole.fill_(self._rank + 1)
            case "broadcast" | "send_recv":
                whole.fill_(7 if self._rank == 0 else 0)
            case "all_gather" | "all_gather_into_tensor" | "gather":
                part.fill_(self._rank + 1)
            case "scatter":
                for number, each in enumerate(parts):
                    each.fill_(number + 1)
            case "reduce_scatter" | "reduce_scatter_tensor":
                for number, each in enumerate(parts):
                    each.fill_((self._rank + 1) * (number + 1))
            case "all_to_all" | "all_to_all_single":
                for number, each in enumerate(parts):
                    each.fill_(self._rank * self._ranks + number + 1)

    def right(self) -> bool:
        """Tell whether this rank got what the others gave."""
        whole, part, rank, ranks = self.tensors["whole"], self.tensors["part"], self._rank, self._ranks
        total = ranks * (ranks + 1) // 2
        match self._operation:
            case "all_reduce":
                return _is(whole, total)
            case "reduce":
                return rank != 0 or _is(whole, total)
            case "broadcast":
                return _is(whole, 7)
            case "send_recv":
                return rank > 1 or _is(whole, 7)
            case "all_gather" | "all_gather_into_tensor" | "gather":
                return all(_is(each, number + 1) for number, each in enumerate(self._parts or []))
            case "scatter":
                return _is(part, rank + 1)
            case "reduce_scatter" | "reduce_scatter_tensor":
                return _is(part, (rank + 1) * total)
            case "all_to_all" | "all_to_all_single":
                return all(_is(each, number * ranks + rank + 1) for number, each in enumerate(self._others or []))
        return True

    def clear(self) -> None:
        """Write zeros everywhere."""
        for tensor in self.tensors.values():
            if tensor is not None:
                tensor.zero_()


def _is(tensor: torch.Tensor, value: float) -> bool:
    least, greatest = torch.aminmax(tensor)
    return bool(least == value and greatest == value)


class Call:
    """One operation by one engine, as this rank makes it; a rank that has no part in it has no text."""

    def __init__(self, text: str, names: dict[str, Any], trips: int = 1, *, device: str = "cpu") -> None:
        if text and device != "cpu":
            # Done when the GPU has done it.
            text, names = f"{text}; finish()", {**names, "finish": torch.cuda.synchronize}
        self._timer = timeit.Timer(text, globals=names) if text else None
        self._trips = trips

    def run(self, times: int) -> float:
        """Do it ``times`` times, and return the seconds that they took, by the way (half a round trip)."""
        return 0.0 if self._timer is None else self._timer.timeit(times) / self._trips


def start_mpi(engine: str) -> Any:
    """Initialise MPI and return mpi4py's module of it."""
    import mpi4py

    # One thread calls MPI here, and being told so spares it locks: mpi4py's default asks for more. Our own engine needs
    # that, and both are measured in one process.
    mpi4py.rc.thread_level = "multiple" if engine == "mpi" else "funneled"
    from mpi4py import MPI

    return MPI


class Engines:
    """The groups that a rank is in. All ranks make it, and call its methods, at the same time."""

    def __init__(self, plan: CollectiveConfig, rank: int, mpi: Any) -> None:
        self._plan = plan
        self._rank = rank
        self._mpi = mpi
        if plan.device != "cpu":
            torch.cuda.set_device(0)
        allhands.init_process_group("allhands", rank=rank, world_size=plan.ranks, timeout=_TIMEOUT_S)
        # Waiting for each other goes through shared memory, whatever is measured.
        self._ours: Any = allhands.group.WORLD if plan.engine == "shm" else self._other(plan.engine)
        self._gloo = torch_dist.new_group(backend="gloo") if "gloo" in plan.peers else None
        self._source, self._target = self._copies()
        self._slowest = torch.zeros((), dtype=torch.float64)

    def _other(self, engine: str) -> Any:
        """Return a group of ours on another engine. The setting names it; a group takes it when it is made."""
        before = os.environ.get("ALLHANDS_ENGINE")
        os.environ["ALLHANDS_ENGINE"] = engine
        try:
            return allhands.new_group(backend="allhands")
        finally:
            if before is None:
                del os.environ["ALLHANDS_ENGINE"]
            else:
                os.environ["ALLHANDS_ENGINE"] = before

    def _copies(self) -> tuple[Any, Any]:
        count = copied_bytes(max(self._plan.sizes)) // 4 if self._plan.floor else 0
        # Written, not zeros as they come: pages that nobody wrote are all the same page, and that one is cached.
        return torch.ones(count, device=self._plan.device), torch.ones(count, device=self._plan.device)

    def calls(self, buffers: Buffers, size: int) -> dict[str, Call]:
        """Return the calls to measure for ``buffers``: engines, and the floor's copies where it is wanted."""
        what = OPERATIONS[self._plan.operation]
        names = buffers.names()
        group = "" if self._plan.engine == "shm" else ", group=ours" if what.buffers else "group=ours"
        made = {"allhands": self._call(what.torch, {**names, "dist": allhands, "ours": self._ours}, group)}
        if self._gloo is not None:
            found = {**names, "dist": torch_dist, "gloo": self._gloo}
            # A first argument stands before the group everywhere but in barrier().
            made["gloo"] = self._call(what.torch, found, ", group=gloo" if what.buffers else "group=gloo")
        if "mpi" in self._plan.peers:
            made["mpi"] = self._call(what.mpi, self._mpi_names(names), "")
        if self._plan.floor and size:
            text, found = self._copy(copied_bytes(size))
            busy = bool(self._text(what.torch))
            for name, everyone in COPIES.items():
                mine = busy if everyone else self._rank == 0
                made[name] = Call(text if mine else "", found, device=self._plan.device)
        return made

    def _copy(self, size: int) -> tuple[str, dict[str, Any]]:
        """Return what copies ``size`` bytes on the device."""
        if self._plan.device != "cpu":
            return "to.copy_(origin)", {"to": self._target[: size // 4], "origin": self._source[: size // 4]}
        places = {"to": self._target.data_ptr(), "origin": self._source.data_ptr()}
        return "move(to, origin, count)", {"move": ctypes.memmove, "count": size, **places}

    def _call(self, texts: tuple[str, ...], names: dict[str, Any], group: str) -> Call:
        trips, device = OPERATIONS[self._plan.operation].trips, self._plan.device
        return Call(self._text(texts).format(group=group), names, trips, device=device)

    def _text(self, texts: tuple[str, ...]) -> str:
        """Return which of ``texts`` is this rank's; "" where it is idle."""
        return texts[0] if len(texts) == 1 else (*texts, *[""] * self._plan.ranks)[self._rank]

    def _mpi_names(self, names: dict[str, Any]) -> dict[str, Any]:
        mpi = self._mpi
        # A list of array and type is the form that mpi4py takes apart fastest.
        found: dict[str, Any] = {
            name: [tensor.numpy(), mpi.FLOAT] for name, tensor in names.items() if isinstance(tensor, torch.Tensor)
        }
        found = {"whole": None, **found, "MPI": mpi, "comm": mpi.COMM_WORLD}
        root = self._rank == 0
        found |= {"give": mpi.IN_PLACE if root else found["whole"], "take": found["whole"] if root else None}
        return found

    def meet(self) -> None:
        """Wait for all ranks. Ours for every engine: it sleeps, while MPI's would keep a core busy."""
        allhands.barrier()

    def slowest(self, seconds: float) -> float:
        """Return the longest of what the ranks measured; whoever has nothing to do waits here meanwhile."""
        self._slowest.fill_(seconds)
        allhands.all_reduce(self._slowest, op=allhands.ReduceOp.MAX)
        return float(self._slowest)

    def about(self) -> dict[str, str]:
        """Return the versions of what is measured."""
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
