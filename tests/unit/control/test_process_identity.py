from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from allhands.control import process_identity
from allhands.control.process_identity import PortOwner, boot, host_key, port_owner, process_start, this_process


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


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens_is_named(family: socket.AddressFamily, host: str) -> None:
    """The process that listens on a port is found, with its command and user."""
    with socket.socket(family) as sock:
        try:
            sock.bind((host, 0))
        except OSError as problem:
            pytest.skip(f"{host} cannot be bound here: {problem}")
        port = sock.getsockname()[1]
        assert port_owner(port) is None, "bound is not listening"
        sock.listen()
        found = port_owner(port)
        assert found is not None
        assert (found.pid, found.user) == (os.getpid(), psutil.Process().username())
        assert " ".join(psutil.Process().cmdline()).startswith(found.command)
        assert f"pid {os.getpid()} of {found.user} (" in str(found)
        assert not found.ours
    assert port_owner(port) is None


def test_a_connection_is_not_a_listener() -> None:
    """Who merely talks from that port does not hold it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert port_owner(client.getsockname()[1]) is None


def test_a_process_that_may_not_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's process is a holder without a number, and is said to be that."""
    entry = SimpleNamespace(status=psutil.CONN_LISTEN, laddr=SimpleNamespace(ip="", port=4021), pid=None)
    monkeypatch.setattr(psutil, "net_connections", lambda **_: [entry])
    found = port_owner(4021)
    assert found == PortOwner(0, "", "")
    assert "another user" in str(found)


@pytest.mark.parametrize("first", ["nothing", "no process"])
def test_a_socket_that_was_opened_while_we_looked(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that do not fit each other, because they were read one after the other, are read once more."""
    place = SimpleNamespace(ip="", port=4021)
    looks = [
        [] if first == "nothing" else [SimpleNamespace(status=psutil.CONN_LISTEN, laddr=place, pid=None)],
        [SimpleNamespace(status=psutil.CONN_LISTEN, laddr=place, pid=os.getpid())],
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda **_: looks.pop(0))
    found = port_owner(4021)
    assert found is not None
    assert found.pid == os.getpid()


def test_a_process_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that is gone before it can be asked for its name is still a holder."""
    entry = SimpleNamespace(status=psutil.CONN_LISTEN, laddr=SimpleNamespace(ip="", port=4021), pid=2**22 + 1)
    monkeypatch.setattr(psutil, "net_connections", lambda **_: [entry])
    assert port_owner(4021) == PortOwner(2**22 + 1, "?", "?")


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ("python -P -c import sys; … from allhands.control.coordinator_process import main", True),
        ("python train.py", False),
    ],
)
def test_a_coordinator_of_ours_is_recognised(command: str, *, ours: bool) -> None:
    """An allhands coordinator is told from other programs by its command."""
    assert PortOwner(1, command, "ada").ours is ours
