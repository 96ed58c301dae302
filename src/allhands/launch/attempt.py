"""One start of all workers of this node, from the first that is started to the last that is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from ..settings import SEATS
from . import oom, process_tree, stall
from .ending import EXPLAIN_S, LEFTOVER_S, Ending
from .keyboard import Keyboard
from .output import Output
from .process import Process
from .start import Ahead
from .starting import start
from .verdict import Outcome

if TYPE_CHECKING:
    from .multinode.node_role import Company

__all__ = ["Attempt", "Story"]

# How soon a due signal or a leftover process is looked at again; ends of workers are seen at once.
_LOOK_S = 0.05

# After the last process is gone its pipes are at their end; this is for a machine that is slow to say so.
_DRAIN_S = 2.0

# How long stacks may take to be written: by a signal handler, for every thread, on a machine that may be busy.
_STACKS_S = 1.5


class Story(msgspec.Struct, frozen=True):
    """All that is known once an attempt is over; `verdict.judge` makes the verdict of it."""

    outcomes: list[Outcome]
    hanging: stall.Hang | None
    stopped: int
    leftovers: list[str]


class Attempt:
    """The workers of this node while they run, and the end of them."""

    def __init__(
        self, company: Company, number: int, ahead: Ahead, output: Output, keyboard: Keyboard, *, begun: bool
    ) -> None:
        """``begun`` says that the workers of ``ahead`` run already and are this attempt's."""
        self.job, self.number = company.job, number
        self._company = company
        self._inquired = False
        self._stood = (False, False)
        self._ahead, self._begun = ahead, begun
        self.processes: list[Process] = ahead.processes if begun else []
        self._output, self._keyboard = output, keyboard
        self._ending = Ending(self.job.grace_s)
        self._changed = asyncio.Event()
        self._hang: stall.Hang | None = None
        self._watch = stall.Watch(self.job.hang_timeout_s)
        self._stopped = 0
        self._leftovers: list[str] = []
        self._memory = oom.Memory()

    async def run(self) -> Story:
        """Start the workers and see them to their end."""
        try:
            self._start()
            await self._company.host(self._ahead.name)
            await self._follow()
            await self._leftover()
            await self._output.drained(_DRAIN_S)
        finally:
            self._keyboard.close()
            self.kill()
        node = self.job.node_rank if self.job.nodes > 1 else None
        outcomes = [process.outcome(self._memory, node) for process in self.processes]
        for process in self.processes:
            process.close()
        return Story(outcomes, self._hang, self._stopped, self._leftovers)

    def _start(self) -> None:
        if self._begun:
            for local_rank, readers in enumerate(self._ahead.readers):
                for stream, reader in enumerate(readers, 1):
                    self._output.adopt(local_rank, stream, reader)
            self._keyboard.pass_on(self._ahead.typed)
            return
        typed = start(
            self.job,
            self.number,
            self.processes,
            name=self._ahead.name,
            token=self._company.token,
            master=self._company.master,
            address=self._company.address,
            opened=lambda local_rank: self._output.open(local_rank, self.number),
        )
        self._keyboard.pass_on(typed)

    # While they run ----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Wait for the end of every worker, sending what is due on the way."""
        while any(process.alive for process in self.processes):
            now = time.monotonic()
            if self._failed and not self._ending.begun:
                self._company.failing()
                self._ending.fail(now)
            self._send(self._ending.due(now))
            await self._look_for_hang(now)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S if self._ending.begun else self._watch.pause_s)

        if not self._ending.begun and self._failed:
            # It was the last one here; others may run on other nodes.
            self._company.failing()

    @property
    def _failed(self) -> bool:
        return any(process.failed for process in self.processes)

    def _send(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.kill()
        elif number:
            for process in self.processes:
                process.send(number)

    def kill(self) -> None:
        """Kill every process of the job, at once."""
        for process in self.processes:
            if process.alive:
                process.send(signal.SIGKILL)
        process_tree.kill(self._others(), signal.SIGKILL)

    def reaped(self, pid: int, status: int) -> None:
        """A child of the agent ended; it may be a worker or an orphan."""
        for process in self.processes:
            if process.pid == pid and process.alive:
                process.ended(status)
                self._memory.look(pid)
        self._changed.set()

    def stop(self, number: int) -> None:
        """Someone wants the job to end: pass the signal on; at the second time kill at once."""
        self._stopped = self._stopped or number
        self._ending.stop(time.monotonic(), number)
        self._changed.set()

    def finish(self, patience_s: float = EXPLAIN_S) -> None:
        """Another node failed, or is lost: the workers may end by themselves for ``patience_s``, then are ended."""
        self._ending.fail(time.monotonic(), patience_s)
        self._changed.set()

    def inquire(self) -> None:
        """The whole job stands still: find out what every worker is doing, then end them."""
        self._inquired = True
        self._changed.set()

    def pause(self) -> None:
        """Stop every worker, as Ctrl-Z does."""
        for process in self.processes:
            process.tell(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on; the time in between is no hang."""
        self._watch.forget()
        for process in self.processes:
            process.tell(signal.SIGCONT)

    # Hangs -------------------------------------------------------------------------------------------------

    async def _look_for_hang(self, now: float) -> None:
        if self._ending.begun:
            return
        if self._watch.on:
            boards = {process.rank: process.notes() for process in self.processes if process.alive}
            stands = self._watch.stands(now, boards)
            if stands != self._stood:
                self._stood = stands
                self._company.still(still=stands[0], inside=stands[1])
        if self._inquired and self._hang is None:
            self._hang = await self.ask()
            self._ending.fail(time.monotonic(), 0.0)

    async def ask(self) -> stall.Hang:
        """Find out what every worker is doing: its board and the stacks of its threads."""
        asked = [process for process in self.processes if process.alive and process.ask_stacks()]
        deadline = time.monotonic() + _STACKS_S
        before: list[str] = []
        while time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            now = [process.stacks() for process in asked]
            if all(now) and now == before:
                break
            before = now
        alive = [process for process in self.processes if process.alive]
        return stall.Hang(
            boards={process.rank: process.notes() for process in alive},
            stacks={process.rank: process.stacks() if process in asked else "" for process in alive},
            states={process.rank: process.state() for process in alive},
            pids={process.rank: process.pid for process in alive},
            after_s=self.job.hang_timeout_s,
        )

    # What they leave ---------------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        workers = {process.pid for process in self.processes if process.alive}
        return [pid for pid in process_tree.descendants(os.getpid(), self._ahead.spared) if pid not in workers]

    async def _leftover(self) -> None:
        """End what outlives the workers: a moment to go by itself, then SIGTERM, then SIGKILL."""
        ending = Ending(self.job.grace_s)
        patient_s = time.monotonic() + LEFTOVER_S
        ending.fail(time.monotonic(), LEFTOVER_S if not self._ending.begun else 0.0)
        # Twice: one whose parent is just ending has no place in what /proc shows at that moment.
        while others := self._others() or self._others():
            number = ending.due(time.monotonic())
            if self._ending.kill_s is not None and time.monotonic() >= self._ending.kill_s:
                number = signal.SIGKILL
            if number and time.monotonic() < patient_s:
                # Whose end follows the last rank's in any case.
                others = [pid for pid in others if not process_tree.variable(pid, SEATS)]
            if number and others:
                self._name(others)
                process_tree.kill(others, number)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S)

    def _name(self, pids: Iterable[int]) -> None:
        if self._leftovers:
            return
        for pid in pids:
            rank = process_tree.variable(pid, "RANK")
            self._leftovers.append(f"pid {pid} of rank {rank or '?'}: {process_tree.command(pid)[:200]}")
