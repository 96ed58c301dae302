"""The picture of a bench: time and bus bandwidth over size, a line for each engine. Needs matplotlib, not torch."""

from __future__ import annotations

from typing import Any

from .config import Plan
from .memcpy_floor import LEAST_JUDGED
from .operations import OPERATIONS
from .tables import size_words

__all__ = ["draw"]

# More labels than this run into each other.
_MOST_LABELS = 8


def draw(plan: Plan, rows: list[dict[str, Any]], path: str) -> None:
    """Write the picture of ``rows`` to ``path``; its ending says which kind (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    # Not through pyplot, which looks for a screen.
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
        factor = OPERATIONS[plan.operation].factor(plan.ranks)
        limit = [factor * row["bytes"] / row["floor"]["floor_s"] / 1e9 for row in floors]
        speeds.plot(at, limit, "k--", label="floor")
    step = -(-len(sizes) // _MOST_LABELS)
    for axes, words in ((times, "median, us"), (speeds, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::step], [size_words(row["bytes"]) for row in rows[::step]], rotation=30)
        axes.minorticks_off()
        axes.set_ylabel(words)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    times.set_yscale("log")
    figure.suptitle(f"{plan.operation}, float32, {plan.ranks} ranks on {rows[0]['cores']} cores")
    figure.savefig(path, dpi=120)
