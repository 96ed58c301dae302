"""How long a launch takes: from the command to the first all_reduce of all ranks, against torchrun. Needs no torch.

Three kinds of launch take turns: `allhands run` with our backend, torchrun with Gloo, and as many interpreters without
a launcher that only import torch, which no launcher can avoid.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..control.waiting_line import WaitingLine
from ..errors import fail
from .tables import aligned

__all__ = ["KINDS", "measure", "table", "write"]

# Longer than a launch takes on a busy machine; it only ends a hang.
_DEADLINE_S = 120.0

# Every rank adds one line to the file: when it began, when torch was imported, when it was done. All processes read the
# same clock of the kernel.
_SCRIPT = """
import time
began = time.monotonic()
import torch
imported = time.monotonic()
{body}
import json, os, sys
line = json.dumps([began, imported, time.monotonic()]) + "\\n"
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
os.write(file, line.encode())
{end}
"""

# What forms the group in each kind of launch.
_GROUPS = {
    "allhands": "import allhands as dist\ndist.init_process_group()",
    "torchrun": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "imports": "",
}
KINDS = tuple(_GROUPS)


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """Launch each kind ``rounds`` times in changing order; return the medians, and every launch in seconds.

    Progress is shown on standard error.
    """
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    progress = WaitingLine("allhands bench launch")
    with tempfile.TemporaryDirectory(prefix="allhands-bench-") as folder, contextlib.ExitStack() as stack:
        stack.callback(progress.done)
        for turn in range(rounds):
            shift = turn % len(KINDS)
            for kind in (*KINDS[shift:], *KINDS[:shift]):
                progress(f"{kind}, round {turn + 1} of {rounds}")
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
        # Also counts how much the launcher and the first ranks delay the imports of the others.
        "not_importing_by_difference_s": ours["total_s"] - imports["import_s"],
        "bytecode": _has_bytecode(),
        "launches": found,
    }


def write(kind: str, script: Path) -> None:
    """Write the script that each rank of a launch of ``kind`` runs."""
    body, end = _GROUPS[kind], ""
    if body:
        body, end = f"{body}\ndist.all_reduce(torch.ones(1))", "dist.destroy_process_group()"
    script.write_text(_SCRIPT.format(body=body, end=end), encoding="utf-8")


def _launch(kind: str, ranks: int, folder: Path) -> dict[str, float]:
    script, times = folder / f"launched-by-{kind}.py", folder / "times"
    write(kind, script)
    times.write_bytes(b"")
    given = [str(script), str(times)]
    number = ["--nproc-per-node", str(ranks)]
    commands = {
        "allhands": [["-m", "allhands", "run", *number, *given]],
        "torchrun": [["-m", "torch.distributed.run", "--standalone", *number, *given]],
        "imports": [given] * ranks,
    }[kind]
    # Both launchers would choose this number, and print that they did.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output, contextlib.ExitStack() as stack:
        started = []
        for command in commands:
            # In a session of its own, as each rank of both launchers: Linux may divide the cores by session.
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        try:
            status = max(process.wait(begun + _DEADLINE_S - time.monotonic()) for process in started)
        except subprocess.TimeoutExpired as problem:
            raise _trouble(kind, f"it did not end within {_DEADLINE_S:.0f} s") from problem
        ended = time.monotonic()
        output.seek(0)
        text = output.read().decode(errors="replace")
    ranks_times = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    if status or len(ranks_times) != ranks:
        raise _trouble(kind, f"exit status {status}: {text[-2000:]}")
    # The others wait for the rank that imports last, so its times are the parts of the whole.
    began, imported, _ = max(ranks_times, key=lambda each: float(each[1]))
    last = max(float(each[2]) for each in ranks_times)
    return {
        "total_s": last - begun,
        "before_s": began - begun,
        "import_s": imported - began,
        "after_s": last - imported,
        "end_s": ended - last,
    }


def _has_bytecode() -> bool:
    """Return whether launches find allhands compiled, as in an installation.

    Ask after a launch: it has compiled the package, unless PYTHONDONTWRITEBYTECODE is set.
    """
    # A module that only ranks import.
    source = Path(__file__).parents[1] / "groups" / "lifecycle.py"
    compiled = Path(importlib.util.cache_from_source(str(source)))
    return compiled.exists() and compiled.stat().st_mtime >= source.stat().st_mtime


def _trouble(kind: str, why: str) -> Exception:
    return fail(
        "engine-failed",
        f"the launch with {kind} did not come to its end",
        who="allhands bench launch",
        why=why,
        fix="run the same command by hand, with a script that forms a group",
    )


def table(found: dict[str, Any]) -> str:
    """Return the table of the result of `measure`, with its legend."""
    columns = {"to all_reduce": "total_s", "before": "before_s", "import torch": "import_s", "after": "after_s"}
    names = {"allhands": "allhands run, allhands", "torchrun": "torchrun, Gloo", "imports": "no launcher, import only"}
    rows = [
        [names[kind], *(f"{values[key]:.3f}" for key in columns.values()), f"{values['total_s'] + values['end_s']:.3f}"]
        for kind, values in found["kinds"].items()
    ]
    lines = aligned([("", ["launch", *columns, "to the end"])], rows)
    lines += ["", f"torchrun with Gloo takes {found['ratio']:.2f} times as long to the first all_reduce of all ranks"]
    path, difference = found["not_importing_s"], found["not_importing_by_difference_s"]
    lines.append(
        f"not spent importing torch: {path:.3f} s before and after, for the rank that imported last; {difference:.3f} "
        "s as the difference to the import where nothing else is done"
    )
    lines.append(
        f"seconds, medians of {found['rounds']} launches of {found['ranks']} ranks, in turn; before: from the command "
        "to the script's first line"
    )
    if not found["bytecode"]:
        lines.append(
            "allhands is compiled anew in every process, because there is no bytecode of it and none may be written; "
            "an installed one starts faster (python -m compileall makes it)"
        )
    return "\n".join(lines)
