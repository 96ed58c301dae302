"""What the kernel shows of a process: its pid in its own namespace, its system call, its ports."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from allhands.doctor.proc_status import environment, inner_pid, listening_ports, waiting_in

# Listens on a port, and opens and closes other descriptors until it is killed.
CHURN = """
import os, socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        made = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        for each in made:
            os.close(each)
"""


def test_listening_ports_while_descriptors_change() -> None:
    """A descriptor that is closed meanwhile does not hide the port on which the process listens."""
    with subprocess.Popen([sys.executable, "-c", CHURN], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            found = [listening_ports(process.pid) for _ in range(30)]
        finally:
            process.kill()
    assert found == [(port,)] * 30


def test_sleeping_child() -> None:
    """A child that sleeps has this process's environment, its own pid, and a system call in which it waits."""
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607  # any program
        try:
            deadline = time.monotonic() + 10
            while "nanosleep" not in waiting_in(process.pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert environment(psutil.Process(process.pid)).get("PATH") == os.environ["PATH"]
            assert inner_pid(process.pid) == process.pid
        finally:
            process.kill()
            process.wait()
        assert waiting_in(2**22 + 1) == ""


def test_environment_of_a_process_that_has_ended() -> None:
    """Nothing is known, and nothing is raised."""
    with subprocess.Popen(["true"]) as child:  # noqa: S607  # any program
        process = psutil.Process(child.pid)
    assert environment(process) == {}
