"""The table that `allhands bench` prints."""

from __future__ import annotations

from typing import Any

__all__ = ["render"]

# What a ratio is taken against: past this size fixed costs no longer show in the time per member.
_REFERENCE = 1024

# heading, unit, key, decimals
_COLUMNS = (
    ("members", "", "members", 0),
    ("roll call", "s", "rollcall_s", 3),
    ("", "us/member", "rollcall_us_per_member", 0),
    ("coordinator", "CPU us/member", "coordinator_cpu_us_per_member", 0),
    ("memory", "KiB/member", "kib_per_member", 1),
    ("store", "us/member", "store_us_per_member", 0),
    ("death told", "s", "death_s", 3),
    ("all left", "s", "leave_s", 3),
)


def render(rows: list[dict[str, Any]]) -> str:
    """Put ``rows`` of `rollcall.run` into an aligned table, and say how the time per member grows."""
    if not rows:
        return "nothing was measured"
    cells = [[heading for heading, _, _, _ in _COLUMNS], [unit for _, unit, _, _ in _COLUMNS]]
    cells += [[f"{row[key]:,.{decimals}f}" for _, _, key, decimals in _COLUMNS] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(2, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", *_growth(rows), _legend(rows[0])])


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


def _legend(row: dict[str, Any]) -> str:
    return (
        f"medians of {row['rounds']}; {row['transport']}; one process plays all members, so the times hold its work "
        "too; CPU and memory are the coordinator's alone"
    )
