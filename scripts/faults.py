"""Write docs/faults.md from the measurements of tests/soak/test_faults.py in build/faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "build" / "faults"
PAGE = ROOT / "docs" / "faults.md"

PARTS = {
    "before": "Before the group is formed",
    "during": "While the group exists",
    "after": "Without a group",
    "doctor": "Found by `allhands doctor` only",
}

HEAD = """# Faults: torch alone and allhands

{count} faults, each injected for real: processes, signals, ports, files, limits, and network namespaces as machines
with a firewall, a cable, a clock and a name server. The same script ran once with torch.distributed alone and once with
allhands, on Gloo, with `timeout` {timeout:g} s unless stated, torch {torch}, on {on}. Only versions are faked, at the
handshake. If torch has no counterpart of the fault, its column states that.

The seconds are those of the slowest rank concerned: since the call if the group does not form, since the fault
otherwise. If ranks under torch report different errors, each is listed, with its ranks in brackets as `[0,2]`; "nothing
in 30 s" means that the observation ended there. With allhands, every rank concerned got a diagnosis of the cause with
the right rank or host within its time; `tests/soak/test_faults.py` asserts that. {certain} causes are certain and
reported within 3 s, {slowest} at the latest; if a rank may still arrive, the report is made at the deadline
and the cause is not certain.

"Fix" is the text that allhands or its doctor prints under `fix:`. Each fix was applied: the fault was injected again,
only what the text names was changed, and the job formed its group, or the doctor found nothing ({mended} faults). If
nothing can be changed in the job (a process was killed, a cable pulled), the text recommends to run it again, and that
was done ({again}). `make faults` writes this page; the times are of a machine of two cores with other load.
"""

TITLES = "| fault | torch alone reports | after | allhands reports | after | fix | result |\n" + "| --- " * 7 + "|"

# A longer fix is cut here; the preferred alternatives are its first.
LONG = 330


def cell(text: str) -> str:
    """Return ``text`` as the content of one cell."""
    for mark in "\\`|*_<>[]":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def seconds(value: float) -> str:
    """Return a time with two or three digits."""
    return f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def row(fault: dict[str, Any], usual_s: float) -> str:
    """Return one line of the table."""
    alone, ours = fault["torch_alone"], fault["allhands"]
    says = ours["says"].partition("   [")[0]
    by = {"doctor": " (doctor)", "run": " (`allhands run`)"}.get(ours["by"], "")
    note = "" if fault["timeout_s"] == usual_s or "timeout" in fault["name"] else f" (timeout {fault['timeout_s']:g} s)"
    certain = "" if fault["certain"] else ", not certain"
    fix = " ".join(ours["fix"].split())
    fix = fix if len(fix) <= LONG else fix[: LONG - 1].rstrip() + "…"
    done = "run again" if fault["again"] else "all green" if ours["by"] == "doctor" else "formed"
    return (
        f"| {cell(fault['name'])}{note} | {cell(alone['says'])} | {seconds(alone['after'])} "
        f"| `{ours['slug']}`{by}: {cell(says)} | {seconds(ours['after'])}{certain} | {cell(fix)} | {done} |"
    )


def main() -> int:
    """Write the page; return 1 if there are no measurements."""
    faults = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(MEASURED.glob("*.json"))]
    if not faults:
        print("no measurements: run `make faults`", file=sys.stderr)
        return 1
    usual_s = min(fault["timeout_s"] for fault in faults)
    versions = ", ".join(sorted({fault["torch"] for fault in faults}))
    days = ", ".join(sorted({fault["on"] for fault in faults}))
    certain = [fault["allhands"]["after"] for fault in faults if fault["certain"]]
    text = HEAD.format(
        count=len(faults),
        timeout=usual_s,
        torch=versions,
        on=days,
        certain=len(certain),
        slowest=seconds(max(certain)),
        mended=sum(not fault["again"] for fault in faults),
        again=sum(fault["again"] for fault in faults),
    )
    for when, title in PARTS.items():
        rows = [row(fault, usual_s) for fault in faults if fault["when"] == when]
        if rows:
            text += f"\n## {title}\n\n{TITLES}\n" + "\n".join(rows) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(faults)} faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
