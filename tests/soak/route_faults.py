"""Faults between machines before a group is formed: names, routes, firewalls. Machines are namespaces."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from hosts.names import serving
from hosts.test_doctor import PORT
from soak.laboratory import Around, Change, Fault, Fix, Site
from soak.remedies import ADDRESS, unset
from soak.scripts import FORM

__all__ = ["BOTH", "FAULTS", "firewall", "let_in", "named_server"]

BOTH = (0, 1)


def firewall(*rules: str, hosts: tuple[int, ...] = (0,)) -> Around:
    """Return a context that applies firewall rules to hosts, and removes them again."""

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


def let_in(site: Site, number: int, ports: str) -> None:
    """Open ports of a host in its firewall, before all the rules that are there."""
    site.hosts[number].run("nft", "insert", "rule", "inet", "test", "in", "tcp", "dport", ports, "accept")


def opened(site: Site, match: re.Match[str]) -> Change:
    """Open the ports that the message names, on the host that it names: one port, or also all above 1023."""
    number = [host.ipv4 for host in site.hosts].index(match["host"])
    let_in(site, number, match["port"])
    if "all above 1023" in match[0]:
        let_in(site, number, "1024-65535")
    return Change()


def opened_between(site: Site, match: re.Match[str]) -> Change:
    """Open all ports above the one that is named, on all hosts."""
    for number in BOTH:
        let_in(site, number, f"{int(match['above']) + 1}-65535")
    return Change()


OPEN = Fix(
    r"open port (?P<port>\d+) on (?P<host>\S+) for this machine( \(and the ports of Gloo.*all above 1023)?", opened
)


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


def rewritten(site: Site, match: re.Match[str]) -> Change:
    """Write the outer address into /etc/hosts in the place of the one that is named."""
    first = site.hosts[0]
    before = first.hosts_file.read_text()
    after = before.replace(f"{match['old']} {match['name']}\n", f"{first.ipv4} {match['name']}\n")
    assert after != before
    first.hosts_file.write_text(after)
    return Change()


def at(host: str) -> Around:
    """Return what lets ranks meet at another address."""

    @contextlib.contextmanager
    def around(site: Site) -> Iterator[Mapping[str, str]]:
        yield {"METHOD": f"tcp://{host}:{site.port}"}

    return around


BY_ENVIRONMENT = (
    "variables()\nos.environ.update(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
    "say(outcome=attempt(formed_by_environment))\nend()\n"
)
MISSING = {0: ("missing-ranks", (1,))}

FAULTS = [
    Fault(
        "a host name that does not exist",
        "before",
        "address-unresolvable",
        (),
        layout=BOTH,
        hosts=("nobody",),
        around=named_server("nobody"),
        body=FORM,
        fix=ADDRESS,
    ),
    Fault(
        "the name server does not answer",
        "before",
        "name-server-silent",
        (),
        layout=BOTH,
        hosts=("node-a",),
        certain=False,
        around=named_server("node-a", silent=True),
        body=FORM,
        fix=ADDRESS,
    ),
    Fault(
        "a firewall drops the coordinator's port",
        "before",
        "connection-filtered",
        (0,),
        layout=BOTH,
        certain=False,
        special=MISSING,
        hosts=("10.77.0.1",),
        around=firewall(f"tcp dport {PORT} drop"),
        body=FORM,
        fix=OPEN,
    ),
    Fault(
        "a firewall rejects the coordinator's port",
        "before",
        "connection-refused",
        (0,),
        layout=BOTH,
        certain=False,
        special=MISSING,
        hosts=("10.77.0.1",),
        around=firewall(f"tcp dport {PORT} reject"),
        body=FORM,
        fix=OPEN,
    ),
    Fault(
        "rank 0's host drops every packet of another (one way)",
        "before",
        "connection-filtered",
        (0,),
        layout=BOTH,
        certain=False,
        special=MISSING,
        hosts=("10.77.0.1",),
        around=firewall("ip saddr 10.77.0.2 drop"),
        body=FORM,
        fix=OPEN,
    ),
    Fault(
        "a firewall drops all ports but the coordinator's",
        "before",
        "engine-failed",
        (),
        says="cannot be reached",
        layout=BOTH,
        certain=False,
        around=firewall(f"tcp dport {PORT} accept", f"tcp sport {PORT} accept", "meta l4proto tcp drop", hosts=BOTH),
        body=FORM,
        fix=Fix(r"^open the ports above (?P<above>1023) between the hosts", opened_between),
    ),
    Fault(
        "no route to the coordinator",
        "before",
        "no-route",
        (0,),
        layout=BOTH,
        observers=(1,),
        hosts=("10.99.0.1",),
        body=FORM,
        around=at("10.99.0.1"),
        fix=ADDRESS,
    ),
    Fault(
        "localhost as the address, on two machines",
        "before",
        "loopback-advertised",
        (0,),
        layout=BOTH,
        observers=(1,),
        certain=False,
        hosts=("localhost",),
        around=at("localhost"),
        body=BY_ENVIRONMENT,
        fix=Fix(
            "^as MASTER_ADDR or init_method give a name of rank 0's machine that other machines can reach",
            lambda site, _: Change({"METHOD": f"tcp://{site.hosts[0].name}:{site.port}"}),
        ),
    ),
    Fault(
        "rank 0's name resolves to 127.0.1.1 on its own machine",
        "before",
        "loopback-advertised",
        (0,),
        layout=BOTH,
        observers=(0,),
        around=trap,
        body=BY_ENVIRONMENT,
        fix=Fix(
            r"^in /etc/hosts of this machine write its outer address \(`ip -br addr`\) in the place of "
            r"(?P<old>127\.0\.1\.1) for (?P<name>host-a),",
            rewritten,
        ),
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
        fix=Fix(
            r"give an address of this machine \(`ip -br addr`\) as MASTER_ADDR or init_method",
            lambda site, _: Change({"METHOD": site.method}),
        ),
    ),
    Fault(
        "GLOO_SOCKET_IFNAME=lo on rank 0, with a rank elsewhere",
        "before",
        "interface-mismatch",
        (0,),
        says="GLOO_SOCKET_IFNAME=lo",
        layout=BOTH,
        env={0: {"GLOO_SOCKET_IFNAME": "lo"}},
        body=FORM,
        fix=unset("^unset (?P<names>GLOO_SOCKET_IFNAME),"),
    ),
]
