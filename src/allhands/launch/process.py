"""One worker as the agent sees it: started in its own session, watched, signalled, read after its death."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import notes, stacks
from . import worker
from .job import Job

__all__ = ["Process"]

# Where the package was imported from, for the worker's interpreter.
_PACKAGE = str(Path(__file__).resolve().parents[2])

# A record is a few KiB; a script that writes into descriptors that are not its own is not read without end.
_MOST_EVIDENCE = 1 << 20


class Process:
    """A started worker and what the agent holds of it."""

    def __init__(
        self, job: Job, local_rank: int, environment: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
    ) -> None:
        self.rank = job.rank(local_rank)
        self.local_rank = local_rank
        self.status: int | None = None
        self.ended_s = 0.0
        # The signal that the agent sent and that it may have died of; 0 for none.
        self.sent, self.sent_s = 0, 0.0
        self.board = notes.make()
        self._record, self._fatal = (
            os.memfd_create(f"allhands-{name}", os.MFD_CLOEXEC) for name in ("record", "fatal")
        )
        self._stacks = stacks.make()
        given = (self._record, self._fatal, self._stacks, self.board)
        ordered = worker.order(
            job.kind,
            agent=os.getpid(),
            record=self._record,
            fatal=self._fatal,
            stacks=self._stacks,
            board=self.board,
            init=job.init,
        )
        # Unbuffered, as torchrun does: a line is seen when it is printed, and none is lost in a crash.
        self._popen = subprocess.Popen(
            [sys.executable, "-u", "-c", worker.PROGRAM, _PACKAGE, ordered, job.target, *job.arguments],
            env=dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=given,
            # A session, and with it a process group. Where Linux shares the cores out by session (autogroup), ranks
            # in one session get one share together, and start half as fast beside anything else.
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.started_s = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether its end has not been seen yet."""
        return self.status is None

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but 0."""
        return self.status is not None and self.status != 0

    def ended(self, status: int) -> None:
        """Note its end; ``status`` is an exit status, or the negative of a signal."""
        self.status = self._popen.returncode = status
        self.ended_s = time.monotonic()

    def send(self, number: int) -> None:
        """Send a signal that is to end it to its whole process group."""
        if self.alive and not self.sent:
            self.sent, self.sent_s = number, time.monotonic()
        self.tell(number)

    def tell(self, number: int) -> None:
        """Send any signal to its whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    # Evidence ----------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Return how the script ended, as `worker` wrote it; {} where it wrote nothing."""
        try:
            found = json.loads(_text(self._record) or "{}")
        except json.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}

    def fatal(self) -> str:
        """Return the stack that faulthandler wrote at a fatal signal."""
        return _text(self._fatal)

    def notes(self) -> notes.Board | None:
        """Return what is on its board, None where it had no group."""
        try:
            found = notes.parse(self.pid, self.board)
        except LookupError:
            return None
        return found if found.notes else None

    def ask_stacks(self) -> bool:
        """Have it write the stacks of all threads; False where it cannot: the signal would end it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if not caught >> (worker.STACKS - 1) & 1 or "\nState:\tT" in status:
                return False
            os.ftruncate(self._stacks, 0)
            os.kill(self.pid, worker.STACKS)
        except (OSError, IndexError, ValueError):
            return False
        return True

    def stacks(self) -> str:
        """Return the stacks that it wrote last."""
        return _text(self._stacks)

    def state(self) -> str:
        """Say what the kernel says it does: running, sleeping, stopped; "" where it is gone."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
        return status.partition("\nState:")[2].splitlines()[0].partition("(")[2].rstrip(")")

    def close(self) -> None:
        """Free the descriptors; nothing can be read any more."""
        for descriptor in (self.board, self._record, self._fatal, self._stacks):
            os.close(descriptor)


def _text(descriptor: int) -> str:
    size = min(os.fstat(descriptor).st_size, _MOST_EVIDENCE)
    return os.pread(descriptor, size, 0).decode(errors="replace")
