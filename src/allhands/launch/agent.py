"""The agent: `allhands run` itself. Starts the job on this node, passes signals on, restarts, says the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from . import verdict_text
from .attempt import Attempt
from .job import Job
from .keyboard import Keyboard
from .multinode.node_role import Alone, Company, End
from .output import Output
from .start import ENDING, HELD, Ahead

__all__ = ["main"]


def main(job: Job, ahead: Ahead | None = None) -> int:
    """Run ``job`` on this node to its end; return the exit status. ``ahead`` is what was begun already."""
    ahead = ahead or Ahead(job)
    try:
        return asyncio.run(_Agent(job, ahead).run())
    finally:
        ahead.close()


class _Agent:
    """What outlives an attempt: signals, output, and the company of other nodes."""

    def __init__(self, job: Job, ahead: Ahead) -> None:
        self._job, self._ahead = job, ahead
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
            self._company = Alone(self._job, self._ahead.token, self._ahead.port)
            return await self._run(self._company)
        # One node does not wait for the import of what several need.
        from .multinode.agent_rendezvous import Gathering

        gathering = Gathering(self._job)
        self._stopping = gathering.stop
        self._catch_up()
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
        number, first = 0, True
        while True:
            end = await company.begin(number)
            if end is not None:
                return end
            number, self._output.job = company.number, company.job
            begun = bool(self._ahead.processes) and first
            attempt = Attempt(company, number, self._ahead, self._output, keyboard, begun=begun)
            self._attempt = company.attempt = attempt
            if first:
                self._catch_up()
                # Not before: whoever is reaped while there is no attempt has ended unseen.
                asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
                self._reap()
            first = False
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
        # One that came in between would be seen twice, by who held it and by the loop.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        for number in HELD:
            # nohup and shells that start us in the background ask for it to be ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._answer_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)

    def _catch_up(self) -> None:
        """Answer the signals that came before the event loop."""
        early, self._ahead.early = self._ahead.early, []
        for number in early:
            self._answer_signal(number)

    def _answer_signal(self, number: int) -> None:
        if number in ENDING:
            self._stop(number)
        elif number == signal.SIGUSR1:
            self._ask()
        else:
            self._pause()

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
            self._output.write(verdict_text.standing(await self._attempt.ask()))

    async def _until_broken(self) -> None:
        await self._broken.wait()
        # A terminal that was closed has sent SIGHUP too, and a second signal would kill at once.
        if not self._stopped:
            self._stop(signal.SIGPIPE)
