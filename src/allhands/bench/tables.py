"""The tables of a bench, each with a legend that defines its columns, and the plot. Needs no torch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from .config import CollectiveConfig
from .operations import LEAST_JUDGED, OPERATIONS, bus_bandwidth

__all__ = ["aligned", "collective_table", "ddp_table", "plot", "rollcall_table", "size_text"]

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def aligned(groups: Sequence[tuple[str, Sequence[str]]], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table: its columns are right-aligned, in groups with a title and a rule each.

    The line of titles is omitted where no group has one.
    """
    cells = [[heading for _, headings in groups for heading in headings], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    blocks = []
    for title, headings in groups:
        count = len(headings)
        texts = ["  ".join(map(str.rjust, line[:count], widths)) for line in cells]
        cells, widths = [line[count:] for line in cells], widths[count:]
        width = max(len(title), len(texts[0]))
        heading, *body = [text.rjust(width) for text in texts]
        blocks.append([title.center(width), heading, "-" * width, *body])
    lines = ["   ".join(parts) for parts in zip(*blocks, strict=True)]
    return lines if lines[0].strip() else lines[1:]


def collective_table(plan: CollectiveConfig, rows: list[dict[str, Any]]) -> str:
    """Return the table of the rows of `collective.measure`, with its legend."""
    groups = [("", ["size"]), ("allhands", ["median", "least", "GB/s"])]
    groups += [(name, ["median", "least", "GB/s", "ratio"]) for name in plan.peers]
    if plan.floor:
        groups.append(("floor", ["memcpy", "stream", "time", "times"]))
    cells = []
    for row in rows:
        line = [size_text(row["bytes"])]
        for name in ("allhands", *plan.peers):
            values = row["engines"][name]
            line += [_us(values["median_s"]), _us(values["least_s"]), _giga(values["bus_bytes_per_s"])]
            line += [_number(values["ratio"])] if name in plan.peers else []
        cells.append(line + (_floor(row) if plan.floor else []))
    return "\n".join([*aligned(groups, cells), "", *_legend(plan, rows)])


def _floor(row: dict[str, Any]) -> list[str]:
    values = row.get("floor")
    if values is None:
        return ["-"] * 4
    judged = row["bytes"] >= LEAST_JUDGED
    return [
        _giga(values["memcpy_bytes_per_s"]),
        _giga(values["stream_bytes_per_s"]),
        _us(values["floor_s"]) if judged else "-",
        _number(values["ratio"]) if judged else "-",
    ]


def _number(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _us(seconds: float) -> str:
    return _number(seconds * 1e6)


def _giga(value: float) -> str:
    value /= 1e9
    return "-" if not value else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def size_text(size: int) -> str:
    """Return ``size`` in the largest unit that divides it."""
    if not size:
        return "-"
    for unit, name in _UNITS:
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size:,} B"


def _hosts(plan: CollectiveConfig) -> str:
    if plan.hosts == 1:
        return ""
    each = [sum(plan.host(rank) == host for rank in range(plan.ranks)) for host in range(plan.hosts)]
    return f" on {plan.hosts} hosts ({'+'.join(map(str, each))}; network namespaces of this machine)"


def _legend(plan: CollectiveConfig, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines that state what was measured and define the columns."""
    what = OPERATIONS[plan.operation]
    first = rows[0]
    crowded = "more ranks than cores" if plan.ranks > first["cores"] else "a core for each rank"
    kind = " of float32, SUM" if "reduce" in plan.operation else " of float32" if what.buffers else ""
    half = ", half of that round trip between ranks 0 and 1" if what.trips == 2 else ""
    ranks = f"{plan.ranks} ranks{_hosts(plan)}"
    lines = [
        f"{plan.operation}{kind}, {ranks}, {first['cores']} cores ({crowded}), one thread per rank"
        + (", tensors of one GPU, which all ranks share" if plan.device != "cpu" else ""),
        f"each call: {what.torch.format(group='')}{half}",
        f"median, least: us per call of {plan.rounds} rounds; the engines take turns in the same processes;",
        "  a round's time is that of the slowest rank",
    ]
    if what.buffers:
        whole = "all parts together" if what.divided else "one rank's tensor"
        lines.append(
            f"GB/s: bus bandwidth as nccl-tests has it, {what.bus.text}; S is {whole}, n the ranks, t the median"
        )
    if plan.peers:
        lines.append("ratio: the peer's median over allhands' (above 1: allhands is faster)")
    if plan.floor and what.buffers:
        lines += [
            "memcpy: GB/s that rank 0 moves when it copies S bytes alone; stream: GB/s of each rank when all copy",
            "  (a copy of S bytes loads and stores 2 S; below 64 KiB it is one of 64 KiB, in the cache)",
            f"time: the floor in us: {what.staged.text},",
            "  which is what the busiest rank loads and stores in the staged scheme, over stream",
            "times: allhands' median over the floor; not given below 64 KiB, where bytes cost less than calls",
        ]
    lines.append(
        f"load before the start: {first['load_before']:.2f} (other work slows engines that spin, as MPI, most)"
    )
    versions = "; ".join(
        f"{name}: {values['version']}" for name, values in first["engines"].items() if values["version"]
    )
    return [*lines, versions] if versions else lines


# Plot -------------------------------------------------------------------------------------------------------

# More labels overlap.
_MOST_LABELS = 8


def plot(plan: CollectiveConfig, rows: list[dict[str, Any]], path: str) -> None:
    """Plot ``rows`` into ``path``, whose suffix is the format (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    # Not pyplot, which needs a display.
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    sizes = [max(1, row["bytes"]) for row in rows]
    for name in ("allhands", *plan.peers):
        of = [row["engines"][name] for row in rows]
        style = {"marker": "o", "linewidth": 2.5 if name == "allhands" else 1.5, "label": name}
        times.plot(sizes, [values["median_s"] * 1e6 for values in of], **style)
        speeds.plot(sizes, [values["bus_bytes_per_s"] / 1e9 for values in of], **style)
    floors = [row for row in rows if "floor" in row and row["bytes"] >= LEAST_JUDGED]
    if floors:
        at = [row["bytes"] for row in floors]
        times.plot(at, [row["floor"]["floor_s"] * 1e6 for row in floors], "k--", label="floor")
        limit = [
            bus_bandwidth(plan.operation, plan.ranks, row["bytes"], row["floor"]["floor_s"]) / 1e9 for row in floors
        ]
        speeds.plot(at, limit, "k--", label="floor")
    step = -(-len(sizes) // _MOST_LABELS)
    for axes, words in ((times, "median, us"), (speeds, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::step], [size_text(row["bytes"]) for row in rows[::step]], rotation=30)
        axes.minorticks_off()
        axes.set_ylabel(words)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    times.set_yscale("log")
    figure.suptitle(f"{plan.operation}, float32, {plan.ranks} ranks on {rows[0]['cores']} cores")
    figure.savefig(path, dpi=120)


# Training ---------------------------------------------------------------------------------------------------

_CLASSES = ("allhands", "torch", "gloo")
_DDP_GROUPS = (
    ("", ("model", "ranks")),
    ("step (ms)", _CLASSES),
    ("communication (ms)", (*_CLASSES, "ratio")),
    ("core time (ms)", (*_CLASSES, "ratio")),
    ("bare step (ms)", ("single", "apart", "lockstep")),
    ("overhead", ("single", "apart")),
    ("memory (MiB)", _CLASSES),
)


def ddp_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the rows of `training.measure`, with its legend."""
    return "\n".join([*aligned(_DDP_GROUPS, [_ddp_cells(row) for row in rows]), "", *_ddp_legend(rows[0])])


def _ddp_cells(row: dict[str, Any]) -> list[str]:
    who = row["contestants"]
    held = row.get("memory_bytes", {})
    return [
        row["model"],
        str(row["ranks"]),
        *(f"{who[each]['step_s'] * 1e3:.2f}" for each in _CLASSES),
        *_compared(who, "communication"),
        *_compared(who, "core"),
        *(f"{row[f'{bare}_s'] * 1e3:.2f}" for bare in ("single", "apart", "lockstep")),
        f"{row['overhead']:.1%}",
        f"{row['overhead_apart']:.1%}",
        *(f"{held[each] / 2**20:.1f}" if each in held else "-" for each in _CLASSES),
    ]


def _compared(who: dict[str, Any], name: str) -> list[str]:
    """Return the milliseconds of ``name`` for each contestant, and the ratio of Gloo's to ours."""
    ratio = who["gloo"][f"{name}_ratio"]
    found = [_with_error(who[each], name) for each in _CLASSES]
    return [*found, "-" if ratio is None else f"{ratio:.1f}"]


def _with_error(values: dict[str, Any], name: str) -> str:
    """Return milliseconds, with their standard error where it is known."""
    error = values.get(f"{name}_error_s")
    return f"{values[f'{name}_s'] * 1e3:.2f}" + ("" if error is None else f" ±{error * 1e3:.2f}")


def _ddp_legend(row: dict[str, Any]) -> list[str]:
    jobs = f", median of {row['memory_runs']} jobs" if "memory_runs" in row else ""
    return [
        "allhands: our DistributedDataParallel on our backend; torch: torch's on our backend; gloo: torch's on Gloo",
        f"step: median of {row['rounds']} rounds, slowest rank; torch's gradients are views; ratio: Gloo's over ours",
        "communication: step less that of the bare module whose ranks only wait for each other, middle half of all,",
        "  and its standard error; transformer-16 has the transformer's gradients and fewer tokens: less varies",
        "core time: processor time of a rank in a step (all its threads), less that of the bare module",
        "single: the bare module on one rank while the others sleep; apart: on all ranks, without synchronisation",
        "lockstep: apart, with a barrier after each backward; overhead: our least step over single's, and over apart's",
        f"memory: what all ranks held at most while training, shared pages once, over what they held before{jobs}",
        f"{row['cores']} cores, one thread per rank, load before {row['load_before']:.1f}",
    ]


# Roll call --------------------------------------------------------------------------------------------------

# The reference of a ratio: above this size the fixed costs are negligible in the time per member.
_REFERENCE = 1024

# title, unit, key, decimals
_ROLLCALL_COLUMNS = (
    ("", "members", "members", 0),
    ("roll call", "s", "rollcall_s", 3),
    ("roll call", "us/member", "rollcall_us_per_member", 0),
    ("coordinator", "CPU us/member", "coordinator_cpu_us_per_member", 0),
    ("memory", "KiB/member", "kib_per_member", 1),
    ("store", "us/member", "store_us_per_member", 0),
    ("death reported", "s", "death_s", 3),
    ("all left", "s", "leave_s", 3),
)


def rollcall_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the rows of `rollcall.run`, and how the time per member grows."""
    if not rows:
        return "nothing was measured"
    groups = [
        (title, [unit for _, unit, _, _ in columns])
        for title, columns in itertools.groupby(_ROLLCALL_COLUMNS, key=operator.itemgetter(0))
    ]
    cells = [[f"{row[key]:,.{decimals}f}" for _, _, key, decimals in _ROLLCALL_COLUMNS] for row in rows]
    legend = (
        f"medians of {rows[0]['rounds']}; {rows[0]['transport']}; one process simulates all members, and the times "
        "include its work; CPU and memory are the coordinator's alone"
    )
    return "\n".join([*aligned(groups, cells), "", *_growth(rows), legend])


def _growth(rows: list[dict[str, Any]]) -> list[str]:
    ordered = sorted(rows, key=lambda row: int(row["members"]))
    largest = ordered[-1]
    smaller = [row for row in ordered if row["members"] < largest["members"]]
    if not smaller:
        return []
    base = next((row for row in smaller if row["members"] == _REFERENCE), smaller[0])
    names = (
        ("roll call", "rollcall_us_per_member"),
        ("its CPU", "coordinator_cpu_us_per_member"),
        ("store", "store_us_per_member"),
        ("death", "death_us_per_member"),
        ("leaving", "leave_us_per_member"),
    )
    ratios = ", ".join(f"{name} {largest[key] / base[key]:.2f}" for name, key in names if base[key])
    return [
        f"time per member at {largest['members']:,} over that at {base['members']:,} (1 is linear growth): {ratios}",
    ]
