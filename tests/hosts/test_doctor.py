"""`allhands doctor` between machines that are network namespaces: what stands between them is really there."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from allhands.doctor import Finding, Request, make_request, ports, routes
from allhands.doctor.peer import PeerServer, Report
from allhands.environments.world import Address
from hosts.conftest import Host, Making, ip
from hosts.machine import Machine, Typed, finish, typed, within
from hosts.names import serving

pytestmark = pytest.mark.hosts

PORT = 29500
DOCTOR = f"{sys.executable} -m allhands doctor"


def named(found: list[Finding], check: str) -> Finding:
    """Return the finding of ``check``."""
    return next(each for each in found if each.check == check)


def on(host: Host, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns on ``host``; what it raises, it raises here."""

    def guarded() -> tuple[Any, BaseException | None]:
        try:
            return make(), None
        except BaseException as problem:  # noqa: BLE001  # raised again in the test's thread
            return None, problem

    value, problem = within(host.namespace, guarded)
    if problem is not None:
        raise problem
    return value


def request_of(host: str, env: Mapping[str, str] | None = None, port: int = PORT) -> Request:
    """Return the request of a user who typed HOST:PORT."""
    return make_request(Address(host, port), env=env or {})


@contextlib.contextmanager
def listening(
    host: Host, *, clock: Callable[[], float] = time.time, address: str = ""
) -> Iterator[list[Report | None]]:
    """Let a doctor listen on ``host``; yields the reports of its clients."""
    reports: list[Report | None] = []

    def start() -> tuple[PeerServer, threading.Thread]:
        made = PeerServer(Address(address or host.ipv4, PORT), b"", lambda _, report: reports.append(report), clock)
        # A thread has the network of the one that starts it.
        thread = threading.Thread(target=made.serve)
        thread.start()
        return made, thread

    listener, thread = on(host, start)
    try:
        yield reports
    finally:
        listener.stop()
        thread.join()
        listener.close()


def look_at(host: Host, there: Host) -> list[Finding]:
    """Return what a doctor on ``host`` finds out about the way to the one that listens on ``there``."""
    found: list[Finding] = on(host, lambda: list(ports.check(request_of(there.ipv4))))
    assert "a doctor listens" in found[0].what, found
    return found


# One way ------------------------------------------------------------------------------------------------------


def test_refused_filtered_and_no_route_are_told_apart(cables: Making) -> None:
    """Nobody listens; packets vanish; no network leads there: three diagnoses, each in the words of a rank."""
    a, b = cables().hosts
    refused = on(b, lambda: list(ports.check(request_of(a.ipv4))))
    assert (refused[0].slug, refused[0].level) == ("connection-refused", "red")
    nowhere = on(b, lambda: list(ports.check(request_of("10.99.0.1"))))
    assert (nowhere[0].slug, nowhere[0].level) == ("no-route", "red")
    b.lose(a)
    filtered = on(b, lambda: list(ports.check(request_of(a.ipv4))))
    assert (filtered[0].slug, filtered[0].level) == ("connection-filtered", "red")
    assert not filtered[0].certain


