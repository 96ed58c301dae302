"""The guard: a small process that outlives an agent which was killed, and then ends what the agent cannot.

Workers die with their agent by themselves. What they started does not: it is found by the mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from . import process_tree

__all__ = ["Guard"]

# How long it goes on looking after it has found nothing: a process that was being started when the agent died may come
# late. And the longest it looks in all, should someone start processes faster than it ends them.
_QUIET_S, _SWEEP_S = 0.5, 5.0
_PAUSE_S = 0.05


class Guard:
    """The guard, seen from the agent. Start it before any thread: it is a fork of the agent."""

    def __init__(self, name: str, value: str) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # Nothing may leave this branch: everything below the caller belongs to the agent.
            try:
                _watch(reader, self._writer, name, value)
            finally:
                os._exit(0)
        os.close(reader)

    def dismiss(self) -> None:
        """Let it end: nothing is left that it would have to kill."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writer, b".")
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _watch(reader: int, writer: int, name: str, value: str) -> None:
    # In a session of its own: Ctrl-C and the end of the terminal concern the agent.
    os.setsid()
    os.close(writer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # Whoever waits for the end of the agent's output must not wait for the guard.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if os.read(reader, 1):
        return
    begun = found_s = time.monotonic()
    while (now := time.monotonic()) - found_s < _QUIET_S and now - begun < _SWEEP_S:
        found = process_tree.marked(name, value)
        process_tree.kill(found, signal.SIGKILL)
        found_s = now if found else found_s
        time.sleep(_PAUSE_S)
