"""What is left of a rank's process: how it ended, and what it wrote into memory that outlives it.

Imports nothing that is slow: workers are started before all that is.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from ..observe import flight_recorder

# Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .oom import Memory
    from .verdict import Outcome

__all__ = ["Evidence"]

# A record is a few KiB; what writes into descriptors that are not its own is not read without end.
_MOST_BYTES = 1 << 20


class Evidence:
    """A rank's process as whoever started it sees it: a worker of the agent, or a child of `spawn`."""

    def __init__(self, rank: int, name: str = "allhands-record") -> None:
        """``name`` is that of the record's memory, by which whoever was forked from the process is found."""
        self.rank = rank
        self.pid = 0
        self.status: int | None = None
        # The signal that it was sent and that it may have died of; 0 for none.
        self.sent, self.sent_s = 0, 0.0
        self.started_s = self.ended_s = 0.0
        self.board = flight_recorder.make()
        self._record, self._fatal = (os.memfd_create(each, os.MFD_CLOEXEC) for each in (name, "allhands-fatal"))

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but 0."""
        return self.status is not None and self.status != 0

    def record(self) -> dict[str, Any]:
        """Return how the script or function ended, as its process wrote it; {} where it wrote nothing."""
        import json

        try:
            found = json.loads(self._text(self._record) or "{}")
        except json.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}

    def notes(self) -> flight_recorder.FlightRecorder | None:
        """Return what is on its board, None where it had no group."""
        try:
            found = flight_recorder.parse(self.pid, self.board)
        except LookupError:
            return None
        return found if found.entries else None

    def outcome(self, kills: Memory, node: int | None = None) -> Outcome:
        """Return all that is known of its end; ``kills`` tells whom the kernel ended for want of memory."""
        import socket

        from .verdict import Outcome

        status = self.status if self.status is not None else -signal.SIGKILL
        return Outcome(
            rank=self.rank,
            host=socket.gethostname(),
            pid=self.pid,
            status=status,
            sent=self.sent,
            sent_s=self.sent_s,
            ended_s=self.ended_s,
            after_s=self.ended_s - self.started_s,
            record=self.record(),
            # What faulthandler wrote at a fatal signal.
            stack=self._text(self._fatal),
            board=self.notes(),
            memory=kills.killed(self.pid) if status == -signal.SIGKILL and not self.sent else "",
            node=node,
        )

    @staticmethod
    def _text(descriptor: int) -> str:
        size = min(os.fstat(descriptor).st_size, _MOST_BYTES)
        return os.pread(descriptor, size, 0).decode(errors="replace")
