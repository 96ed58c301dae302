"""One attempt: the workers of this node from the first that is started to the last process that is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from ..observe.flight_recorder import FlightRecorder
from .exit_evidence import OomMonitor
from .output import Output
from .start import EarlyStart, WorkerProcess
from .termination import (
    EXPLAIN_S,
    LEFTOVER_S,
    Termination,
    command_line,
    descendants,
    environment_variable,
    send_signal,
)
from .verdict import Outcome, Stall

if TYPE_CHECKING:
    from .node_role import NodeRole

__all__ = ["Attempt", "NodeReport", "StallDetector", "next_change"]

# How often due signals and leftover processes are checked; the end of a worker is seen at once.
_TICK_S = 0.05

# Time for the pipes to reach their end after the last process is gone, on a busy machine.
_DRAIN_S = 2.0


async def next_change(changed: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until ``changed`` is set again, at most ``timeout_s``."""
    changed.clear()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(changed.wait(), timeout_s)


class NodeReport(msgspec.Struct, frozen=True):
    """The outcomes of one node's workers once an attempt is over; `verdict.judge` needs those of all nodes."""

    outcomes: list[Outcome]
    stall: Stall | None
    # The signal by which a user or scheduler ended the job; 0 for none.
    stopped: int
    # Descriptions of processes that outlived the workers.
    leftovers: list[str]


