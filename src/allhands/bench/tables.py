"""The table of a bench of collectives, with a legend that says what each column is. Needs no torch."""

from __future__ import annotations

from typing import Any

from .config import Plan
from .memcpy_floor import LEAST_JUDGED
from .operations import OPERATIONS

__all__ = ["legend", "size_words", "table"]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def table(plan: Plan, rows: list[dict[str, Any]]) -> str:
    """Put ``rows`` of `collective.measure` into an aligned table with its legend."""
    groups = [("", ["size"])]
    groups += [(name, ["median", "least", "GB/s", *(["ratio"] if name in plan.peers else [])]) for name in _shown(plan)]
    if plan.floor:
        groups.append(("floor", ["memcpy", "stream", "time", "times"]))
    cells = [[headings for _, headings in groups]]
    cells += [
        [[size_words(row["bytes"])], *_engines(plan, row), *([_floor(row)] if plan.floor else [])] for row in rows
    ]
    widths = [
        [max(len(line[group][column]) for line in cells) for column in range(len(headings))]
        for group, (_, headings) in enumerate(groups)
    ]
    lines = [
        " | ".join("  ".join(map(str.rjust, part, wide)) for part, wide in zip(line, widths, strict=True))
        for line in cells
    ]
    top = " | ".join(
        name.center(len("  ".join("x" * w for w in wide))) for (name, _), wide in zip(groups, widths, strict=True)
    )
    return "\n".join([top.rstrip(), lines[0], "-" * len(lines[0]), *lines[1:], "", *legend(plan, rows)])


def _shown(plan: Plan) -> tuple[str, ...]:
    return ("allhands", *plan.peers)


def _engines(plan: Plan, row: dict[str, Any]) -> list[list[str]]:
    found = []
    for name in _shown(plan):
        values = row["engines"][name]
        cells = [_us(values["median_s"]), _us(values["least_s"]), _giga(values["bus_bytes_per_s"])]
        found.append([*cells, _times(values["ratio"])] if name in plan.peers else cells)
    return found


def _floor(row: dict[str, Any]) -> list[str]:
    values = row.get("floor")
    if values is None:
        return ["-"] * 4
    judged = row["bytes"] >= LEAST_JUDGED
    return [
        _giga(values["memcpy_bytes_per_s"]),
        _giga(values["stream_bytes_per_s"]),
        _us(values["floor_s"]) if judged else "-",
        _times(values["ratio"]) if judged else "-",
    ]


def _us(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _giga(value: float) -> str:
    value /= 1e9
    return "-" if not value else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def _times(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def size_words(size: int) -> str:
    """Return ``size`` in the largest unit that divides it."""
    if not size:
        return "-"
    for unit, name in _UNITS:
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size:,} B"


def _hosts(plan: Plan) -> str:
    if plan.hosts == 1:
        return ""
    each = [sum(plan.host(rank) == host for rank in range(plan.ranks)) for host in range(plan.hosts)]
    return f" on {plan.hosts} hosts ({'+'.join(map(str, each))}; network namespaces of this machine)"


def legend(plan: Plan, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines that say what was measured and what the columns mean."""
    what = OPERATIONS[plan.operation]
    first = rows[0]
    crowded = "more ranks than cores" if plan.ranks > first["cores"] else "a core for each rank"
    kind = " of float32, SUM" if "reduce" in plan.operation else " of float32" if what.buffers else ""
    half = ", half of that round trip between ranks 0 and 1" if what.trips == 2 else ""
    ranks = f"{plan.ranks} ranks{_hosts(plan)}"
    lines = [
        f"{plan.operation}{kind}, {ranks}, {first['cores']} cores ({crowded}), one thread per rank"
        + (", tensors of one GPU, which all ranks share" if plan.device != "cpu" else ""),
        f"each call: {what.torch[0].format(group='')}{half}",
        f"median, least: us per call of {plan.rounds} rounds; the engines take turns in the same processes;",
        "  a round's time is that of the slowest rank",
    ]
    if what.buffers:
        whole = "all parts together" if what.divided else "one rank's tensor"
        lines.append(f"GB/s: bus bandwidth as nccl-tests has it, {what.bus}; S is {whole}, n the ranks, t the median")
    if plan.peers:
        lines.append("ratio: the peer's median over allhands' (above 1: allhands is faster)")
    if plan.floor and what.buffers:
        lines += [
            "memcpy: GB/s that rank 0 moves when it copies S bytes alone; stream: GB/s of each rank when all copy",
            "  (a copy of S bytes loads and stores 2 S; below 64 KiB it is one of 64 KiB, in the cache)",
            f"time: the floor in us: {what.staged},",
            "  which is what the busiest rank loads and stores in the staged scheme, over stream",
            "times: allhands' median over the floor; not given below 64 KiB, where meetings cost more than bytes",
        ]
    lines.append(
        f"load before the start: {first['load_before']:.2f} (work of others slows engines that spin, MPI, most)"
    )
    versions = "; ".join(
        f"{name}: {values['version']}" for name, values in first["engines"].items() if values["version"]
    )
    return [*lines, versions] if versions else lines
