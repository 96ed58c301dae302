from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from allhands.control import process_identity
from allhands.control.process_identity import boot, host_key, process_start, this_process


def test_this_process_is_told_as_others_see_it() -> None:
    """Host name, number and start time are those that the system itself reports."""
    found = this_process()
    assert (found.host, found.pid) == (socket.gethostname(), os.getpid())
    assert found.started == pytest.approx(psutil.Process().create_time(), abs=1.5)
    assert found.started <= time.time()
    assert str(found) == f"{socket.gethostname()}, pid {os.getpid()}"


def test_ranks_of_one_parent_see_the_same_parent() -> None:
    """The parent's name is exact (kernel ticks, not a clock), so all its children give the same one."""
    ours = this_process().parent
    assert ours == this_process().parent
    name, pid, ticks = ours.split(":")
    assert (name, pid) == (boot(), str(os.getppid()))
    assert int(ticks) > 0


def test_the_start_of_no_process_is_unknown() -> None:
    """There is no start time where there is no process."""
    assert process_start(2**22 + 1) is None


def test_a_strange_process_name_does_not_shift_the_fields() -> None:
    """A name with blanks and brackets in it, which /proc shows as it is, does not spoil the start time."""
    done, found = threading.Event(), []

    def named() -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        (task / "comm").write_text(") R 1 (x")
        found.append(process_start(threading.get_native_id()))
        done.wait(10)

    thread = threading.Thread(target=named)
    thread.start()
    done.set()
    thread.join()
    assert found == [pytest.approx(time.time(), abs=60)]


def test_the_host_key_names_kernel_and_network() -> None:
    """Processes share a key where they share the kernel and its network namespace, which is where loopback ends."""
    assert host_key() == host_key()
    kernel, _, namespace = host_key().rpartition(":")
    assert kernel == boot()
    assert int(namespace) == Path("/proc/self/ns/net").stat().st_ino


def test_the_host_key_without_a_kernel_that_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no boot id and no namespace, the host name is what is left."""

    def refuse(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(process_identity, "boot", lambda: "")
    monkeypatch.setattr(Path, "stat", refuse)
    assert host_key() == f"{socket.gethostname()}:0"
