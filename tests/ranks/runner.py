"""`allhands run` as a user runs it: a script in a folder, and the result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import harness

__all__ = ["TWO_GROUPS", "Ran", "Running", "run", "running"]

# Longer than any job of a test takes on a busy machine.
DEADLINE_S = 90.0

# A script with two groups, one after the other: the launcher must open a coordinator for each.
TWO_GROUPS = """
import torch, allhands as dist
for _ in range(2):
    dist.init_process_group()
    x = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    print("sum", x.tolist(), dist.get_world_size())
    dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a job ended: exit status, output and report."""

    code: int
    out: str
    err: str
    report: dict[str, Any]
    seconds: float

    def lines(self, rank: int) -> list[str]:
        """Return what ``rank`` wrote to stdout, without the prefix."""
        begin = f"[{rank}] "
        return [line.removeprefix(begin) for line in self.out.splitlines() if line.startswith(begin)]

    @property
    def verdict(self) -> str:
        """The verdict, which is the last output of the launcher."""
        return self.err[self.err.rfind("\nallhands: ") + 1 :] if "\nallhands: " in self.err else self.err


class Running:
    """A running job."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], report: Path) -> None:
        self.folder, self.process, self._report = folder, process, report
        self._started = time.monotonic()

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return (self.folder / "err").read_text(errors="replace")

    def wait_for(self, text: str, times: int = 1) -> str:
        """Wait until ``text`` was printed ``times`` times; return the output."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            ended = self.process.poll() is not None  # Checked before the output, whose last lines count.
            if (screen := self.out + self.err).count(text) >= times:
                return screen
            assert not ended, f"ended before {text!r} came\n{screen}"
            assert time.monotonic() < deadline, f"{text!r} did not come\n{screen}"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        """Send a signal to the agent."""
        self.process.send_signal(number)

    def result(self) -> Ran:
        """Wait for the end."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(3)
            raise AssertionError(f"still running\n{self.out}\n{self.err}") from None
        found = json.loads(self._report.read_text()) if self._report.exists() else {}
        return Ran(code, self.out, self.err, found, time.monotonic() - self._started)


@contextmanager
def running(
    source: str,
    *options: str,
    ranks: int = 2,
    arguments: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    before: tuple[str, ...] = (),
    script: bool = True,
) -> Iterator[Running]:
    """Start ``source`` under `allhands run`, through the command ``before`` if any; kill it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(textwrap.dedent(source).lstrip("\n"))
        report = folder / "report.json"
        line = [*before, sys.executable, "-m", "allhands", "run", "-n", str(ranks), "--report", str(report), *options]
        line += [str(folder / "train.py")] if script else []
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                [*line, *arguments],
                cwd=folder,
                env=harness.environment({"PYTHONUNBUFFERED": "", **(env or {})}),
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            if process.stdin is not None:
                process.stdin.write(stdin or b"")
                process.stdin.close()
            yield Running(folder, process, report)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


def run(source: str, *options: str, **kw: Any) -> Ran:
    """Run ``source`` to its end; has the parameters of `running`."""
    with running(source, *options, **kw) as job:
        return job.result()
