"""What people type, for rank 0. Workers are in sessions of their own, where the terminal is not theirs to read."""

from __future__ import annotations

import asyncio
import contextlib
import os

__all__ = ["Keyboard"]

# An agent in the background must not read; it looks this often whether it has come to the foreground.
_LOOK_S = 1.0

_PIECE = 1 << 16


class Keyboard:
    """The agent's standard input. A pipe or a file is rank 0's own; a terminal is read here and passed on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer: int | None = None
        self._waiting: asyncio.TimerHandle | None = None

    def pass_on(self, writer: int | None) -> None:
        """Write what is typed to ``writer``, which is closed here; None where rank 0 reads for itself."""
        self.close()
        if writer is not None:
            self._writer = writer
            self._listen()

    def close(self) -> None:
        """Pass on no more."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
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
        self._waiting = self._loop.call_later(_LOOK_S, self._listen)

    def _read(self) -> None:
        if self._writer is None or os.tcgetpgrp(0) != os.getpgrp():
            self._listen()
            return
        try:
            typed = os.read(0, _PIECE)
            if not typed:
                self.close()
                return
            os.write(self._writer, typed)
        except BlockingIOError:
            # Rank 0 does not read, and nobody types faster than a pipe holds: what comes now is dropped, as a
            # terminal drops it.
            return
        except OSError:
            self.close()
