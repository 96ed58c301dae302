"""Programs that use `allhands.spawn`, run from a file in their own process, as a user runs them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leaks
from ranks import harness

__all__ = ["Program", "finish", "gone", "program"]

# Longer than any of these programs takes on a busy machine.
DEADLINE_S = 90.0


class Program:
    """A running program, which prints one JSON object per line."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._folder = folder

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return (self._folder / "err").read_text(errors="replace")

    def printed(self) -> list[dict[str, Any]]:
        """Return the objects that it has printed so far."""
        return harness.parse((self._folder / "out").read_text(errors="replace"))

    def wait_for(self, key: str, times: int = 1) -> list[Any]:
        """Wait until ``times`` objects with ``key`` were printed; return the values."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            ended = self.process.poll() is not None  # Checked before the output, whose last lines count.
            if len(found := [each[key] for each in self.printed() if key in each]) >= times:
                return found
            assert not ended, f"ended before {key} came: {self.printed()}\n{self.err}"
            assert time.monotonic() < deadline, f"{key} did not come: {self.printed()}\n{self.err}"
            time.sleep(0.01)

    def end(self) -> int:
        """Wait for its end; return the exit status."""
        return self.process.wait(DEADLINE_S)


@contextmanager
def program(source: str, *arguments: str, head: str = "") -> Iterator[Program]:
    """Start ``source`` in a session of its own, and end it with the block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "main.py").write_text(head + textwrap.dedent(source))
        env = harness.environment({})
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-u", str(folder / "main.py"), *arguments],
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                yield Program(folder, process)
            finally:
                process.kill()
                process.wait()


def finish(source: str, *arguments: str, head: str = "") -> list[dict[str, Any]]:
    """Run ``source`` to its end, which must have status 0; return the objects that it printed."""
    with program(source, *arguments, head=head) as running:
        assert running.end() == 0, running.err
        return running.printed()


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    """Wait for the end of processes."""
    deadline = time.monotonic() + within_s
    while any(leaks.alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
