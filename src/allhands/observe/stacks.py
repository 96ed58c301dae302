"""The stacks of a rank's threads, readable from outside while the rank hangs.

A process that forms a group registers a faulthandler on a signal. It writes into a memfd that stays open and is found
through ``/proc/PID/fd``, like the flight recorder. The handler is written in C: it also works while the GIL is held, a
library spins or a lock is never released. Imports nothing slow: every worker loads this module before its script.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import time

from .flight_recorder import open_memfds

__all__ = ["SIGNAL", "make", "register", "request"]

# A real-time signal that neither glibc (it uses the first two) nor the debuggers and timers of common libraries use.
# SIGUSR1 and SIGUSR2 are left to scripts.
SIGNAL = signal.SIGRTMIN + 7

_NAME = "allhands-stacks"

# Stacks are some KiB. A file of more bytes than this is emptied before the next request.
_MOST = 1 << 20

_POLL_S = 0.02


def make() -> int:
    """Create the memory, for this process or a child; return its descriptor."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    # The writer appends, so that a reader may empty the file at any time.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def register() -> None:
    """Let other processes request this process's stacks.

    Does nothing if the handler is registered already, or the script uses the signal.
    """
    if not _is_handled(os.getpid()):
        # Never closed: it lives as long as the process. Forked children write into it too.
        faulthandler.register(SIGNAL, file=make(), all_threads=True)


def request(pid: int, timeout_s: float) -> str:
    """Return the stacks of all threads of ``pid``; "" if it has no handler, is stopped or does not answer in time.

    The signal is sent only to a process that handles it: its default action would end any other.
    """
    descriptor = -1
    try:
        paths = open_memfds(pid, _NAME) if _is_handled(pid) else []
        if not paths:
            return ""
        descriptor = os.open(paths[0], os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size > _MOST:
            os.ftruncate(descriptor, 0)
        before = os.fstat(descriptor).st_size
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + timeout_s
        seen = b""
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            now = os.pread(descriptor, _MOST, before)
            # The outermost frame of a script is written last. Without one, two equal reads must suffice.
            if now and now == seen and (b" in <module>\n" in now[-400:] or time.monotonic() > deadline - timeout_s / 2):
                break
            seen = now
        return seen.decode(errors="replace")
    except (LookupError, OSError):
        return ""
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_handled(pid: int) -> bool:
    """Return whether ``pid`` has a handler for the signal and is not stopped."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            status = file.read()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    except (OSError, IndexError, ValueError):
        return False
    return bool(caught >> (SIGNAL - 1) & 1) and "\nState:\tT" not in status
