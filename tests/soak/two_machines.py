"""Faults between machines: names, routes, firewalls and cables. Each machine is a network namespace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hosts.conftest import ip
from hosts.names import serving
from hosts.test_doctor import PORT, listening, look_at, named
from hosts.test_doctor import _typed as typed_there
from ranks.harness import Job
from soak.laboratory import INTO_S, Around, Fault, Finding, Site
from soak.one_machine import CALL, FORM, FORMED

__all__ = ["FAULTS"]

SPIN = FORMED + "say(ready=True)\ndef call():\n    while True:\n        dist.all_reduce(x)\n" + CALL

BOTH = (0, 1)


def firewall(*rules: str, hosts: tuple[int, ...] = (0,)) -> Around:
    """Return what puts rules before hosts, and takes them away again."""

    @contextlib.contextmanager
    def around(site: Site) -> Iterator[Mapping[str, str]]:
        for number in hosts:
            site.hosts[number].firewall(*rules)
        try:
            yield {}
        finally:
            for number in hosts:
                site.hosts[number].run("nft", "flush", "ruleset")

    return around


@contextlib.contextmanager
def vanishing(site: Site) -> Iterator[Mapping[str, str]]:
    """Let packets from the second host to the first go nowhere."""
    site.hosts[1].lose(site.hosts[0])
    try:
        yield {}
    finally:
        ip(f"-n {site.hosts[1].namespace} neigh del {site.hosts[0].ipv4} dev eth0")


@contextlib.contextmanager
def mended(site: Site) -> Iterator[Mapping[str, str]]:
    """Put the cable back after the block, and let packets find their way again."""
    yield {}
    for host, other in (site.hosts, site.hosts[::-1]):
        host.link("up")
        # Only where it was told a wrong one.
        with contextlib.suppress(AssertionError):
            ip(f"-n {host.namespace} neigh del {other.ipv4} dev eth0")


def named_server(host: str, **how: float) -> Around:
    """Return what lets both hosts ask a name server of their own for ``host``."""

    @contextlib.contextmanager
    def around(site: Site) -> Iterator[Mapping[str, str]]:
        resolver = site.folder / "resolv"
        resolver.write_text("nameserver 127.0.0.53\n")
        with contextlib.ExitStack() as stack:
            for each in site.hosts:
                names = stack.enter_context(serving(each.namespace, "127.0.0.53", **how))  # type: ignore[arg-type]
                names.known["node-a"] = site.hosts[0].ipv4
            yield {"RESOLVER": str(resolver), "METHOD": f"tcp://{host}:{site.port}"}

    return around


@contextlib.contextmanager
def trap(site: Site) -> Iterator[Mapping[str, str]]:
    """Let rank 0's own name lead to loopback at home, as Debian does."""
    first = site.hosts[0]
    good = first.hosts_file.read_text()
    first.hosts_file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {first.name}\n")
    try:
        yield {"METHOD": f"tcp://{first.name}:{site.port}", "LOCAL_WORLD_SIZE": "1"}
    finally:
        first.hosts_file.write_text(good)


def at(host: str) -> Around:
    """Return what lets ranks meet at another address."""

    @contextlib.contextmanager
    def around(site: Site) -> Iterator[Mapping[str, str]]:
        yield {"METHOD": f"tcp://{host}:{site.port}"}

    return around


def cable(job: Job, site: Site) -> float:
    """Pull the second host's cable in the middle of a collective."""
    job.wait_for("ready")
    time.sleep(INTO_S)
    site.hosts[1].link("down")
    return time.time()


def partition(job: Job, site: Site) -> float:
    """Let every packet between the hosts vanish in the middle of a collective."""
    job.wait_for("ready")
    time.sleep(INTO_S)
    first, second = site.hosts
    first.lose(second)
    second.lose(first)
    return time.time()


def one_way(job: Job, site: Site) -> float:
    """Let every packet from the second host to the first vanish in the middle of a collective."""
    job.wait_for("ready")
    time.sleep(INTO_S)
    site.hosts[1].lose(site.hosts[0])
    return time.time()


def clocks(site: Site) -> Finding:
    """Look from a host at one whose clock is 95 s ahead."""
    first, second = site.hosts
    with listening(first, clock=lambda: time.time() + 95):
        began = time.monotonic()
        found = named(look_at(second, first), "clock")
    return Finding(found.slug, found.what, time.monotonic() - began)


def ports_back(site: Site) -> Finding:
    """Look from a host that others cannot reach on the ports that Gloo and NCCL use."""
    first, second = site.hosts
    second.firewall("tcp dport 40000-65535 ct state new drop")
    with listening(first):
        began = time.monotonic()
        found = named(look_at(second, first), "ports-back")
        took = time.monotonic() - began
        second.run("nft", "flush", "ruleset")
        assert {each.level for each in look_at(second, first)} == {"green"}
    return Finding(found.slug, found.what, took)


def large_packets(site: Site) -> Finding:
    """Look through a switch that passes only smaller packets than the machines send; then send smaller ones."""
    first, second = site.hosts
    switch = f"{first.namespace[:-2]}-s"
    ip(f"-n {switch} link set port0 mtu 1300", f"-n {switch} link set port1 mtu 1300")
    ip(*(f"-n {host.namespace} link set eth0 gso_max_segs 1" for host in site.hosts))
    with listening(first):
        began = time.monotonic()
        found = named(look_at(second, first), "packet-size")
        took = time.monotonic() - began
        ip(*(f"-n {host.namespace} link set eth0 mtu 1300" for host in site.hosts))
        assert {each.level for each in look_at(second, first)} == {"green"}
    return Finding(found.slug, found.what, took)


