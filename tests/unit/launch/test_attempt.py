"""The end of an attempt, with workers that are no processes; and the detection of stalls."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from allhands.launch.attempt import Attempt, NodeReport, StallDetector
from allhands.launch.options import Job
from allhands.launch.termination import descendants
from allhands.launch.verdict import Outcome
from allhands.observe.flight_recorder import Entry, FlightRecorder


def call(number: int = 1, state: str = "running", *, sequence: int = 0, operation: str = "all_reduce") -> Entry:
    """Return a call that began at 100 s."""
    return Entry(
        number, "default", sequence, operation, "SUM", "float32", (4,), 16, -1, "a.py:1", state, True, 100.0, 100.0, 0.0
    )  # fmt: skip


def recording(*calls: Entry) -> FlightRecorder:
    """Return a flight recorder with these calls."""
    return FlightRecorder(1, 0, 2, calls)


def test_stall() -> None:
    """A job stalls once no recorder changed for the timeout, and one call has taken as long."""
    detector = StallDetector(10.0)
    recordings = {0: recording(call()), 1: recording(call(1, "done"))}
    assert detector.update(100.0, recordings) == (False, False)
    assert detector.update(109.9, recordings) == (False, False)
    assert detector.update(110.0, recordings) == (True, True)


def test_progress_restarts_the_timeout() -> None:
    """A call that any rank finishes restarts the timeout."""
    detector = StallDetector(10.0)
    before = {0: recording(call()), 1: recording(call(1, "done"))}
    after = {0: recording(call()), 1: recording(call(2, "done"))}
    detector.update(100.0, before)
    assert detector.update(110.0, after) == (False, False)
    assert detector.update(119.0, after) == (False, True)
    assert detector.update(120.0, after) == (True, True)


def test_computing_is_no_stall() -> None:
    """Where no rank is in a collective, ranks may compute as long as they like; so may ranks without a group."""
    detector = StallDetector(10.0)
    recordings = {0: recording(call(1, "done")), 1: None}
    assert detector.update(100.0, recordings) == (False, False)
    assert detector.update(500.0, recordings) == (True, False)


def test_suspension_is_no_stall() -> None:
    """The time in which the job was suspended does not count."""
    detector = StallDetector(10.0)
    recordings = {0: recording(call()), 1: None}
    detector.update(100.0, recordings)
    detector.reset()
    assert detector.update(200.0, recordings) == (False, False)
    assert detector.update(210.0, recordings) == (True, True)


def test_disabled_detector() -> None:
    """Without --hang-timeout stalls are not detected."""
    assert not StallDetector(0.0).enabled


# An attempt ------------------------------------------------------------------------------------------------------

DEADLINE_S = 10.0


class Worker:
    """A worker without a process, for an attempt. It ends when a signal of ``dies_of`` arrives, or by `exit`."""

    def __init__(self, rank: int, dies_of: set[int], entry: Entry | None = None) -> None:
        # Above the largest pid that Linux gives.
        self.rank, self.pid = rank, (1 << 22) + rank + 1
        self.status: int | None = None
        self.signals: list[int] = []
        self.signalled = asyncio.Event()
        self.attempt: Attempt | None = None
        self._dies_of, self._entry = dies_of, entry

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.status is None

    @property
    def failed(self) -> bool:
        """Whether it ended badly."""
        return bool(self.status)

    def exit(self, status: int) -> None:
        """End."""
        assert self.attempt is not None
        self.attempt.reaped(self.pid, status)

    def end(self, number: int) -> None:
        """Receive a signal."""
        self.signals.append(number)
        self.signalled.set()
        if number in self._dies_of | {signal.SIGKILL} and self.alive:
            self.exit(-number)

    def reaped(self, status: int) -> None:
        """Note the end."""
        self.status = status

    def recording(self) -> FlightRecorder | None:
        """Return its flight recorder."""
        return FlightRecorder(1, self.rank, 2, (self._entry,)) if self._entry is not None else None

    def stacks(self) -> str:
        """Return the stacks."""
        return f"stack of {self.rank}"

    def state(self) -> str:
        """Return the kernel's state."""
        return "sleeping"

    def outcome(self, _: object, node: int | None) -> Outcome:
        """Return how it ended."""
        assert self.status is not None
        return Outcome(self.rank, "host-a", self.pid, self.status, sent=(self.signals or [0])[0], node=node)

    def close(self) -> None:
        """Nothing is open."""


