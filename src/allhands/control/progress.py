"""The line that people see while they wait: updated in place on a terminal, one line each 10 s elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["Progress"]

# A group that forms at once says nothing.
_QUIET_S = 1.0

# In a log file every line stays; more often than this buries what matters.
_LOG_EVERY_S = 10.0


class Progress:
    """Shows what is being waited for. ``shown`` False keeps it quiet (another rank on this screen speaks)."""

    def __init__(self, prefix: str, *, shown: bool = True, stream: TextIO | None = None) -> None:
        self._prefix = prefix
        self._stream = stream if stream is not None else sys.stderr
        self._shown = shown
        self._terminal = self._stream is not None and self._stream.isatty()
        self._started = time.monotonic()
        self._last = 0.0 if self._terminal else self._started + _QUIET_S - _LOG_EVERY_S
        self._open = False

    def __call__(self, line: str) -> None:
        """Show ``line``, at most as often as the place allows."""
        now = time.monotonic()
        if not self._shown or self._stream is None or now - self._started < _QUIET_S:
            return
        if self._terminal:
            self._write(f"\r\x1b[K{self._prefix}: {line}")
            self._open = True
        elif now - self._last >= _LOG_EVERY_S:
            self._last = now
            self._write(f"{self._prefix}: {line}\n")

    def done(self) -> None:
        """Take the line off the terminal."""
        if self._open:
            self._write("\r\x1b[K")
            self._open = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._shown = False  # A closed stream is nobody's to read; the job goes on.
