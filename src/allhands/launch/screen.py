"""The one thread that writes: to the terminal and to log files, in the order in which it was asked to."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Screen"]

# How far it may fall behind before the workers' pipes are no longer read. A pipe holds 64 KiB to 1 MiB for each rank
# besides; a terminal takes about 1 MiB a second.
_MOST_BEHIND = 4 << 20
_RESUME_AT = _MOST_BEHIND // 2

# What is written at once: large for speed, small enough that Ctrl-C is not buried under a long write.
_PIECE = 1 << 16


class Screen:
    """Takes bytes for descriptors from the event loop and writes them in a thread, which may block."""

    def __init__(self, *, resume: Callable[[], None], broken: Callable[[int, OSError], None]) -> None:
        """``resume`` is called when it has caught up, ``broken`` when a descriptor takes no more: in the thread."""
        self._resume, self._broken = resume, broken
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._behind = 0
        self._full = False
        self._over = False
        self._dead: set[int] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="allhands-screen", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether it is too far behind to be given more."""
        return self._full

    def put(self, descriptor: int, data: bytes) -> None:
        """Write ``data`` when its turn comes; never blocks and never loses it."""
        with self._changed:
            self._waiting.append((descriptor, data))
            self._behind += len(data)
            self._full = self._full or self._behind > _MOST_BEHIND
            self._changed.notify()

    def close(self, within_s: float | None = None) -> bool:
        """Write what is left, then end the thread; False where that took longer than ``within_s``."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    # In the thread -----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._over:
                    self._changed.wait()
                if not self._waiting:
                    return
                descriptor, data = self._waiting.popleft()
                pieces, size = [data], len(data)
                while self._waiting and self._waiting[0][0] == descriptor and size < _PIECE:
                    pieces.append(self._waiting.popleft()[1])
                    size += len(pieces[-1])
            if descriptor not in self._dead:
                self._write(descriptor, b"".join(pieces))
            with self._changed:
                self._behind -= size
                resumes = self._full and self._behind <= _RESUME_AT
                if resumes:
                    self._full = False
            if resumes:
                self._resume()

    def _write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view[:_PIECE]) :]
            except BlockingIOError:
                # Someone who shares this terminal made it non-blocking.
                select.select([], [descriptor], [])
            except OSError as problem:
                self._dead.add(descriptor)
                self._broken(descriptor, problem)
                return
