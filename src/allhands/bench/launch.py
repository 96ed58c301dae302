"""How long a launch takes: from the command to the first all_reduce that every rank has done, against torchrun.

Three kinds of launch take turns: `allhands run` with our backend, torchrun with Gloo, and `allhands run` of a script
that only imports torch. Needs no torch itself.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import fail

__all__ = ["KINDS", "measure", "table", "write"]

# Longer than a launch takes on a machine that does much else; it only ends a hang.
_DEADLINE_S = 120.0

# Every rank adds one line to the file: when it began, when torch was imported, when it was done. The clock is the
# kernel's, the same for all processes.
_SCRIPT = """
import time
began = time.monotonic()
import torch
imported = time.monotonic()
{body}
import json, os, sys
said = json.dumps([began, imported, time.monotonic()]) + "\\n"
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
os.write(file, said.encode())
{end}
"""

_BODIES = {
    "allhands": ("import allhands as dist\ndist.init_process_group()\ndist.all_reduce(torch.ones(1))", True),
    "torchrun": (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.all_reduce(torch.ones(1))",
        True,
    ),
    "imports": ("", False),
}
KINDS = tuple(_BODIES)


def measure(ranks: int, rounds: int, notify: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Launch each kind ``rounds`` times in changing order; return the medians, and every launch in seconds."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="allhands-bench-") as folder:
        for turn in range(rounds):
            shift = turn % len(KINDS)
            for kind in (*KINDS[shift:], *KINDS[:shift]):
                if notify is not None:
                    notify(f"{kind}, round {turn + 1} of {rounds}")
                found[kind].append(_launch(kind, ranks, Path(folder)))
    middle = {
        kind: {name: statistics.median(each[name] for each in launches) for name in launches[0]}
        for kind, launches in found.items()
    }
    ours, imports = middle["allhands"], middle["imports"]
    return {
        "ranks": ranks,
        "rounds": rounds,
        "kinds": middle,
        "ratio": middle["torchrun"]["total_s"] / ours["total_s"],
        "not_importing_s": ours["before_s"] + ours["after_s"],
        # What our ranks do beside others that still import makes those imports longer; this counts it.
        "not_importing_by_difference_s": ours["total_s"] - imports["total_s"] + imports["before_s"],
        "launches": found,
    }


def write(kind: str, script: Path) -> None:
    """Write the script that each rank of a launch of ``kind`` runs."""
    body, group = _BODIES[kind]
    script.write_text(_SCRIPT.format(body=body, end="dist.destroy_process_group()" if group else ""), encoding="utf-8")


def _launch(kind: str, ranks: int, folder: Path) -> dict[str, float]:
    script, times = folder / f"launched-by-{kind}.py", folder / "times"
    write(kind, script)
    times.write_bytes(b"")
    module = ["torch.distributed.run", "--standalone"] if kind == "torchrun" else ["allhands", "run"]
    command = [sys.executable, "-m", *module, "--nproc-per-node", str(ranks), str(script), str(times)]
    # Both launchers would choose this number, and say so on the screen.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as problem:
        raise _trouble(kind, f"it did not end within {_DEADLINE_S:.0f} s") from problem
    ended = time.monotonic()
    said = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    if done.returncode or len(said) != ranks:
        raise _trouble(kind, f"exit status {done.returncode}: {done.stderr[-2000:]}")
    # Others wait for the rank that imports last, so its path is the one that counts.
    began, imported, _ = max(said, key=lambda each: float(each[1]))
    last = max(float(each[2]) for each in said)
    return {
        "total_s": last - begun,
        "before_s": began - begun,
        "import_s": imported - began,
        "after_s": last - imported,
        "end_s": ended - last,
    }


def _trouble(kind: str, why: str) -> Exception:
    return fail(
        "engine-failed",
        f"the launch with {kind} did not come to its end",
        who="allhands bench launch",
        why=why,
        fix="run the same command by hand, with a script that forms a group",
    )


def table(found: dict[str, Any]) -> str:
    """Put what `measure` found into words and an aligned table."""
    columns = (("to all_reduce", "total_s"), ("before", "before_s"), ("import torch", "import_s"), ("after", "after_s"))
    headings = ["launch", *(heading for heading, _ in columns), "to the end"]
    names = {"allhands": "allhands run, allhands", "torchrun": "torchrun, Gloo", "imports": "allhands run, import only"}
    rows = [headings]
    for kind, values in found["kinds"].items():
        cells = [f"{values[key]:.3f}" for _, key in columns]
        rows.append([names[kind], *cells, f"{values['total_s'] + values['end_s']:.3f}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    lines = []
    for row in rows:
        aligned = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *aligned]))
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", f"torchrun with Gloo takes {found['ratio']:.2f} times as long to the first all_reduce of all ranks"]
    lines.append(
        f"not spent importing torch: {found['not_importing_s']:.3f} s before and after, for the rank that imported "
        f"last; {found['not_importing_by_difference_s']:.3f} s as the difference to importing only, with what that "
        "spends before"
    )
    lines.append(
        f"seconds, medians of {found['rounds']} launches of {found['ranks']} ranks, in turn; before: from the command "
        "to the script's first line"
    )
    return "\n".join(lines)
