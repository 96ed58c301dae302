"""One worker as the agent sees it: started in its own session, watched, signalled, read after its death.

Imports nothing that is slow: workers are started before all that is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping

from ..observe import stacks
from . import worker
from .exit_evidence import Evidence
from .job import Job

__all__ = ["Process"]

# Where the package was imported from, for the worker's interpreter.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # noqa: PTH120


class Process(Evidence):
    """A started worker and what the agent holds of it."""

    def __init__(
        self, job: Job, local_rank: int, environment: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
    ) -> None:
        super().__init__(job.rank(local_rank))
        self.local_rank = local_rank
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

    def ask_stacks(self) -> bool:
        """Have it write the stacks of all threads; False where it cannot: the signal would end it."""
        try:
            status = _status(self.pid)
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if not caught >> (stacks.SIGNAL - 1) & 1 or "\nState:\tT" in status:
                return False
            os.ftruncate(self._stacks, 0)
            os.kill(self.pid, stacks.SIGNAL)
        except (OSError, IndexError, ValueError):
            return False
        return True

    def stacks(self) -> str:
        """Return the stacks that it wrote last."""
        return self._text(self._stacks)

    def state(self) -> str:
        """Say what the kernel says it does: running, sleeping, stopped; "" where it is gone."""
        try:
            status = _status(self.pid)
        except OSError:
            return ""
        return status.partition("\nState:")[2].splitlines()[0].partition("(")[2].rstrip(")")

    def close(self) -> None:
        """Free the descriptors; nothing can be read any more."""
        for descriptor in (self.board, self._record, self._fatal, self._stacks):
            os.close(descriptor)


def _status(pid: int) -> str:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123  # no pathlib here
        return file.read()
