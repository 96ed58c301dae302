from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.engines.gloo.connections import Connections, addresses, check_interface, interface_of, loopback_interface
from allhands.errors import ConnectError


def published(*places: tuple[str, int], host: bytes = b"node-a") -> bytes:
    """Return what Gloo puts into a store: a host name, then one socket address for each connection."""
    blob = struct.pack("<Q", len(host)) + host
    for address, port in places:
        if ":" in address:
            raw = struct.pack("<H", socket.AF_INET6) + struct.pack(">HI", port, 0)
            raw += socket.inet_pton(socket.AF_INET6, address)
        else:
            raw = struct.pack("<H", socket.AF_INET) + struct.pack(">H", port)
            raw += socket.inet_pton(socket.AF_INET, address)
        blob += struct.pack("<Q", 136) + raw.ljust(128, b"\0") + struct.pack("<q", len(places))
    return blob


# What Gloo publishes ---------------------------------------------------------------------------------------------


@given(
    st.binary(max_size=64),
    st.lists(st.tuples(st.ip_addresses().map(str), st.integers(1, 65_535)), max_size=6),
)
def test_every_address_is_found(host: bytes, places: list[tuple[str, int]]) -> None:
    """All addresses of both kinds come out in order, whatever the host is called."""
    found = [(ip_address(address), port) for address, port in addresses(published(*places, host=host))]
    assert found == [(ip_address(address), port) for address, port in places]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x00",
        b"42",
        b"some text that a user put into the store",
        bytes(8),
        bytes(4096),
        b"\xff" * 4096,
        struct.pack("<Q", 2**63) + bytes(300),
        struct.pack("<QQ", 0, 136),
        struct.pack("<QQ", 0, 136) + b"\x02",
        struct.pack("<QQ", 0, 135) + bytes(200),
        struct.pack("<QQH", 0, 28, socket.AF_INET) + bytes(26),
    ],
)
def test_anything_else_holds_no_address(blob: bytes) -> None:
    """Other values that pass through the store are not taken for Gloo's."""
    assert addresses(blob) == []


@given(st.binary(max_size=600))
def test_no_bytes_are_too_strange(blob: bytes) -> None:
    """Whatever is in the store, reading it never raises."""
    assert isinstance(addresses(blob), list)


def test_a_value_that_ends_early_gives_what_is_whole() -> None:
    """Of a cut-off value, the whole addresses count."""
    blob = published(("10.0.0.1", 1), ("10.0.0.2", 2))
    assert addresses(blob[:-140]) == [("10.0.0.1", 1)]


# Cutting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Listen on a loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@contextlib.contextmanager
def pair(server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection to ``server``."""
    with socket.create_connection(server.getsockname()) as client, server.accept()[0] as accepted:
        client.settimeout(5)
        accepted.settimeout(5)
        yield client, accepted


def ended(sock: socket.socket) -> bool:
    """Tell whether the connection was shut down."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


def descriptors() -> set[str]:
    """Return the numbers of this process's open descriptors; the one that lists them is the same each time."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_connections_that_gloo_accepted_are_cut(server: socket.socket) -> None:
    """A connection to the address that this process published is ended; one to another address is not."""
    connections = Connections()
    connections.published(published(server.getsockname()))
    with socket.create_server(("127.0.0.1", 0)) as other, pair(server) as (client, accepted), pair(other) as mine:
        # Both ends are in this process, but only the accepted one has that local address.
        assert connections.close_all() == 1
        assert ended(accepted)
        assert ended(client)
        assert not any(map(ended, mine))


def test_connections_that_gloo_made_are_cut(server: socket.socket) -> None:
    """A connection to the address that a peer published is ended, and both ends see it."""
    connections = Connections()
    connections.learned(published(server.getsockname()))
    with pair(server) as (client, accepted), pair(server) as again:
        assert connections.close_all() == 2
        assert all(map(ended, (client, accepted, *again)))
        connections.close_all()  # A second time harms nobody.


def test_nothing_known_cuts_nothing(server: socket.socket) -> None:
    """Without addresses of Gloo no connection of this process is touched: the coordinator's, the user's, a pipe."""
    left, right = socket.socketpair()
    with pair(server) as ends, left, right:
        assert Connections().close_all() == 0
        assert not any(map(ended, (*ends, left, right)))


def test_descriptors_stay_their_owners(server: socket.socket) -> None:
    """Cutting leaves no descriptor behind and closes none: the listening socket and the cut ones stay open."""
    connections = Connections()
    connections.published(published(server.getsockname()))
    with pair(server) as (client, accepted):
        before = descriptors()
        connections.close_all()
        assert descriptors() == before
        assert client.fileno() != -1 != accepted.fileno()
        # It still listens.
        socket.create_connection(server.getsockname()).close()


# Interfaces ------------------------------------------------------------------------------------------------------


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have a loopback, a real interface and one without an address."""

    def entry(family: int, address: str) -> Any:
        return SimpleNamespace(family=family, address=address)

    present = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1"), entry(17, "00:00:00:00:00:00")],
        "eth0": [entry(socket.AF_INET, "10.0.0.4"), entry(socket.AF_INET6, "fe80::1%eth0")],
        "ib0": [entry(17, "00:00:10:29:fe:80")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: present)


@pytest.mark.usefixtures("interfaces")
def test_the_interface_of_an_address_is_found() -> None:
    """An address leads to its interface, also where it is written with its zone."""
    assert interface_of("10.0.0.4") == "eth0"
    assert interface_of("fe80::1") == "eth0"
    assert interface_of("::1") == "lo"
    assert interface_of("10.0.0.5") == ""


def test_this_machine_has_a_loopback() -> None:
    """The loopback interface is found by its address, not by its name."""
    assert loopback_interface() == interface_of("127.0.0.1")


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(("name", "one_host"), [("eth0", True), ("eth0", False), ("lo", True), ("ib0", True)])
def test_an_interface_that_leads_to_the_peers_is_accepted(name: str, *, one_host: bool) -> None:
    """A real interface serves everywhere, loopback where all ranks are on one host."""
    check_interface(name, one_host=one_host, rank=0)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("name", "one_host", "why"),
    [
        ("eth7", True, "it has eth0, ib0, lo"),
        ("lo", False, "lo has 127.0.0.1, ::1, which no other host can reach"),
        ("ib0", False, "ib0 has no address, which no other host can reach"),
    ],
)
def test_an_interface_that_does_not_is_refused(name: str, why: str, *, one_host: bool) -> None:
    """An interface that does not exist, or that leads nowhere, is refused by name, on the rank that chose it."""
    with pytest.raises(ConnectError) as caught:
        check_interface(name, one_host=one_host, rank=3)
    assert (caught.value.slug, caught.value.ranks) == ("interface-mismatch", (3,))
    assert caught.value.hosts == (socket.gethostname(),)
    assert caught.value.diagnosis.why == why
    assert f"GLOO_SOCKET_IFNAME={name}" in caught.value.diagnosis.what
