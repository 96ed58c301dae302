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
with a firewall, a cable and a name server. The same script ran once with torch.distributed alone and once with
allhands, on Gloo, with `timeout` {timeout:g} s unless stated, torch {torch}, on {on}. Only versions are faked, at the
handshake.

The seconds are those of the slowest rank that is concerned: since the call where the group does not form, since the
fault where a rank is hit in the middle. Where ranks under torch are told different things, each has its own words, and
`[0,2]` says which ranks; "nothing in 30 s" means that the watch ended there. For allhands, every rank that is concerned
got a diagnosis of the cause with the right rank or host within its time; that is what `tests/soak/test_faults.py`
asserts. A cause that is certain is told within 3 s; where a rank may still come, the deadline is what tells.

"Fix" says what makes the job work, where that is a change of the job or the machine; "seen" means that the same job ran
again with it and formed its group, or that the doctor found nothing any more. `make faults` makes this page; the times
are of a machine of two cores that did other things too.
"""

TITLES = "| fault | torch alone says | after | allhands says | after | fix |\n" + "| --- " * 6 + "|"


def cell(text: str) -> str:
    """Return ``text`` as the content of one cell."""
    for mark in "\\`|*_<>[]":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def seconds(value: float | None) -> str:
    """Return a time as people read it."""
    if value is None:
        return ""
    return f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def row(fault: dict[str, Any], usual_s: float) -> str:
    """Return one line of the table."""
    alone, ours = fault["torch_alone"], fault["allhands"]
    says = ours["says"].partition("   [")[0]
    who = " (doctor)" if ours.get("doctor") else ""
    note = "" if fault["timeout_s"] == usual_s else f" (timeout {fault['timeout_s']:g} s)"
    certain = "" if fault["certain"] else ", not certain"
    fix = f"{cell(fault['fix'])}{' (seen)' if fault['fix_works'] else ''}" if fault["fix"] else ""
    return (
        f"| {cell(fault['name'])}{note} | {cell(alone['says'])} | {seconds(alone['after'])} "
        f"| `{ours['slug']}`{who}: {cell(says)} | {seconds(ours['after'])}{certain} | {fix} |"
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
    text = HEAD.format(count=len(faults), timeout=usual_s, torch=versions, on=days)
    for when, title in PARTS.items():
        rows = [row(fault, usual_s) for fault in faults if fault["when"] == when]
        if rows:
            text += f"\n## {title}\n\n{TITLES}\n" + "\n".join(rows) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(faults)} faults")
    return 0


if __name__ == "__main__":
    sys.exit(main())
