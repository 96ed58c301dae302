"""Training steps of our DistributedDataParallel and torch's, in turn in the same processes, and the memory of each."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from ..control.waiting_line import WaitingLine
from .config import DdpConfig
from .processes import RankProcesses, cores

__all__ = ["Sample", "compare", "measure", "memory", "row"]

_Notify = Callable[[str], None]

# How many times memory is measured, each time in new processes. It varies by a tenth between runs of the same job
# (seven of the CNN with 2 ranks: 66 to 79 MiB) with the allocator's placement; the median counts.
_MEMORY_RUNS = 3


class Sample(NamedTuple):
    """Seconds of a step on the slowest rank: mean and shortest; and the processor time of a step on all ranks."""

    step_s: float
    least_s: float
    cores_s: float


def measure(asked: DdpConfig, *, with_memory: bool) -> list[dict[str, Any]]:
    """Return a row for each model of ``asked``; progress is shown on standard error."""
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
    with RankProcesses(asked, program="ddp_rank") as processes:
        for message in processes.messages():
            if "samples" in message:
                samples = {who: [Sample(*each) for each in found] for who, found in message["samples"].items()}
                rows.append({**row(asked, message["size"], samples, message["model"]), "load_before": load})
            else:
                notify(f"{message['size']} on {asked.ranks} ranks: round {message['round']} of {asked.rounds}")
    return rows


def row(asked: DdpConfig, model: str, samples: dict[str, list[Sample]], about: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one model from the samples of each contestant in each round.

    Communication is the step less the step of the bare module whose ranks only wait for each other (lockstep). It
    contains everything but the wait for late ranks: hooks, copies, the broadcast of buffers, and cores that an engine's
    threads take from backward. The difference is taken in each round, and the mean of its middle half counts. Core
    time is the processor time of all threads of a rank in a step, less that of the bare module.
    """
    single, apart = (min(each.least_s for each in samples[who]) for who in ("single", "apart"))
    contestants: dict[str, dict[str, Any]] = {}
    for who in ("allhands", "torch", "gloo"):
        communication, error = _more(*([each.step_s for each in samples[one]] for one in (who, "lockstep")))
        core, _ = _more(*([each.cores_s for each in samples[one]] for one in (who, "apart")))
        contestants[who] = {
            "step_s": statistics.median(each.step_s for each in samples[who]),
            "least_s": min(each.least_s for each in samples[who]),
            "communication_s": communication,
            "communication_error_s": error,
            "core_s": core / asked.ranks,
        }
    ours = contestants["allhands"]
    for found in contestants.values():
        found["ratio"] = found["step_s"] / ours["step_s"]
        for name in ("communication", "core"):
            # None where ours is below the noise.
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
        "lockstep_s": statistics.median(each.step_s for each in samples["lockstep"]),
        "overhead": ours["least_s"] / single - 1,
        "overhead_apart": ours["least_s"] / apart - 1,
    }


def _more(these: list[float], those: list[float]) -> tuple[float, float | None]:
    """Return the mean of the middle half of these - those, round by round, and its standard error (None: one round).

    Other work on the machine makes some differences wild; the mean without them varies less from run to run than the
    median.
    """
    more = sorted(this - that for this, that in zip(these, those, strict=True))
    wild = min(-(-len(more) // 4), (len(more) - 1) // 2)
    middle = more[wild : len(more) - wild]
    # The standard error of a trimmed mean is that of the winsorized sample (Tukey and McLaughlin).
    winsorized = [middle[0]] * wild + middle + [middle[-1]] * wild
    error = statistics.stdev(winsorized) * len(winsorized) ** 0.5 / len(middle) if len(middle) > 1 else None
    return statistics.fmean(middle), error


def memory(asked: DdpConfig, who: str) -> dict[str, float]:
    """Return by model the bytes that all ranks held at most while ``who`` trained, less those before."""
    found: dict[str, float] = {}
    for model in asked.models:
        with RankProcesses(DdpConfig(asked.ranks, (model,), 1, who=(who,)), program="ddp_rank") as processes:
            for message in processes.messages():
                found[model] = message["memory"]
    return found
