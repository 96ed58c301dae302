"""The agent: the process of `allhands run` on a node. It handles signals, runs attempts, and prints the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from .attempt import Attempt
from .node_role import NodeRole
from .options import Job
from .output import Output
from .start import ENDING_SIGNALS, HANDLED_SIGNALS, EarlyStart
from .verdict import AttemptResult, stall_text

__all__ = ["main"]


def main(job: Job, early: EarlyStart) -> int:
    """Run ``job`` on this node to its end; return the exit status."""
    return asyncio.run(_Agent(job, early).run())


class _Agent:
    """The state that outlives an attempt."""

    def __init__(self, job: Job, early: EarlyStart) -> None:
        self._job, self._early = job, early
        self._role: NodeRole | None = None
        self._attempt: Attempt | None = None
        self._status_task: asyncio.Task[None] | None = None
        self._output_broken = asyncio.Event()
        self._stopped = False
        # Handles a signal that arrives before the nodes have met.
        self._stop_rendezvous: Callable[[int], None] = lambda _: None

    async def run(self) -> int:
        self._handle_signals()
        role: NodeRole | AttemptResult = NodeRole(self._job, token=self._early.token, port=self._early.port)
        if self._job.nodes > 1:
            # Slow to import.
            from .multinode.agent_rendezvous import AgentRendezvous

            rendezvous = AgentRendezvous(self._job)
            self._stop_rendezvous = rendezvous.stop
            self._handle_pending_signals()
            role = await rendezvous.run()
        if isinstance(role, AttemptResult):
            sys.stderr.write(role.text)
            return role.exit_code
        self._role = role
        self._output = Output(role.job, self._output_broken)
        role.message = self._output.message
        output_watch = asyncio.create_task(self._stop_when_output_breaks())
        try:
            ranks = self._job.local_world_size
            if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
                self._output.message(f"OMP_NUM_THREADS=1 for each of {ranks} ranks; set it to choose")
            final = await self._run_attempts(role)
            if self._job.report and final.report:
                self._write_report(final.report)
            if final.text:
                self._output.write(final.text)
        finally:
            output_watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await output_watch
            await role.close()
            self._output.close()
        return final.exit_code

    async def _run_attempts(self, role: NodeRole) -> AttemptResult:
        number, first = 0, True
        while True:
            final = await role.begin(number)
            if final is not None:
                return final
            number, self._output.job = role.number, role.job
            started = bool(self._early.workers) and first
            attempt = Attempt(role, number, self._early, self._output, started=started)
            self._attempt = role.attempt = attempt
            if first:
                self._handle_pending_signals()
                # Not earlier: a worker that is reaped while there is no attempt would be lost.
                asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
                self._reap()
            first = False
            ended = await role.settle(await attempt.run())
            self._attempt = role.attempt = None
            if not ended.restart:
                return ended
            number += 1
            self._output.write(ended.text)
            self._output.message(f"restart {number} of {self._job.max_restarts}")

    def _write_report(self, report: str) -> None:
        try:
            Path(self._job.report).write_text(report, encoding="utf-8")
        except OSError as problem:
            self._output.message(f"the report could not be written to {self._job.report}: {problem.strerror}")

    # Signals -----------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        # Blocked, because a signal in between would be handled twice: by `EarlyStart` and by the loop.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        for number in HANDLED_SIGNALS:
            # nohup, and shells that start the agent in the background, set SIG_IGN.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._handle, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)

    def _handle_pending_signals(self) -> None:
        pending, self._early.pending_signals = self._early.pending_signals, []
        for number in pending:
            self._handle(number)

    def _handle(self, number: int) -> None:
        if number in ENDING_SIGNALS:
            self._stop(number)
        elif number == signal.SIGUSR1:
            if self._status_task is None or self._status_task.done():
                self._status_task = asyncio.get_running_loop().create_task(self._print_status())
        else:
            self._suspend()

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
        if self._role is None:
            self._stop_rendezvous(number)
            return
        for _ in range(self._role.stop(number)):
            if self._attempt is not None:
                self._attempt.stop(number)

    def _suspend(self) -> None:
        """Ctrl-Z: the terminal stops only the agent, because the workers are in sessions of their own."""
        if self._attempt is not None:
            self._attempt.suspend()
        os.kill(os.getpid(), signal.SIGSTOP)
        # The agent was continued.
        if self._attempt is not None:
            self._attempt.resume()

    async def _print_status(self) -> None:
        if self._attempt is not None:
            self._output.write(stall_text(await self._attempt.collect_stacks()))

    async def _stop_when_output_breaks(self) -> None:
        await self._output_broken.wait()
        # A closed terminal sends SIGHUP too, and a second request would kill at once.
        if not self._stopped:
            self._stop(signal.SIGPIPE)
