"""When which signal is due as a job ends. Pure: it is given the time and says what to do."""

from __future__ import annotations

import signal

import msgspec

__all__ = ["EXPLAIN_S", "LEFTOVER_S", "Ending"]

# After the first failure the others may end by themselves this long. The end of a group reaches them in about 0.1 s;
# then they raise, print, and end an interpreter that has torch loaded, on a machine that may be busy.
EXPLAIN_S = 2.0

# What outlives the workers may still be saving something.
LEFTOVER_S = 1.0


class Ending(msgspec.Struct):
    """Where the end of a job stands. Nothing is due before `begin`."""

    grace_s: float
    # The signal that asks workers to end, and when it is due; None once it was sent.
    polite: int = signal.SIGTERM
    polite_s: float | None = None
    kill_s: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the job is ending."""
        return self.polite_s is not None or self.kill_s is not None

    def fail(self, now: float, patience_s: float = EXPLAIN_S) -> None:
        """A worker failed: the others get a moment, then SIGTERM. Does nothing where the end has begun."""
        if not self.begun:
            self.polite_s = now + patience_s

    def stop(self, now: float, number: int) -> None:
        """Someone wants the job to end: pass the signal on now; at the second time kill at once."""
        if self.kill_s is not None:
            self.kill_s = now
            return
        self.polite, self.polite_s = number, now

    def due(self, now: float) -> int:
        """Return the signal that is to be sent now, 0 for none. Each is returned once, SIGKILL again and again."""
        if self.polite_s is not None and now >= self.polite_s:
            self.polite_s, self.kill_s = None, now + self.grace_s
            return int(self.polite)
        if self.kill_s is not None and now >= self.kill_s:
            return int(signal.SIGKILL)
        return 0