def asked(site: Site, check: str, **how: float) -> Finding:
    """Look at a name that only such a name server knows."""
    second = site.hosts[1]
    (site.folder / "asked").mkdir()
    with named_server("node-a", **how)(site) as env:
        began = time.monotonic()
        found = named(typed_there(second, "node-a", site.folder / "asked", Path(env["RESOLVER"])), check)
    return Finding(found.slug, found.what, time.monotonic() - began)


def silent_server(site: Site) -> Finding:
    """Look where the name server does not answer."""
    return asked(site, "target-name", silent=True)


def slow_server(site: Site) -> Finding:
    """Look where the name server answers late."""
    return asked(site, "name-time", slow_s=0.55)


MISSING = {0: ("missing-ranks", (1,))}
ONLY_1 = "if not faulty or rank:\n    say(outcome=attempt(form))\nend()\n"

FAULTS = [
    Fault(
        "a host name that does not exist",
        "before",
        "address-unresolvable",
        (),
        layout=BOTH,
        host="nobody",
        around=named_server("nobody"),
        body=FORM,
        fix="the right name",
    ),
    Fault(
        "the name server does not answer",
        "before",
        "name-server-silent",
        (),
        layout=BOTH,
        certain=False,
        around=named_server("node-a", silent=True),
        look=silent_server,
        body=FORM,
    ),
    Fault(
        "the name server takes 0.6 s for each answer",
        "before",
        "name-server-silent",
        (),
        layout=BOTH,
        certain=False,
        around=named_server("node-a", slow_s=0.55),
        look=slow_server,
        body=FORM,
    ),
    Fault(
        "a firewall drops the coordinator's port",
        "before",
        "connection-filtered",
        (0,),
        layout=BOTH,
        certain=False,
        special=MISSING,
        around=firewall(f"tcp dport {PORT} drop"),
        body=FORM,
        fix="open the port",
    ),
    Fault(
        "a firewall rejects the coordinator's port",
        "before",
        "connection-refused",
        (0,),
        layout=BOTH,
        certain=False,
        special=MISSING,
        around=firewall(f"tcp dport {PORT} reject"),
        body=FORM,
        fix="open the port",
    ),
    Fault(
        "packets to rank 0's host vanish (one way)",
        "before",
        "connection-filtered",
        (0,),
        layout=BOTH,
        certain=False,
        special=MISSING,
        around=vanishing,
        body=FORM,
        fix="let them pass",
    ),
    Fault(
        "no route to the coordinator",
        "before",
        "no-route",
        (0,),
        layout=BOTH,
        observers=(1,),
        body=ONLY_1,
        around=at("10.99.0.1"),
        fix="the right address",
    ),
    Fault(
        "localhost as the address, on two machines",
        "before",
        "loopback-advertised",
        (0,),
        layout=BOTH,
        observers=(1,),
        certain=False,
        around=at("localhost"),
        fix="rank 0's address",
        body="variables()\nos.environ.update(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
        "say(outcome=attempt(formed_by_environment))\nend()\n",
    ),
    Fault(
        "rank 0's name leads to 127.0.1.1 at home",
        "before",
        "loopback-advertised",
        (0,),
        layout=BOTH,
        observers=(0,),
        around=trap,
        fix="its address in /etc/hosts",
        body="variables()\nos.environ.update(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
        "say(outcome=attempt(formed_by_environment))\nend()\n",
    ),
    Fault(
        "rank 0 started on another machine than its address",
        "before",
        "address-not-local",
        (0,),
        layout=BOTH,
        observers=(0,),
        around=at("10.77.0.2"),
        body=FORM,
        fix="the address of rank 0's machine",
    ),
    Fault(
        "GLOO_SOCKET_IFNAME=lo on two machines",
        "before",
        "interface-mismatch",
        (0, 1),
        either=True,
        layout=BOTH,
        body="if faulty:\n    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n" + FORM,
        fix="unset GLOO_SOCKET_IFNAME",
    ),
    Fault(
        "a firewall drops all ports but the coordinator's",
        "before",
        "engine-failed",
        (),
        host="10.77.0.",
        layout=BOTH,
        certain=False,
        around=firewall(f"tcp dport {PORT} accept", f"tcp sport {PORT} accept", "meta l4proto tcp drop", hosts=BOTH),
        body=FORM,
        fix="open the ports between the machines",
    ),
    Fault(
        "a cable is pulled in mid-collective",
        "during",
        "peer-lost",
        (1,),
        layout=BOTH,
        certain=False,
        special={1: ("coordinator-lost", (0,))},
        body=SPIN,
        around=mended,
        during=cable,
        timeout_s=20.0,
        host="",
    ),
    Fault(
        "a partition in mid-collective",
        "during",
        "peer-lost",
        (1,),
        layout=BOTH,
        certain=False,
        special={1: ("coordinator-lost", (0,))},
        body=SPIN,
        around=mended,
        during=partition,
        timeout_s=20.0,
    ),
    Fault(
        "packets vanish one way in mid-collective (half-open)",
        "during",
        "peer-lost",
        (1,),
        layout=BOTH,
        certain=False,
        special={1: ("coordinator-lost", (0,))},
        body=SPIN,
        around=mended,
        during=one_way,
        timeout_s=20.0,
    ),
    Fault("clocks differ by 95 s", "doctor", "clock-skewed", (), layout=BOTH, look=clocks, alone="does not look"),
    Fault(
        "the ports of Gloo are shut in one direction",
        "doctor",
        "ports-filtered",
        (),
        layout=BOTH,
        certain=False,
        look=ports_back,
        alone="does not look",
        fix="remove the rule",
    ),
    Fault(
        "large packets vanish",
        "doctor",
        "mtu-mismatch",
        (),
        layout=BOTH,
        certain=False,
        look=large_packets,
        alone="does not look",
        fix="ip link set eth0 mtu 1300",
    ),
]
