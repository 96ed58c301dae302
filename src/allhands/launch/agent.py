"""The agent: `allhands run` itself. Starts the job on this node, passes signals on, restarts, says the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from .. import _core, settings
from ..errors import fail
from . import telling
from .attempt import Attempt, Place
from .company import Alone, Company, End
from .descendants import descendants
from .guard import Guard
from .job import Job
from .keyboard import Keyboard
from .output import Output

__all__ = ["main"]

# Descriptors that a worker costs the agent: two pipes, four memfds, two logs, a connection and its pidfd.
_PER_WORKER = 12


def main(job: Job) -> int:
    """Run ``job`` on this node to its end; return the exit status."""
    place = Place()
    _raise_descriptor_limit(job)
    # A shell that became this process may have left us its children, which are not the job's.
    strangers = descendants(os.getpid())
    _core.adopt_orphans()
    guard = Guard(*place.mark())
    try:
        return asyncio.run(_Agent(job, place, {guard.pid, *strangers}).run())
    finally:
        guard.dismiss()


class _Agent:
    """What outlives an attempt: signals, output, and the company of other nodes."""

    def __init__(self, job: Job, place: Place, spared: set[int]) -> None:
        self._job, self._place, self._spared = job, place, spared
        self._company: Company | None = None
        self._attempt: Attempt | None = None
        self._asking: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self._stopped = False
        # Takes a signal that comes before there is a company.
        self._stopping: Callable[[int], None] = lambda _: None

    async def run(self) -> int:
        self._handle_signals()
        if self._job.nodes == 1:
            self._company = Alone(self._job, settings.read().token or secrets.token_hex(16))
            return await self._run(self._company)
        # One node does not wait for the import of what several need.
        from .gathering import Gathering

        gathering = Gathering(self._job)
        self._stopping = gathering.stop
        company = await gathering.run()
        if isinstance(company, End):
            sys.stderr.write(company.words)
            return company.exit_code
        self._company = company
        return await self._run(company)

    async def _run(self, company: Company) -> int:
        self._output = Output(company.job, self._broken)
        company.say = self._output.say
        keyboard = Keyboard()
        reader = asyncio.create_task(self._until_broken())
        try:
            if self._job.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
                self._output.say(f"OMP_NUM_THREADS=1 for each of {self._job.local_world_size} ranks; set it to choose")
            end = await self._attempts(company, keyboard)
            self._tell(end)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            await company.close()
            self._output.close()
        return end.exit_code

    async def _attempts(self, company: Company, keyboard: Keyboard) -> End:
        number = 0
        while True:
            end = await company.begin(number)
            if end is not None:
                return end
            number, self._output.job = company.number, company.job
            attempt = Attempt(company, number, self._place, self._output, keyboard, spared=self._spared)
            self._attempt = company.attempt = attempt
            end = await company.settle(await attempt.run())
            self._attempt = company.attempt = None
            if not end.again:
                return end
            number += 1
            self._output.write(end.words)
            self._output.say(f"restart {number} of {self._job.max_restarts}")

    def _tell(self, end: End) -> None:
        if self._job.report and end.report:
            try:
                Path(self._job.report).write_text(end.report, encoding="utf-8")
            except OSError as problem:
                self._output.say(f"the report could not be written to {self._job.report}: {problem.strerror}")
        if end.words:
            self._output.write(end.words)

    # Signals -----------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGUSR1, self._ask)
        loop.add_signal_handler(signal.SIGTSTP, self._pause)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            # nohup and shells that start us in the background ask for it to be ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._stop, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._attempt is not None:
                    self._attempt.reaped(pid, os.waitstatus_to_exitcode(status))

    def _stop(self, number: int) -> None:
        self._stopped = True
        if self._company is None:
            self._stopping(number)
            return
        for _ in range(self._company.stop(number)):
            if self._attempt is not None:
                self._attempt.stop(number)

    def _pause(self) -> None:
        """Ctrl-Z: the workers are in sessions of their own, so it reaches only us."""
        if self._attempt is not None:
            self._attempt.pause()
        os.kill(os.getpid(), signal.SIGSTOP)
        # Here someone has continued us.
        if self._attempt is not None:
            self._attempt.resume()

    def _ask(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        if self._attempt is not None:
            self._output.write(telling.standing(await self._attempt.ask()))

    async def _until_broken(self) -> None:
        await self._broken.wait()
        # A terminal that was closed has sent SIGHUP too, and a second signal would kill at once.
        if not self._stopped:
            self._stop(signal.SIGPIPE)


def _raise_descriptor_limit(job: Job) -> None:
    need = _PER_WORKER * job.local_world_size + 2 * job.world_size + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > hard != resource.RLIM_INFINITY:
        raise fail(
            "fd-limit",
            f"too few file descriptors for {job.local_world_size} ranks on this node",
            who=f"the launcher (pid {os.getpid()})",
            why=f"it needs {need}, the limit is {hard}",
            fix="raise the limit before the job starts: ulimit -n 65536 (and LimitNOFILE= in a service)",
        )
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
