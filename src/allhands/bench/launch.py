"""How long a launch takes: from the command to the first all_reduce that every rank has done, against torchrun.

Three kinds of launch take turns: `allhands run` with our backend, torchrun with Gloo, and as many interpreters, started
by nobody's launcher, that only import torch: what nobody can save. Needs no torch itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import fail
from .tables import aligned

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
        # What the launcher and our ranks do beside others that still import makes those imports longer; this counts it.
        "not_importing_by_difference_s": ours["total_s"] - imports["import_s"],
        "bytecode": _has_bytecode(),
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
    given = [str(script), str(times)]
    number = ["--nproc-per-node", str(ranks)]
    commands = {
        "allhands": [["-m", "allhands", "run", *number, *given]],
        "torchrun": [["-m", "torch.distributed.run", "--standalone", *number, *given]],
        "imports": [given] * ranks,
    }[kind]
    # Both launchers would choose this number, and say so on the screen.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        problems = stack.enter_context(tempfile.TemporaryFile())
        started = [
            stack.enter_context(_process([sys.executable, *command], environment, problems)) for command in commands
        ]
        try:
            status = max(process.wait(begun + _DEADLINE_S - time.monotonic()) for process in started)
        except subprocess.TimeoutExpired as problem:
            raise _trouble(kind, f"it did not end within {_DEADLINE_S:.0f} s") from problem
        ended = time.monotonic()
        problems.seek(0)
        words = problems.read().decode(errors="replace")
    said = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    if status or len(said) != ranks:
        raise _trouble(kind, f"exit status {status}: {words[-2000:]}")
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


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], problems: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command``, and see that nothing is left of it."""
    # In a session of its own, as each rank of both launchers: Linux may share the cores out by session.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=problems, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _has_bytecode() -> bool:
    """Tell whether launches find allhands compiled, as an installation does.

    Asked after launches: where they may write it (not with PYTHONDONTWRITEBYTECODE), the first one has.
    """
    # The last that a rank imports, so that its bytecode is the last to be there.
    source = Path(__file__).parents[1] / "groups" / "backend.py"
    cache = Path(importlib.util.cache_from_source(str(source)))
    if not cache.exists():
        return False
    # PEP 552: magic, flags, and where those are 0 the time and the size of the source.
    flags, changed, size = struct.unpack("<4xIII", cache.read_bytes()[:16])
    found = source.stat()
    return bool(flags) or (changed, size) == (int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)


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
