"""Collectives, ours and those of other engines, in turn in the same processes. Needs no torch."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .config import CollectiveConfig
from .operations import COPIES, OPERATIONS, bus_bandwidth, copy_speed, floor_s
from .processes import RankProcesses, cores
from .tables import size_text

__all__ = ["measure", "progress_bar", "row"]

_Notify = Callable[[int, int, int], None]


def measure(plan: CollectiveConfig, notify: _Notify = lambda _size, _round, _done: None) -> list[dict[str, Any]]:
    """Run the ranks of ``plan``, and return a row for each size.

    ``notify`` gets the size, the round that is done, and the number of rounds done in all; nothing is measured while it
    runs. Raises engine-failed, with the output of the ranks, where one dies or hangs.
    """
    rows: list[dict[str, Any]] = []
    done = 0
    # Work of others slows engines that spin most, so the table shows it.
    load = os.getloadavg()[0]
    with RankProcesses(plan) as processes:
        for message in processes.messages():
            if "times" in message:
                found = row(plan, message["size"], message["times"], message["versions"])
                rows.append({**found, "load_before": load})
            else:
                done += 1
                notify(message["size"], message["round"], done)
    return rows


def row(plan: CollectiveConfig, size: int, times: dict[str, list[float]], versions: dict[str, str]) -> dict[str, Any]:
    """Return the result of one size: each engine, and the floor where copies were timed.

    ``times`` are the seconds of one call on the slowest rank, in each round.
    """
    ours = statistics.median(times["allhands"])
    engines = {}
    for name in ("allhands", *plan.peers):
        median, least = statistics.median(times[name]), min(times[name])
        engines[name] = {
            "version": versions.get(name, ""),
            "median_s": median,
            "least_s": least,
            "bus_bytes_per_s": bus_bandwidth(plan.operation, plan.ranks, size, median),
            "ratio": median / ours,
        }
    found: dict[str, Any] = {
        "operation": plan.operation,
        "ranks": plan.ranks,
        "hosts": plan.hosts,
        "cores": cores(),
        "bytes": size,
        "rounds": plan.rounds,
        "engines": engines,
    }
    if set(COPIES) <= set(times):
        memcpy, stream = (statistics.median(times[name]) for name in ("memcpy", "stream"))
        least = floor_s(plan.operation, plan.ranks, size, stream)
        found["floor"] = {
            "memcpy_bytes_per_s": copy_speed(size, memcpy),
            "stream_bytes_per_s": copy_speed(size, stream),
            "moved_bytes": OPERATIONS[plan.operation].staged.value(size, plan.ranks),
            "floor_s": least,
            "ratio": ours / least,
        }
    return found


@contextmanager
def progress_bar(plan: CollectiveConfig) -> Iterator[Callable[[int, int, int], None]]:
    """Show a bar on standard error, if that is a terminal, for a block; yields the ``notify`` of `measure`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, terminal = Console(stderr=True), sys.stderr.isatty()
    # It must not refresh by a thread: that would draw while ranks are measured, on one of their cores.
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not terminal) as shown:
        total = len(plan.sizes) * plan.rounds
        task = shown.add_task(f"{plan.operation}: starting {plan.ranks} ranks", total=total)
        shown.refresh()

        def notify(size: int, turn: int, done: int) -> None:
            words = f"{plan.operation} {size_text(size)}, round {turn} of {plan.rounds}"
            shown.update(task, description=words, completed=done, refresh=True)

        yield notify
