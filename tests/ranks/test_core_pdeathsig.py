from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import leaks

pytest.importorskip("allhands._core", reason="the C core is built on Linux only")

# The child: sets the signal, checks that its parent is alive, prints that, and waits.
CHILD = """
import os, signal, sys, time
from allhands._core import set_parent_death_signal
code = set_parent_death_signal(signal.SIGKILL)
print(os.getpid(), code, os.getppid() == int(sys.argv[1]), flush=True)
time.sleep(60)
"""

# Its parent: starts it and would stay too.
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
time.sleep(60)
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    """A process with a parent-death signal does not outlive a parent that got `kill -9`."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid, code, had_parent = parent.stdout.readline().split()
            assert (code, had_parent) == ("0", "True")
            assert leaks.alive(int(pid))
        finally:
            parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while leaks.alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not leaks.alive(int(pid))