class Role:
    """A `NodeRole` that records the reports to it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.calls: list[tuple[Any, ...]] = []
        self.attempt: Attempt | None = None

    async def serve(self, _: str) -> None:
        """Serve nothing."""

    def worker_failed(self) -> None:
        """Note it."""
        self.calls.append(("worker_failed",))

    def stall_changed(self, *, stalled: bool, in_collective: bool) -> None:
        """Note it; declare a stall of the whole job where both are true."""
        self.calls.append((stalled, in_collective))
        if stalled and in_collective and self.attempt is not None:
            self.attempt.end_stalled()


class NoOutput:
    """The output of workers that print nothing."""

    async def drain(self, _: float) -> None:
        """Nothing is left."""


def run(
    workers: list[Worker], scene: Callable[[Attempt], Awaitable[None]] | None = None, **options: Any
) -> tuple[NodeReport, Role]:
    """Run an attempt of ``workers``, with ``scene`` beside it, to its end."""
    role = Role(Job("train.py", local_world_size=len(workers), **options))
    # Children of the test process are not the attempt's.
    existing = set(descendants(os.getpid()))
    early: Any = SimpleNamespace(
        workers=workers, output_pipes=[], stdin_pipe=None, socket_name="unused", excluded_pids=existing
    )
    output: Any = NoOutput()

    async def both() -> NodeReport:
        attempt = Attempt(role, 0, early, output, started=True)  # type: ignore[arg-type]  # has what an attempt calls
        role.attempt = attempt
        for worker in workers:
            worker.attempt = attempt
        running = asyncio.create_task(attempt.run())
        if scene is not None:
            await scene(attempt)
        return await asyncio.wait_for(running, DEADLINE_S)

    return asyncio.run(both()), role


def test_all_exit() -> None:
    """An attempt whose workers all exit sends no signal and reports nothing."""
    workers = [Worker(0, set()), Worker(1, set())]

    async def exit_all(_: Attempt) -> None:
        for worker in workers:
            worker.exit(0)

    report, role = run(workers, exit_all)
    assert [outcome.status for outcome in report.outcomes] == [0, 0]
    assert (role.calls, [worker.signals for worker in workers]) == ([], [[], []])


def test_failure_is_reported_once() -> None:
    """The failure of a worker is reported once, also where it was the last one to run."""
    workers = [Worker(0, set()), Worker(1, {signal.SIGTERM})]

    async def fail_one(_: Attempt) -> None:
        workers[0].exit(3)

    report, role = run(workers, fail_one)
    assert role.calls == [("worker_failed",)]
    assert workers[1].signals == [signal.SIGTERM]
    assert [outcome.status for outcome in report.outcomes] == [3, -signal.SIGTERM]

    last = Worker(0, set())

    async def fail_last(_: Attempt) -> None:
        last.exit(1)

    _, role = run([last], fail_last)
    assert role.calls == [("worker_failed",)]


def test_sigkill_after_the_grace() -> None:
    """A worker that ignores SIGTERM is killed after --grace."""
    stubborn = Worker(0, set())

    async def end(attempt: Attempt) -> None:
        attempt.end(0.0)

    run([stubborn], end, grace_s=0.1)
    assert stubborn.signals == [signal.SIGTERM, signal.SIGKILL]


def test_second_request_kills_at_once() -> None:
    """The first Ctrl-C is forwarded; the second kills workers that ignore it, whatever --grace is."""
    stubborn = Worker(0, set())

    async def stop_twice(attempt: Attempt) -> None:
        attempt.stop(signal.SIGINT)
        await stubborn.signalled.wait()
        attempt.stop(signal.SIGINT)

    report, _ = run([stubborn], stop_twice, grace_s=600.0)
    assert stubborn.signals == [signal.SIGINT, signal.SIGKILL]
    assert report.stopped == signal.SIGINT


def test_stall_is_reported_with_stacks() -> None:
    """A stall of all ranks is reported to the role; its declaration collects stacks and ends the workers."""
    workers = [Worker(0, {signal.SIGTERM}, call()), Worker(1, {signal.SIGTERM}, call(1, "done"))]
    report, role = run(workers, hang_timeout_s=0.2)
    assert role.calls[-1] == (True, True)
    assert report.stall is not None
    assert (report.stall.lagging, report.stall.stacks) == ((1,), {0: "stack of 0", 1: "stack of 1"})
    assert [worker.signals for worker in workers] == [[signal.SIGTERM], [signal.SIGTERM]]
