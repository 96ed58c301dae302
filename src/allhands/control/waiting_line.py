"""The line that reports what a command waits for: updated in place on a terminal, one line each 10 s elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["WaitingLine"]

# A group that forms faster than this prints nothing.
_QUIET_S = 1.0

# In a log file every line stays; more of them would hide other output.
_LOG_EVERY_S = 10.0


class WaitingLine:
    """Prints lines to ``stream`` (standard error by default); nothing if ``shown`` is False."""

    def __init__(self, prefix: str, *, shown: bool = True, stream: TextIO | None = None) -> None:
        self._prefix = prefix
        self._stream = stream if stream is not None else sys.stderr
        self._shown = shown
        self._terminal = self._stream is not None and self._stream.isatty()
        self._started = time.monotonic()
        self._last = 0.0 if self._terminal else self._started + _QUIET_S - _LOG_EVERY_S
        self._open = False

    def __call__(self, line: str) -> None:
        """Show ``line`` unless the last one was too recent."""
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
        """Erase the line from the terminal."""
        if self._open:
            self._write("\r\x1b[K")
            self._open = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._shown = False  # The stream is closed; the job continues.