class Attempt:
    """The workers of this node while they run, and their end."""

    def __init__(self, role: NodeRole, number: int, early: EarlyStart, output: Output, *, started: bool) -> None:
        """``started`` is whether the workers of ``early`` are running and belong to this attempt."""
        self.job, self.number = role.job, number
        self._role = role
        self._early, self._started = early, started
        self.workers: list[WorkerProcess] = early.workers if started else []
        self._output = output
        self._stdin: _StdinForwarder | None = None
        self._termination = Termination(self.job.grace_s)
        self._changed = asyncio.Event()
        self._stall_detector = StallDetector(self.job.hang_timeout_s)
        self._stall_state = (False, False)
        self._stall_declared = False
        self._stall: Stall | None = None
        self._stopped = 0
        self._leftovers: list[str] = []
        self._oom = OomMonitor()

    async def run(self) -> NodeReport:
        """Start the workers and supervise them to their end."""
        try:
            self._start()
            await self._role.serve(self._early.socket_name)
            await self._supervise()
            await self._end_leftovers()
            await self._output.drain(_DRAIN_S)
        finally:
            if self._stdin is not None:
                self._stdin.close()
            self.kill()
        node = self.job.node_rank if self.job.nodes > 1 else None
        outcomes = [worker.outcome(self._oom, node) for worker in self.workers]
        for worker in self.workers:
            worker.close()
        return NodeReport(outcomes, self._stall, self._stopped, self._leftovers)

    def _start(self) -> None:
        if self._started:
            for local_rank, readers in enumerate(self._early.output_pipes):
                for stream, reader in enumerate(readers, 1):
                    self._output.add(local_rank, stream, reader)
        else:
            self._early.start_workers(
                self.job,
                self.number,
                token=self._role.token,
                master=self._role.master,
                address=self._role.address,
                open_output=lambda local_rank: self._output.open(local_rank, self.number),
            )
            self.workers = self._early.workers
        if self._early.stdin_pipe is not None:
            self._stdin = _StdinForwarder(self._early.stdin_pipe)

    # While the workers run ---------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Wait for the end of every worker, and send the signals that become due."""
        while any(worker.alive for worker in self.workers):
            now = time.monotonic()
            if self._failed and not self._termination.begun:
                self._role.worker_failed()
                self._termination.begin(now)
            number = self._termination.due(now)
            if number == signal.SIGKILL:
                self.kill()
            elif number:
                for worker in self.workers:
                    worker.end(number)
            await self._check_stall(now)
            await next_change(self._changed, _TICK_S if self._termination.begun else self._stall_detector.interval_s)
        if not self._termination.begun and self._failed:
            # The last worker of this node failed; workers of other nodes may be running.
            self._role.worker_failed()

    @property
    def _failed(self) -> bool:
        return any(worker.failed for worker in self.workers)

    def kill(self) -> None:
        """Kill every process of the job on this node."""
        for worker in self.workers:
            if worker.alive:
                worker.end(signal.SIGKILL)
        send_signal(self._other_processes(), signal.SIGKILL)

    def reaped(self, pid: int, status: int) -> None:
        """Record the end of a child of the agent: a worker, or an orphan that the agent adopted."""
        for worker in self.workers:
            if worker.pid == pid and worker.alive:
                worker.reaped(status)
        self._changed.set()

    def stop(self, number: int) -> None:
        """End the job because of the signal ``number``: forward it; at the second call kill."""
        self._stopped = self._stopped or number
        self._termination.request(time.monotonic(), number)
        self._changed.set()

    def end(self, wait_s: float = EXPLAIN_S) -> None:
        """End the job because another node failed or was lost: wait ``wait_s`` for the workers, then signal them."""
        self._termination.begin(time.monotonic(), wait_s)
        self._changed.set()

    def end_stalled(self) -> None:
        """End the job because it stalled on all nodes: collect the stacks of all workers, then signal them."""
        self._stall_declared = True
        self._changed.set()

    def suspend(self) -> None:
        """Stop every worker, as Ctrl-Z does."""
        for worker in self.workers:
            worker.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue every worker; the time in between counts as no stall."""
        self._stall_detector.reset()
        for worker in self.workers:
            worker.signal_group(signal.SIGCONT)

    # Stalls ------------------------------------------------------------------------------------------------

    async def _check_stall(self, now: float) -> None:
        if self._termination.begun:
            return
        if self._stall_detector.enabled:
            state = self._stall_detector.update(
                now, {each.rank: each.recording() for each in self.workers if each.alive}
            )
            if state != self._stall_state:
                self._stall_state = state
                self._role.stall_changed(stalled=state[0], in_collective=state[1])
        if self._stall_declared and self._stall is None:
            self._stall = await self.collect_stacks()
            self._termination.begin(time.monotonic(), 0.0)

    async def collect_stacks(self) -> Stall:
        """Return the state of every worker: its flight recorder and the stacks of its threads."""
        asked = [worker for worker in self.workers if worker.alive]
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            found = await asyncio.gather(*(loop.run_in_executor(pool, worker.stacks) for worker in asked))
        texts = dict(zip(asked, found, strict=True))
        alive = [worker for worker in self.workers if worker.alive]
        return Stall(
            recordings={worker.rank: worker.recording() for worker in alive},
            stacks={worker.rank: texts[worker] for worker in alive},
            states={worker.rank: worker.state() for worker in alive},
            pids={worker.rank: worker.pid for worker in alive},
            after_s=self.job.hang_timeout_s,
        )

    # Leftover processes ------------------------------------------------------------------------------------

    def _other_processes(self) -> list[int]:
        workers = {worker.pid for worker in self.workers if worker.alive}
        return [pid for pid in descendants(os.getpid(), self._early.excluded_pids) if pid not in workers]

    async def _end_leftovers(self) -> None:
        """End the processes that outlive the workers: wait a moment, then SIGTERM, then SIGKILL."""
        termination = Termination(self.job.grace_s)
        termination.begin(time.monotonic(), LEFTOVER_S if not self._termination.begun else 0.0)
        # Twice, because one scan misses a process whose parent is exiting.
        while others := self._other_processes() or self._other_processes():
            number = termination.due(time.monotonic())
            if self._termination.kill_s is not None and time.monotonic() >= self._termination.kill_s:
                number = signal.SIGKILL
            if number:
                self._leftovers = self._leftovers or [
                    f"pid {pid} of rank {environment_variable(pid, 'RANK') or '?'}: {command_line(pid)[:200]}"
                    for pid in others
                ]
                send_signal(others, number)
            await next_change(self._changed, _TICK_S)


class StallDetector:
    """Detects from flight recorders that no rank of this node makes progress. Pure."""

    def __init__(self, timeout_s: float) -> None:
        self.enabled = timeout_s > 0
        # Ten samples within the timeout give it a tenth of accuracy.
        self.interval_s = min(max(timeout_s / 10, 0.05), 1.0) if self.enabled else 1.0
        self._timeout_s = timeout_s
        self._since: float | None = None
        self._seen: dict[int, tuple[object, ...]] = {}

    def reset(self) -> None:
        """Start again, after the job was suspended."""
        self._since = None

    def update(self, now: float, recordings: Mapping[int, FlightRecorder | None]) -> tuple[bool, bool]:
        """Return whether no recorder changed for the timeout, and whether a rank was in one collective as long."""
        seen: dict[int, tuple[object, ...]] = {
            rank: tuple((note.number, note.state) for note in recording.entries) if recording else ()
            for rank, recording in recordings.items()
        }
        if seen != self._seen or self._since is None:
            self._seen, self._since = seen, now
            return False, False
        inside = [note for recording in recordings.values() if recording for note in recording.under_way]
        longest = max((now - (note.started_s or note.issued_s) for note in inside), default=0.0)
        return now - self._since >= self._timeout_s, longest >= self._timeout_s


# An agent in the background must not read the terminal; it checks this often whether it is in the foreground again.
_FOREGROUND_S = 1.0

_STDIN_BYTES = 1 << 16


class _StdinForwarder:
    """Forwards the terminal's input to rank 0, which cannot read it: workers are in sessions of their own."""

    def __init__(self, writer: int) -> None:
        """``writer`` is the agent's end of rank 0's stdin, which `close` closes."""
        self._loop = asyncio.get_running_loop()
        self._writer: int | None = writer
        self._timer: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Forward no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writer is not None:
            self._loop.remove_reader(0)
            os.close(self._writer)
            self._writer = None

    def _listen(self) -> None:
        self._loop.remove_reader(0)
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(0) == os.getpgrp():
                self._loop.add_reader(0, self._read)
                return
        self._timer = self._loop.call_later(_FOREGROUND_S, self._listen)

    def _read(self) -> None:
        if self._writer is None or os.tcgetpgrp(0) != os.getpgrp():
            self._listen()
            return
        try:
            typed = os.read(0, _STDIN_BYTES)
            if not typed:
                self.close()
                return
            os.write(self._writer, typed)
        except BlockingIOError:
            return  # Rank 0 does not read and its pipe is full: drop the input, as a terminal does.
        except OSError:
            self.close()
