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


def test_this_process_is_described_as_the_system_does() -> None:
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


def test_blanks_in_a_process_name_do_not_shift_the_fields() -> None:
    """A process name with blanks and brackets, which /proc does not escape, does not change the start time."""
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
    """Processes share a key where they share the kernel and its network namespace, the extent of loopback."""
    assert host_key() == host_key()
    kernel, _, namespace = host_key().rpartition(":")
    assert kernel == boot()
    assert int(namespace) == Path("/proc/self/ns/net").stat().st_ino


def test_the_host_key_without_boot_id_and_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boot id and namespace the key is made of the host name."""

    def refuse(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(process_identity, "boot", lambda: "")
    monkeypatch.setattr(Path, "stat", refuse)
    assert host_key() == f"{socket.gethostname()}:0"


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_owner_of_a_port_is_found(family: socket.AddressFamily, host: str) -> None:
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
    """A connected socket with that port is not its owner."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert port_owner(client.getsockname()[1]) is None


def test_a_process_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user is an owner without a pid, and is described as such."""
    entry = SimpleNamespace(status=psutil.CONN_LISTEN, laddr=SimpleNamespace(ip="", port=4021), pid=None)
    monkeypatch.setattr(psutil, "net_connections", lambda **_: [entry])
    found = port_owner(4021)
    assert found == PortOwner(0, "", "")
    assert "another user" in str(found)


@pytest.mark.parametrize("first", ["nothing", "no process"])
def test_a_socket_that_was_opened_during_the_search(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's tables are read again if they do not match, because they are not read atomically."""
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
    """A process that ends before its name is read is still reported as the owner."""
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
    """A coordinator of allhands is recognised by its command line."""
    assert PortOwner(1, command, "ada").ours is ours
