"""Training steps of our DistributedDataParallel and torch's, in turn in the same processes, and the memory of each."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from ..control.progress import Progress
from .course import Course
from .crew import Crew, cores

__all__ = ["held", "measure", "race", "row"]

_Notify = Callable[[str], None]

# How often the memory of the ranks is looked at while they train: several times while all gradients are there.
_LOOK_S = 0.01


def measure(asked: Course, *, memory: bool) -> list[dict[str, Any]]:
    """Return a row for each model of ``asked``, and show what is being done on standard error."""
    progress = Progress("allhands bench ddp")
    try:
        rows = race(asked, progress)
        for who in ("allhands", "torch", "gloo") if memory else ():
            progress(f"memory of {who} on {asked.ranks} ranks")
            found = held(asked, who)
            for each in rows:
                each.setdefault("memory_bytes", {})[who] = found[each["model"]]
    finally:
        progress.done()
    return rows


def race(asked: Course, notify: _Notify = lambda _: None) -> list[dict[str, Any]]:
    """Run the ranks of ``asked``, and return a row for each model, without memory. Raises engine-failed."""
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    with Crew(asked, program="learner") as crew:
        for words in crew.words():
            if "times" in words:
                found = row(asked, words["size"], words["times"], words["cores"], words["model"])
                rows.append({**found, "load_before": load})
            elif "round" in words:
                notify(f"{words['size']} on {asked.ranks} ranks: round {words['round']} of {asked.rounds}")
    return rows


def row(
    asked: Course, model: str, times: dict[str, list[float]], cores_s: dict[str, list[float]], about: dict[str, Any]
) -> dict[str, Any]:
    """Return what was measured of one model: the seconds of a step in each round, by contestant, and its core time.

    What communication takes is the step less that of the bare module whose ranks only wait for each other (lockstep):
    what they wait for whoever is late is nobody's doing, all else is: hooks, copies, the broadcast of buffers, cores
    that an engine's threads take from backward. The difference is taken in each round, between neighbours in time; the
    mean of its middle half is what counts. Core time is what all threads of a rank compute in a step, less that of the
    bare module.
    """
    single, apart = (min(times[who]) for who in ("single", "apart"))
    contestants: dict[str, dict[str, Any]] = {}
    for who in ("allhands", "torch", "gloo"):
        contestants[who] = {
            "step_s": statistics.median(times[who]),
            "least_s": min(times[who]),
            "communication_s": _more(times[who], times["lockstep"]),
            "core_s": _more(cores_s[who], cores_s["apart"]) / asked.ranks,
        }
    ours = contestants["allhands"]
    for found in contestants.values():
        found["ratio"] = found["step_s"] / ours["step_s"]
        for name in ("communication", "core"):
            # None where ours is lost in the noise.
            mine = ours[f"{name}_s"]
            found[f"{name}_ratio"] = found[f"{name}_s"] / mine if mine > 0 else None
    return {
        "model": model,
        "ranks": asked.ranks,
        "cores": cores(),
        "rounds": asked.rounds,
        **about,
        "contestants": contestants,
        "single_s": single,
        "apart_s": apart,
        "lockstep_s": statistics.median(times["lockstep"]),
        "overhead": ours["least_s"] / single - 1,
        "overhead_apart": ours["least_s"] / apart - 1,
    }


def _more(these: list[float], those: list[float]) -> float:
    """Return how much more ``these`` are than ``those`` of the same rounds: the mean of the middle half.

    What others do on the machine makes some differences wild, which do not count; the mean of the rest varies less from
    run to run than the median.
    """
    more = sorted(this - that for this, that in zip(these, those, strict=True))
    wild = min(-(-len(more) // 4), (len(more) - 1) // 2)
    return statistics.fmean(more[wild : len(more) - wild])


def held(asked: Course, who: str) -> dict[str, float]:
    """Return by model how many bytes more than before the ranks held at most, all together, while ``who`` trained.

    Each page counts once, however many ranks share it (the kernel's proportional set size).
    """
    found: dict[str, float] = {}
    for model in asked.models:
        alone = Course(asked.ranks, (model,), 1, who=(who,))
        with Crew(alone, program="learner") as crew, _Looking(crew) as looking:
            for words in crew.words():
                if words.get("phase") == "before":
                    looking.begin()
                elif words.get("phase") == "after":
                    found[model] = looking.most()
    return found


class _Looking:
    """Looks at the memory of a crew's ranks in a thread of its own."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._before = 0
        self._most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self) -> None:
        """Count from what the ranks hold now."""
        self._before = self._most = _bytes(self._crew.pids.values())

    def most(self) -> float:
        """Return how much more than at `begin` they held at most."""
        return float(self._most - self._before)

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            if self._before:
                self._most = max(self._most, _bytes(self._crew.pids.values()))


def _bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
