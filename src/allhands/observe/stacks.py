"""The stacks of a rank's threads, readable from outside while it hangs: faulthandler writes them on a signal.

A process that forms a group offers them: a memfd that stays open, found like the board through ``/proc/PID/fd``. The
handler runs in C, so it answers while the interpreter's lock is held, a library spins or a lock is never given back.
Imports nothing that is slow: it stands in every worker before the script.
"""

from __future__ import annotations

import os
import signal

__all__ = ["SIGNAL", "ask", "make", "offer"]

# A real-time signal that neither glibc (the first two) nor debuggers and timers of common libraries take; scripts keep
# SIGUSR1 and SIGUSR2 for themselves.
SIGNAL = signal.SIGRTMIN + 7

_NAME = "allhands-stacks"

# Stacks are some KiB; what is older than this many bytes is cut off before more is asked for.
_MOST = 1 << 20

# Between looks whether more was written.
_PAUSE_S = 0.02

_offered = False


def make() -> int:
    """Make the memory, for this process or for one that it starts; return its descriptor."""
    import fcntl

    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    # Writers append: whoever asks may empty it, and the writer's place in it does not matter.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def offer() -> None:
    """Let others ask this process for its stacks. Does nothing where the launcher saw to it, or the signal is taken."""
    global _offered  # noqa: PLW0603  # one process, one handler
    if _offered:
        return
    _offered = True
    if _caught(os.getpid()):
        return
    import faulthandler

    # Not closed: it lives as long as the process. A child that is forked writes into it too, when it is asked.
    faulthandler.register(SIGNAL, file=make(), all_threads=True)


def ask(pid: int, seconds: float) -> str:
    """Return the stacks of all threads of ``pid``, "" where it does not offer them, is stopped or does not answer.

    The signal is sent only to a process that catches it: any other would end.
    """
    import time

    place = _find(pid)
    if place is None or not _caught(pid):
        return ""
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if os.fstat(descriptor).st_size > _MOST:
            os.ftruncate(descriptor, 0)
        before = os.fstat(descriptor).st_size
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + seconds
        seen = b""
        while time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            now = os.pread(descriptor, _MOST, before)
            # The outermost frame of a script comes last; without one, two equal looks must do.
            if now and now == seen and (b" in <module>\n" in now[-400:] or time.monotonic() > deadline - seconds / 2):
                break
            seen = now
        return seen.decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _find(pid: int) -> str | None:
    """Return the path of the memfd in ``pid``, None where it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):  # noqa: PTH208  # here and below: pathlib is slow to import
            try:
                if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{_NAME} "):  # noqa: PTH115
                    return f"{folder}/{name}"
            except OSError:
                continue  # Closed meanwhile.
    except OSError:
        return None
    return None


def _caught(pid: int) -> bool:
    """Tell whether ``pid`` has a handler for the signal, and is not stopped."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            status = file.read()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    except (OSError, IndexError, ValueError):
        return False
    return bool(caught >> (SIGNAL - 1) & 1) and "\nState:\tT" not in status
