"""The agent: `allhands run` itself. Starts the job on this node, passes signals on, restarts, says the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from pathlib import Path

from .. import _core
from ..errors import fail
from . import telling
from .attempt import Attempt, Place, Story
from .descendants import descendants
from .guard import Guard
from .job import Job
from .keyboard import Keyboard
from .output import Output
from .verdict import Verdict, judge

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
    guard = Guard(*place.mark(job))
    try:
        return asyncio.run(_Agent(job, place, {guard.pid, *strangers}).run())
    finally:
        guard.dismiss()


class _Agent:
    """What outlives an attempt: signals, output, and the count of restarts."""

    def __init__(self, job: Job, place: Place, spared: set[int]) -> None:
        self._job, self._place, self._spared = job, place, spared
        self._attempt: Attempt | None = None
        self._asking: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self._stopped = False

    async def run(self) -> int:
        self._output = Output(self._job, self._broken)
        keyboard = Keyboard()
        self._handle_signals()
        reader = asyncio.create_task(self._until_broken())
        try:
            if self._job.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
                self._output.say(f"OMP_NUM_THREADS=1 for each of {self._job.local_world_size} ranks; set it to choose")
            number = 0
            while True:
                self._attempt = Attempt(self._job, number, self._place, self._output, keyboard, spared=self._spared)
                story = await self._attempt.run()
                verdict = judge(story.outcomes, story.findings, story.hanging, story.stopped)
                if verdict is None or not self._again(verdict, number):
                    break
                number += 1
                self._output.write(telling.words(verdict, story.leftovers))
                self._output.say(f"restart {number} of {self._job.max_restarts}")
            self._tell(verdict, story, number)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            self._output.close()
        return 0 if verdict is None else verdict.exit_code

    def _again(self, verdict: Verdict, number: int) -> bool:
        wanted = "any" in self._job.restart_if or verdict.cause in self._job.restart_if
        # Running out of memory is a signal too.
        wanted = wanted or (verdict.cause == "oom" and "signal" in self._job.restart_if)
        return wanted and number < self._job.max_restarts and verdict.cause != "stopped" and not self._stopped

    def _tell(self, verdict: Verdict | None, story: Story, number: int) -> None:
        if self._job.report:
            found = telling.report(self._job, number, verdict, story.outcomes, story.leftovers)
            try:
                Path(self._job.report).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            except OSError as problem:
                self._output.say(f"the report could not be written to {self._job.report}: {problem.strerror}")
        if verdict is not None:
            self._output.write(telling.words(verdict, story.leftovers))
        elif story.leftovers:
            self._output.say("ended what the ranks had left behind: " + "; ".join(story.leftovers))

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