def test_interfaces(cables: Making) -> None:
    """The interface that leads there is named; one that is not there, is down or is loopback is red, another yellow."""
    a, b = cables().hosts
    ours = f"-n {b.namespace}"
    ip(f"{ours} link add eth9 type veth peer name eth8", f"{ours} addr add 10.88.0.1/24 dev eth9")
    ip(f"{ours} link set eth9 up", f"{ours} link set eth8 up", f"{ours} link add eth7 type veth peer name eth6")

    def look(**env: str) -> list[Finding]:
        found: list[Finding] = on(b, lambda: list(routes.check(request_of(a.ipv4, env))))
        return found

    # A cable that was just plugged in is not noticed at once.
    deadline = time.monotonic() + 5
    while not look()[0].details["interfaces"]["eth9"]["up"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert look()[0].details["route"] == "eth0"
    wrong = {"nope": "there is no interface", "lo": "is loopback", "eth7": "chooses no interface that works"}
    for name, words in wrong.items():
        found = look(GLOO_SOCKET_IFNAME=name)[1]
        assert (found.level, found.slug) == ("red", "interface-mismatch")
        assert words in found.what
        assert "export GLOO_SOCKET_IFNAME=eth0" in found.commands
    other = look(NCCL_SOCKET_IFNAME="eth9")[1]
    assert (other.level, other.slug) == ("yellow", "interface-mismatch")
    assert {each.level for each in look(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="eth")} == {"green"}


@pytest.mark.soak
def test_one_of_two_addresses_does_not_answer(cables: Making) -> None:
    """IPv4 and IPv6 are both tried: a name with a dead address of one kind is yellow, and the other one is named."""
    a, b = cables().hosts
    with listening(a):
        b.hosts_file.write_text(f"{a.ipv4} node-a\n10.77.0.200 node-a\n")
        found = _typed(b, "node-a", b.hosts_file.parent)
    assert named(found, "families").slug == "no-route"
    assert f"export MASTER_ADDR={a.ipv4}" in named(found, "families").commands


# Both ways ----------------------------------------------------------------------------------------------------


def test_healthy_machines(cables: Making, tmp_path: Path) -> None:
    """As people type it: one listens, the other looks; both see that ports are open both ways, and exit with 0."""
    a, b = cables().hosts
    for host in (a, b):
        host.hosts_file.write_text(f"127.0.0.1 localhost\n{host.ipv4} {host.name}\n")
    listener = Machine(a, a.name, tmp_path).type(f"exec {DOCTOR} --listen --once {a.ipv4}:{PORT}")
    with typed(listener):
        listener.wait_for("listening on")
        report = json.loads(finish([Machine(b, b.name, tmp_path).type(f"exec {DOCTOR} {a.ipv4}:{PORT} --json")])[0])
        (said,) = finish([listener])
    assert report["counts"]["red"] == report["counts"]["yellow"] == 0, report
    found = {each["check"]: each for each in report["findings"]}
    assert "8 there, 8 back" in found["ports"]["what"]
    assert found["throughput"]["details"]["there"] > 0
    assert found["throughput"]["details"]["back"] > 0
    assert 0 < found["round-trip"]["details"]["round_trip_s"] < 1
    assert "clock" in found
    assert f"{b.ipv4} found:" in said
    assert "ports open both ways" in said


def test_one_way_only_and_its_fix(cables: Making) -> None:
    """Ports of the client that its firewall drops are named, with the direction; without the rule all is green."""
    a, b = cables().hosts
    b.firewall("tcp dport 40000-65535 ct state new drop")
    with listening(a) as reports:
        found = look_at(b, a)
        shut = named(found, "ports-back")
        assert (shut.level, shut.slug) == ("red", "ports-filtered")
        assert min(shut.details["shut"]) >= 40000 > max(shut.details["open"])
        assert "drop" in shut.why
        assert not any(each.check == "ports-there" for each in found)
        b.run("nft", "flush", "ruleset")
        assert {each.level for each in look_at(b, a)} == {"green"}
    assert [report is not None and report.red for report in reports] == [True, False]


def test_a_firewall_that_rejects_is_seen_there(cables: Making) -> None:
    """Ports of the listener that are refused although it listens on them are red, in that direction."""
    a, b = cables().hosts
    a.firewall("tcp dport != 29500 ct state new reject with tcp reset")
    with listening(a):
        found = look_at(b, a)
    shut = named(found, "ports-there")
    assert (shut.level, shut.slug) == ("red", "ports-filtered")
    assert "refused" in shut.why
    assert not shut.details["open"]


@pytest.mark.soak
def test_large_packets_are_lost(cables: Making) -> None:
    """A switch that passes only smaller packets than the machines send is found, and the fix that is shown works."""
    a, b = cables().hosts
    switch = f"{a.namespace[:-2]}-s"
    ip(f"-n {switch} link set port0 mtu 1300", f"-n {switch} link set port1 mtu 1300")
    # As on a real cable: many packets that travel as one would pass any switch of Linux's own.
    ip(*(f"-n {host.namespace} link set eth0 gso_max_segs 1" for host in (a, b)))
    with listening(a):
        found = look_at(b, a)
        lost = named(found, "packet-size")
        assert (lost.level, lost.slug) == ("red", "mtu-mismatch")
        for host in (a, b):
            ip(f"-n {host.namespace} link set eth0 mtu 1300")
        assert {each.level for each in look_at(b, a)} == {"green"}
        ip(f"-n {b.namespace} link set eth0 mtu 1280")
        differ = named(look_at(b, a), "packet-size")
    assert (differ.level, differ.slug) == ("yellow", "mtu-mismatch")


@contextlib.contextmanager
def translated(host: Host, seen_as: str) -> Iterator[None]:
    """Let others see ``host`` under another address than the one that it has, as NAT does."""
    chain = f"type nat hook postrouting priority 100; ip daddr 10.77.0.0/24 snat to {seen_as};"
    ip(f"-n {host.namespace} addr add {seen_as}/32 dev eth0")
    host.nft(f"table ip nat {{ chain post {{\n{chain}\n}}\n}}")
    try:
        yield
    finally:
        host.run("nft", "flush", "ruleset")
        ip(f"-n {host.namespace} addr del {seen_as}/32 dev eth0")


def test_translated_address(cables: Making) -> None:
    """A client that the listener sees under another address is told both; without NAT all is green."""
    a, b = cables().hosts
    with listening(a):
        with translated(b, "10.77.0.99"):
            found = named(look_at(b, a), "translation")
        assert (found.level, found.slug) == ("yellow", "ports-filtered")
        assert f"sees this machine as 10.77.0.99, but its address is {b.ipv4}" in found.what
        assert b.ipv4 in found.fix
        assert {each.level for each in look_at(b, a)} == {"green"}


def test_clocks_that_differ(cables: Making) -> None:
    """A listener whose clock is 95 s ahead is named, with by how much."""
    a, b = cables().hosts
    with listening(a, clock=lambda: time.time() + 95):
        skew = named(look_at(b, a), "clock")
    assert (skew.level, skew.slug) == ("yellow", "clock-skewed")
    assert 94 < skew.details["offset_s"] < 96
    assert "95 s ahead" in skew.what


def test_rank_that_connects_to_a_doctor(cables: Making) -> None:
    """The doctor tells a rank that connects that it is no coordinator."""
    from allhands.control import handshake
    from allhands.control.handshake import authenticate
    from allhands.errors import ConnectError

    a, b = cables().hosts
    opening = handshake.hello(job="mine", attempt=0, rank=1, world_size=2, token=b"")
    with (
        listening(a),
        on(b, lambda: socket.create_connection((a.ipv4, PORT))) as link,
        pytest.raises(ConnectError, match="doctor --listen") as caught,
    ):
        authenticate(link, opening, b"", "there", time.monotonic() + 5)
    assert caught.value.slug == "wrong-service"


# Names --------------------------------------------------------------------------------------------------------


def _typed(host: Host, target: str, folder: Path, resolver: Path | None = None) -> list[Finding]:
    begun = Machine(host, host.name, folder, resolver=resolver).type(f"exec {DOCTOR} {target}:{PORT} --json")
    return _findings(begun)


def _findings(begun: Typed) -> list[Finding]:
    with typed(begun), contextlib.suppress(subprocess.TimeoutExpired):
        begun.process.wait(60)
    said = json.loads(begun.said)
    assert begun.process.returncode == said["exit_code"], begun.said
    return [
        Finding(**{**each, "commands": tuple(each["commands"]), "details": each["details"]})
        for each in said["findings"]
    ]


def test_name_servers(cables: Making, tmp_path: Path) -> None:
    """Silent, slow, no such name, another address than /etc/hosts: each is told apart, and a good one is green."""
    a, b = cables().hosts
    b.hosts_file.write_text(f"127.0.0.1 localhost\n{b.ipv4} {b.name}\n10.77.0.9 shadowed\n")
    with contextlib.ExitStack() as stack:
        machines: dict[str, Typed] = {}
        for number, (kind, name, how) in enumerate(
            [
                ("silent", "node-a", {"silent": True}),
                ("slow", "node-a", {"slow_s": 0.55}),
                ("good", "node-a", {}),
                ("unknown", "nobody", {}),
                ("shadow", "shadowed", {}),
            ]
        ):
            address = f"127.0.0.{53 + number}"
            names = stack.enter_context(serving(b.namespace, address, **how))  # type: ignore[arg-type]  # its own names
            names.known |= {"node-a": a.ipv4, "shadowed": a.ipv4}
            resolver = tmp_path / f"resolv-{kind}"
            resolver.write_text(f"nameserver {address}\n")
            (tmp_path / kind).mkdir()
            machine = Machine(b, b.name, tmp_path / kind, resolver=resolver)
            machines[kind] = machine.type(f"exec {DOCTOR} {name}:{PORT} --json")
        found = {kind: _findings(begun) for kind, begun in machines.items()}
    silent = named(found["silent"], "target-name")
    assert (silent.level, silent.slug) == ("red", "name-server-silent")
    assert "127.0.0.53" in silent.why
    late = named(found["slow"], "name-time")
    assert (late.level, late.slug) == ("yellow", "name-server-silent")
    assert named(found["good"], "target-name").level == "green"
    unknown = named(found["unknown"], "target-name")
    assert (unknown.level, unknown.slug, unknown.certain) == ("red", "address-unresolvable", True)
    shadow = named(found["shadow"], "target-name")
    assert (shadow.level, shadow.slug) == ("yellow", "name-shadowed")
    assert "10.77.0.9" in shadow.what
    assert a.ipv4 in shadow.what


def test_a_name_with_an_ipv6_address_only(cables: Making, tmp_path: Path) -> None:
    """Machines without IPv4, a name with nothing but an AAAA record: the way there and back is green."""
    a, b = cables(families=(6,)).hosts
    b.hosts_file.write_text(f"127.0.0.1 localhost\n{b.ipv6} {b.name}\n")
    resolver = tmp_path / "resolv"
    resolver.write_text("nameserver 127.0.0.53\n")
    with serving(b.namespace, "127.0.0.53") as names, listening(a, address=a.ipv6):
        names.known["node-a"] = a.ipv6
        found = _typed(b, "node-a", tmp_path, resolver)
    assert {each.level for each in found} == {"green"}, found
    assert f"node-a is {a.ipv6}" in named(found, "target-name").what
    assert "8 there, 8 back" in named(found, "ports").what


def test_an_own_name_that_leads_to_loopback(cables: Making) -> None:
    """Debian's 127.0.1.1 is yellow where another machine is concerned, and green on one machine alone."""
    a, b = cables().hosts
    trap = named(_typed(b, a.ipv4, b.hosts_file.parent), "own-name")
    assert (trap.level, trap.slug) == ("yellow", "loopback-advertised")
    assert "127.0.1.1" in trap.what
    alone = Machine(b, b.name, b.hosts_file.parent).type(f"exec {DOCTOR} --json")
    assert named(_findings(alone), "own-name").level == "green"
