"""Stand-ins of the coordinator's member, and a session on one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

from allhands.control.messages import Status
from allhands.diagnosis import Diagnosis
from allhands.errors import error
from allhands.groups.session import Session


class FakeMember:
    """A member of a group of ``world_size`` whose coordinator answers at once."""

    def __init__(self, rank: int = 0, world_size: int = 2) -> None:
        self.rank = rank
        self.world_size = world_size
        self.verdict: Diagnosis | None = None
        self.verdict_raised = self.over = self.forked = False
        self.describe: Callable[[], tuple[str, float]] = lambda: ("running", 0.0)
        self.reported: list[Status] = []
        # The verdict that arrives while someone waits for it, and how long was waited.
        self.arriving: Diagnosis | None = None
        self.waits: list[float] = []
        self.condemned: list[Diagnosis] = []
        self.announced: list[tuple[str, str, bool]] = []
        self.callbacks: list[Callable[[Any], None]] = []

    def wait_for_verdict(self, timeout_s: float) -> Diagnosis | None:
        """Return the verdict, after a wait the one that was arriving."""
        self.waits.append(timeout_s)
        if timeout_s > 0:
            self.verdict = self.verdict or self.arriving
        return self.verdict

    def end_group(self, diagnosis: Diagnosis) -> Diagnosis:
        """Record the diagnosis; the first one stands."""
        self.condemned.append(diagnosis)
        self.verdict = self.verdict or diagnosis
        return self.verdict

    def statuses(self, wait_s: float = 1.0) -> list[Status]:
        """Return the statuses."""
        del wait_s
        return self.reported

    def report_failure(self, kind: str, message: str, traceback: str, *, follows: bool) -> None:
        """Record the exception."""
        del traceback
        self.announced.append((kind, message, follows))

    def check_process(self) -> None:
        """This is the process that joined."""

    def check(self) -> None:
        """Raise the verdict, if any."""
        if self.verdict is not None:
            raise error(self.verdict)

    def on_end(self, callback: Callable[[Any], None]) -> None:
        """Keep the callback."""
        self.callbacks.append(callback)

    def end(self, verdict: Diagnosis) -> None:
        """End the group, as the coordinator does."""
        self.verdict = verdict
        for callback in list(self.callbacks):
            callback(verdict)


def make_session(member: FakeMember) -> Session:
    """Return a session of ``member`` on one host."""
    joined = SimpleNamespace(
        member=member, coordinator_process=None, complete=SimpleNamespace(one_host=True), own_address="127.0.0.1"
    )
    return Session(cast("Any", joined), timedelta(seconds=10), "test.py:1")
