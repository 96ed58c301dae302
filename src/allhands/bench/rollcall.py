"""What a roll call costs: a real coordinator's process, and N members over real sockets from another process."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

from ..control.coordinator_process import Options, start
from ..control.rendezvous import random_socket_name
from ..control.waiting_line import WaitingLine
from ..errors import fail
from .config import RollCallConfig
from .processes import RankProcesses

__all__ = ["run"]

# The limit of one phase, which only ends a hang: milliseconds per thousand members are normal.
_PHASE_S = 120.0

_Notify = Callable[[str], None]


def run(
    members: list[int],
    rounds: int,
    *,
    transport: Literal["tcp", "unix"] = "tcp",
    notify: _Notify | None = None,
) -> list[dict[str, Any]]:
    """Measure a roll call for each number of ``members``, ``rounds`` times; return one row of medians for each.

    Each round is two jobs, each with a new coordinator: one ends by the death of a member, the other by the leaving of
    all. ``notify`` gets a line of progress; by default it is printed on standard error. Raises fd-limit where this
    machine does not allow that many sockets, ArgumentError for senseless numbers.
    """
    if min(members) < 2 or rounds < 1:
        raise fail(
            "invalid-argument",
            f"{min(members)} members in {rounds} rounds cannot be measured",
            who="allhands bench rollcall",
            fix="give at least 2 members and 1 round",
        )
    progress = WaitingLine("allhands bench rollcall")
    rows = []
    try:
        for number in members:
            samples: list[dict[str, float]] = []
            for turn in range(rounds):
                place = f"{number} members over {transport}, round {turn + 1} of {rounds}"
                jobs = [_job(number, transport, end, place, notify or progress) for end in ("death", "leave")]
                # Both jobs form: the slower one counts.
                samples.append({name: max(job.get(name, 0.0) for job in jobs) for name in jobs[0] | jobs[1]})
            rows.append(_row(number, rounds, transport, samples))
    finally:
        progress.done()
    return rows


def _job(members: int, transport: str, end: str, place: str, notify: _Notify) -> dict[str, float]:
    """Form and end one job; return what was measured."""
    notify(f"{place}: starting the coordinator")
    token = secrets.token_hex(16).encode()
    options = Options(
        unix=random_socket_name(), host="127.0.0.1" if transport == "tcp" else "", token=token, world_size=members
    )
    coordinator = start(options, time.monotonic() + _PHASE_S)
    try:
        address = (options.unix, coordinator.host, coordinator.port)
        plan = RollCallConfig(members, coordinator.pid, *address, token, end, _PHASE_S)
        measured: dict[str, float] = {}
        with RankProcesses(plan, program="simulated_members") as processes:
            for message in processes.words():
                if "measured" in message:
                    measured = message["measured"]
                else:
                    notify(f"{place}: {message['phase']}")
        return measured
    finally:
        coordinator.end(5.0)


def _row(members: int, rounds: int, transport: str, samples: list[dict[str, float]]) -> dict[str, Any]:
    middle = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    growth = statistics.median(sample["rss_after"] - sample["rss_before"] for sample in samples)
    row = {
        "members": members,
        "rounds": rounds,
        "transport": transport,
        "coordinator_cpu_us_per_member": middle["rollcall_cpu_s"] / members * 1e6,
        "coordinator_rss_before_kib": middle["rss_before"] / 1024,
        "coordinator_rss_after_kib": middle["rss_after"] / 1024,
        "kib_per_member": growth / 1024 / members,
    }
    for phase in ("rollcall", "store", "death", "leave"):
        row[f"{phase}_s"] = middle[f"{phase}_s"]
        row[f"{phase}_us_per_member"] = middle[f"{phase}_s"] / members * 1e6
    return row
