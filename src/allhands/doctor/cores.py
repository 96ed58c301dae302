"""Cores against ranks and their threads: more threads than cores make every collective wait for who is not running."""

from __future__ import annotations

import os
from pathlib import Path

from ..diagnosis import count
from .finding import Finding, green, yellow
from .request import Case
from .resources import group_of

__all__ = ["available", "check"]

_SECTION = "resources"


def available() -> tuple[int, str]:
    """Return how many cores this process may use, and what says so."""
    cores = len(os.sched_getaffinity(0))
    why = f"{os.cpu_count()} in all" if cores == os.cpu_count() else f"this process may use {cores} of {os.cpu_count()}"
    for folder in group_of("cpu"):
        quota = _quota(folder)
        # A part of a core still runs one thread at a time.
        if quota is not None and max(1, round(quota)) < cores:
            cores, why = max(1, round(quota)), f"the control group {folder} may use {quota:g}"
    return cores, why


def _quota(folder: Path) -> float | None:
    try:
        used, _, period = (folder / "cpu.max").read_text(encoding="ascii").partition(" ")
    except OSError:
        try:
            used = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        except OSError:
            return None
    if not used.strip().isdecimal() or not period.strip().isdecimal():
        return None  # "max", or -1: no limit.
    return int(used) / int(period)


def check(case: Case) -> list[Finding]:
    """Compare cores with ranks and OMP_NUM_THREADS."""
    cores, why = available()
    text = case.env.get("OMP_NUM_THREADS", "").strip()
    threads = int(text) if text.isdecimal() and int(text) > 0 else None
    if text and threads is None and not all(part.strip().isdecimal() for part in text.split(",")):
        return [
            yellow(
                _SECTION,
                "cores",
                "too-few-cores",
                f"OMP_NUM_THREADS={text} is not a number: every rank starts a thread for each core",
                why=f"{count(cores, 'core')} ({why})",
                fix="give a number, or unset it",
                commands=("export OMP_NUM_THREADS=1",),
            )
        ]
    ranks = case.local_ranks
    if ranks is None:
        return [green(_SECTION, "cores", count(cores, "core"), why, cores=cores)]
    share = max(1, cores // ranks)
    each = threads if threads is not None else cores
    said = f"OMP_NUM_THREADS={threads}" if threads is not None else "OMP_NUM_THREADS is not set"
    if ranks > cores:
        return [
            yellow(
                _SECTION,
                "cores",
                "too-few-cores",
                f"{count(ranks, 'rank')} on {count(cores, 'core')}",
                why=f"{why}; each collective waits for ranks that have no core at that moment",
                fix=f"start at most {count(cores, 'rank')} here, or give the job more cores",
                commands=(f"allhands run -n {cores} …",),
            )
        ]
    if ranks > 1 and ranks * each > cores:
        return [
            yellow(
                _SECTION,
                "cores",
                "too-few-cores",
                f"{ranks} ranks with {count(each, 'thread')} each on {count(cores, 'core')}",
                why=f"{said}, and {why}",
                fix=f"give each rank its share: OMP_NUM_THREADS={share} (allhands run and torchrun set 1)",
                commands=(f"export OMP_NUM_THREADS={share}",),
            )
        ]
    return [green(_SECTION, "cores", f"{count(cores, 'core')} for {count(ranks, 'rank')}", said, cores=cores)]
