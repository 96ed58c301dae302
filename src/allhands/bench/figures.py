"""The table that `allhands bench ddp` prints."""

from __future__ import annotations

from typing import Any

__all__ = ["figures"]

_MIB = 2**20

_HEADINGS = (
    ("", "model"),
    ("", "ranks"),
    ("step (ms)", "allhands"),
    ("", "torch"),
    ("", "gloo"),
    ("communication (ms)", "allhands"),
    ("", "torch"),
    ("", "gloo"),
    ("", "ratio"),
    ("core time (ms)", "allhands"),
    ("", "torch"),
    ("", "gloo"),
    ("", "ratio"),
    ("bare step (ms)", "single"),
    ("", "apart"),
    ("", "lockstep"),
    ("overhead", "single"),
    ("", "apart"),
    ("memory (MiB)", "allhands"),
    ("", "torch"),
    ("", "gloo"),
)


def figures(rows: list[dict[str, Any]]) -> str:
    """Put ``rows`` of `training.race` into an aligned table with a legend."""
    cells = [[top for top, _ in _HEADINGS], [low for _, low in _HEADINGS], *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells[1:]) for column in range(len(_HEADINGS))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells[1:]]
    top = ""
    for column, text in enumerate(cells[0]):
        if text:
            top = top.ljust(sum(widths[:column]) + 2 * column) + text
    lines.insert(0, top)
    lines.insert(2, "-" * len(lines[1]))
    return "\n".join([*lines, "", *_legend(rows[0])])


def _cells(row: dict[str, Any]) -> list[str]:
    who = row["contestants"]
    order = ("allhands", "torch", "gloo")
    held = row.get("memory_bytes", {})
    return [
        row["model"],
        str(row["ranks"]),
        *(f"{who[each]['step_s'] * 1e3:.2f}" for each in order),
        *_compared(who, "communication"),
        *_compared(who, "core"),
        f"{row['single_s'] * 1e3:.2f}",
        f"{row['apart_s'] * 1e3:.2f}",
        f"{row['lockstep_s'] * 1e3:.2f}",
        f"{row['overhead']:.1%}",
        f"{row['overhead_apart']:.1%}",
        *(f"{held[each] / _MIB:.1f}" if each in held else "-" for each in order),
    ]


def _compared(who: dict[str, Any], name: str) -> list[str]:
    """Return what ``name`` takes of each contestant, and how many times ours Gloo's is."""
    ratio = who["gloo"][f"{name}_ratio"]
    found = [_with_error(who[each], name) for each in ("allhands", "torch", "gloo")]
    return [*found, "-" if ratio is None else f"{ratio:.1f}"]


def _with_error(values: dict[str, Any], name: str) -> str:
    """Return milliseconds, and what they may be wrong by where that is known."""
    error = values.get(f"{name}_error_s")
    return f"{values[f'{name}_s'] * 1e3:.2f}" + ("" if error is None else f" ±{error * 1e3:.2f}")


def _legend(row: dict[str, Any]) -> list[str]:
    jobs = f", median of {row['memory_runs']} jobs" if "memory_runs" in row else ""
    return [
        "allhands: our DistributedDataParallel on our backend; torch: torch's on our backend; gloo: torch's on Gloo",
        f"step: median of {row['rounds']} rounds, slowest rank; torch's gradients are views; ratio: Gloo's over ours",
        "communication: step less that of the bare module whose ranks only wait for each other, middle half of all,",
        "  and its standard error; transformer-16 has the transformer's gradients and fewer tokens: less varies",
        "core time: what all threads of a rank compute in a step, less those of the bare module",
        "single: the bare module on one rank while the others sleep; apart: on all ranks, with no word between them",
        "lockstep: apart, with a barrier after each backward; overhead: our least step over single's, and over apart's",
        f"memory: what all ranks held at most while training, shared pages once, over what they held before{jobs}",
        f"{row['cores']} cores, one thread per rank, load before {row['load_before']:.1f}",
    ]
