"""Training steps of our DistributedDataParallel and torch's, in turn in the same processes, and the memory of each."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..control.waiting_line import WaitingLine
from .config import DdpConfig
from .processes import RankProcesses, cores

__all__ = ["Sample", "compare", "measure", "memory", "row"]

_Notify = Callable[[str], None]

# How many times memory is measured, each time in new processes: of the same job it varies by a tenth (seven of the CNN
# with 2 ranks: 66 to 79 MiB), with where the allocator happens to put things. The median counts.
_MEMORY_RUNS = 3


class Sample(NamedTuple):
    """Seconds of a step on the slowest rank: of all steps, of the shortest; and the core time of one, of all ranks."""

    step_s: float
    least_s: float
    cores_s: float


def measure(asked: DdpConfig, *, with_memory: bool) -> list[dict[str, Any]]:
    """Return a row for each model of ``asked``, and show what is being done on standard error."""
    progress = WaitingLine("allhands bench ddp")
    try:
        rows = compare(asked, progress)
        for who in ("allhands", "torch", "gloo") if with_memory else ():
            progress(f"memory of {who} on {asked.ranks} ranks")
            found = [memory(asked, who) for _ in range(min(_MEMORY_RUNS, asked.rounds))]
            for each in rows:
                each["memory_runs"] = len(found)
                each.setdefault("memory_bytes", {})[who] = statistics.median(run[each["model"]] for run in found)
    finally:
        progress.done()
    return rows


def compare(asked: DdpConfig, notify: _Notify = lambda _: None) -> list[dict[str, Any]]:
    """Run the ranks of ``asked``, and return a row for each model, without memory. Raises engine-failed."""
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    with RankProcesses(asked, program="ddp_rank") as crew:
        for words in crew.words():
            if "spells" in words:
                spells = {who: [Sample(*each) for each in told] for who, told in words["spells"].items()}
                found = row(asked, words["size"], spells, words["model"])
                rows.append({**found, "load_before": load})
            elif "round" in words:
                notify(f"{words['size']} on {asked.ranks} ranks: round {words['round']} of {asked.rounds}")
    return rows


def row(asked: DdpConfig, model: str, spells: dict[str, list[Sample]], about: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured of one model in each round, by contestant.

    What communication takes is the step less that of the bare module whose ranks only wait for each other (lockstep):
    what they wait for whoever is late is nobody's doing, all else is: hooks, copies, the broadcast of buffers, cores
    that an engine's threads take from backward. The difference is taken in each round, between neighbours in time; the
    mean of its middle half is what counts. Core time is what all threads of a rank compute in a step, less that of the
    bare module.
    """
    single, apart = (min(each.least_s for each in spells[who]) for who in ("single", "apart"))
    contestants: dict[str, dict[str, Any]] = {}
    for who in ("allhands", "torch", "gloo"):
        communication, error = _more(*([each.step_s for each in spells[one]] for one in (who, "lockstep")))
        core, _ = _more(*([each.cores_s for each in spells[one]] for one in (who, "apart")))
        contestants[who] = {
            "step_s": statistics.median(each.step_s for each in spells[who]),
            "least_s": min(each.least_s for each in spells[who]),
            "communication_s": communication,
            "communication_error_s": error,
            "core_s": core / asked.ranks,
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
        "lockstep_s": statistics.median(each.step_s for each in spells["lockstep"]),
        "overhead": ours["least_s"] / single - 1,
        "overhead_apart": ours["least_s"] / apart - 1,
    }


def _more(these: list[float], those: list[float]) -> tuple[float, float | None]:
    """Return how much more ``these`` are than ``those`` of the same rounds, and what that may be wrong by.

    It is the mean of the middle half and its standard error, None where one round is all there is to it. What others
    do on the machine makes some differences wild, which do not count; the mean of the rest varies less from run to run
    than the median.
    """
    more = sorted(this - that for this, that in zip(these, those, strict=True))
    wild = min(-(-len(more) // 4), (len(more) - 1) // 2)
    middle = more[wild : len(more) - wild]
    # Each wild one as far off as the last that counts: what Tukey and McLaughlin take for the spread of such a mean.
    kept = [middle[0]] * wild + middle + [middle[-1]] * wild
    error = statistics.stdev(kept) * len(kept) ** 0.5 / len(middle) if len(middle) > 1 else None
    return statistics.fmean(middle), error


def memory(asked: DdpConfig, who: str) -> dict[str, float]:
    """Return by model how many bytes more than before the ranks held at most, all together, while ``who`` trained.

    Of what is a rank's own its peak counts, which the kernel keeps; what ranks share counts once.
    """
    found: dict[str, float] = {}
    for model in asked.models:
        alone = DdpConfig(asked.ranks, (model,), 1, who=(who,))
        before = 0
        with RankProcesses(alone, program="ddp_rank") as crew:
            for words in crew.words():
                if words.get("phase") == "before":
                    before = sum(map(_begin, crew.pids.values()))
                elif words.get("phase") == "after":
                    found[model] = float(sum(_most(pid, "VmHWM") for pid in crew.pids.values()) - before)
    return found


def _begin(pid: int) -> int:
    """Let the kernel forget the peak of a process so far; return what it holds now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    return _most(pid, "VmRSS")


def _most(pid: int, own: str) -> int:
    """Return the bytes of a process: by ``own`` what is its own, and its part of what others have too."""
    resident = _sizes(f"/proc/{pid}/status")
    shared = _sizes(f"/proc/{pid}/smaps_rollup")
    return resident[own] - resident["RssShmem"] - resident["RssFile"] + shared["Pss_Shmem"] + shared["Pss_File"]


def _sizes(path: str) -> dict[str, int]:
    """Return the sizes in a table of the kernel's, in bytes."""
    lines = (line.split() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in lines}
