from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import leaks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for leftovers to go."""
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.0)


def test_nothing_is_found_where_nothing_was_left() -> None:
    """A test that leaves nothing passes."""
    assert leaks.left_behind(leaks.snapshot()) == []


@pytest.mark.usefixtures("hasty")
def test_a_process_is_found_and_ended() -> None:
    """A child that a test forgot is named, and does not outlive the test."""
    before = leaks.snapshot()
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    (found,) = leaks.left_behind(before)
    assert found.startswith(f"process {child.pid}: ")
    assert not leaks.alive(child.pid)
    child.wait()


@pytest.mark.usefixtures("hasty")
def test_an_orphan_is_found_and_ended() -> None:
    """A grandchild whose own parent was killed is found as well."""
    before = leaks.snapshot()
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{start}; {SLEEP}"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    found = leaks.left_behind(before)
    assert [line.split(":")[0] for line in found] == [f"process {orphan}"]
    assert not leaks.alive(orphan)


@pytest.mark.usefixtures("hasty")
def test_a_listening_port_is_found() -> None:
    """A port that is still open is named by its number; a socket that does not listen is no matter."""
    before = leaks.snapshot()
    with socket.socket() as quiet, socket.socket() as listener:
        quiet.bind(("127.0.0.1", 0))
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert leaks.left_behind(before) == [f"listening port {listener.getsockname()[1]} (tcp)"]
    assert leaks.left_behind(before) == []


@pytest.mark.usefixtures("hasty")
def test_an_abstract_socket_is_found() -> None:
    """An abstract Unix socket of ours is reported; one of another program is not."""
    name = f"allhands-test-{uuid.uuid4().hex}"
    before = leaks.snapshot()
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as ours:
        other.bind(f"\0{uuid.uuid4().hex}")
        ours.bind(f"\0{name}")
        ours.listen()
        assert leaks.left_behind(before) == [f"Unix socket @{name}"]
    assert leaks.left_behind(before) == []


@pytest.mark.usefixtures("hasty")
def test_a_shared_memory_file_is_found() -> None:
    """A file of ours in /dev/shm is named."""
    # With this process's number, so that tests of other processes know that it is not theirs.
    path = Path("/dev/shm") / f"allhands-test-{os.getpid()}-{uuid.uuid4().hex}"
    before = leaks.snapshot()
    path.touch()
    try:
        assert leaks.left_behind(before) == [f"shared memory {path}"]
    finally:
        path.unlink()


def test_processes_that_end_by_themselves_are_given_time() -> None:
    """A process that ends shortly after its test is no leak."""
    before = leaks.snapshot()
    # It is told to end once it has started, which may take long.
    ends = "import sys, time; print(flush=True); sys.stdin.read(); time.sleep(0.2)"
    with subprocess.Popen([sys.executable, "-c", ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        child.stdin.close()
        assert leaks.left_behind(before) == []


def test_looking_is_cheap() -> None:
    """A check without findings costs milliseconds, since every test pays for it (the limit is ten times wider).

    Of this process's own time: what others take of the machine is not the look's.
    """
    start = time.process_time()
    assert leaks.left_behind(leaks.snapshot()) == []
    assert time.process_time() - start < 0.05
