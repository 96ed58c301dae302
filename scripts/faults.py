"""Write docs/faults.md from what the laboratory measured: tests/soak/test_faults.py leaves it in build/faults."""

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
    "during": "While it works",
    "after": "Before and after its life",
    "doctor": "Found by `allhands doctor` only",
}

HEAD = """# Faults: torch alone and allhands

{count} faults, each injected for real: processes, signals, ports, files, limits, and network namespaces as machines
with a firewall, a cable, a clock and a name server. The same script ran once with torch.distributed alone and once with
allhands, on Gloo, with `timeout` {timeout:g} s unless stated, torch {torch}, on {on}. Only versions are faked, at the
handshake. Where torch has nothing that could be wrong, its column says so.

The seconds are those of the slowest rank that is concerned: since the call where the group does not form, since the
fault where a rank is hit in the middle. Where ranks under torch are told different things, each has its own words, and
`[0,2]` says which ranks; "nothing in 30 s" means that the watch ended there. For allhands, every rank that is concerned
got a diagnosis of the cause with the right rank or host within its time; that is what `tests/soak/test_faults.py`
asserts. {certain} causes are certain and told within 3 s, {slowest} at the latest; where a rank may still come, the
deadline is what tells, and the cause is not certain.

"Its fix" is what allhands' own words say under `fix:`, or the doctor's. Each was done: the fault was injected once
more, just what the words name was changed, and the job formed its group, or the doctor found nothing any more
({mended} faults). Where nothing can be changed in the job (a process was killed, a cable pulled), the words say to
run it again, and that was done ({again}). `make faults` makes this page; the times are of a machine of two cores that
did other things too.
"""

TITLES = "| fault | torch alone says | after | allhands says | after | its fix | done |\n" + "| --- " * 7 + "|"

# A fix of several ways is cut here; the first of them stand before.
LONG = 330


def cell(text: str) -> str:
    """Return ``text`` as the content of one cell."""
    for mark in "\\`|*_<>[]":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def seconds(value: float) -> str:
    """Return a time as people read it."""
    return f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def row(fault: dict[str, Any], usual_s: float) -> str:
    """Return one line of the table."""
    alone, ours = fault["torch_alone"], fault["allhands"]
    says = ours["says"].partition("   [")[0]
    who = {"doctor": " (doctor)", "run": " (`allhands run`)"}.get(ours["by"], "")
    note = "" if fault["timeout_s"] == usual_s or "timeout" in fault["name"] else f" (timeout {fault['timeout_s']:g} s)"
    certain = "" if fault["certain"] else ", not certain"
    fix = " ".join(ours["fix"].split())
    fix = fix if len(fix) <= LONG else fix[: LONG - 1].rstrip() + "…"
    done = "run again" if fault["again"] else "all green" if ours["by"] == "doctor" else "formed"
    return (
        f"| {cell(fault['name'])}{note} | {cell(alone['says'])} | {seconds(alone['after'])} "
        f"| `{ours['slug']}`{who}: {cell(says)} | {seconds(ours['after'])}{certain} | {cell(fix)} | {done} |"
    )


def main() -> int:
    """Write the page; 1 where nothing was measured."""
    faults = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(MEASURED.glob("*.json"))]
    if not faults:
        print("nothing was measured: run `make faults`", file=sys.stderr)
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
