"""Faults between machines of a running group or found by the doctor: cables, ports, packets, clocks, addresses."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from allhands.doctor import Finding as Seen
from hosts.conftest import ip
from hosts.machine import Machine, finish, typed
from hosts.test_doctor import DOCTOR, PORT, named
from hosts.test_doctor import _typed as typed_there
from hosts.test_doctor import translated as nat
from ranks.harness import Job
from soak.laboratory import INTO_S, Fault, Finding, Site
from soak.remedies import AGAIN
from soak.route_faults import BOTH, firewall, let_in, named_server
from soak.scripts import FORM, SPIN

__all__ = ["FAULTS"]


@contextlib.contextmanager
def mended(site: Site) -> Iterator[Mapping[str, str]]:
    """Connect the cable after the block, and restore the route of packets."""
    yield {}
    for host, other in (site.hosts, site.hosts[::-1]):
        host.link("up")
        # Only if a wrong one was set.
        with contextlib.suppress(AssertionError):
            ip(f"-n {host.namespace} neigh del {other.ipv4} dev eth0")


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


class Visit:
    """A doctor that listens on the first host, and one that checks it from the second."""

    def __init__(self, site: Site, **env: str) -> None:
        self._site, self._env = site, env

    def __enter__(self) -> Self:
        first = self._site.hosts[0]
        machine = Machine(first, first.name, self._site.folder, env=self._env)
        self._listener = machine.type(f"exec {DOCTOR} --listen {first.ipv4}:{PORT}")
        self._typed = typed(self._listener)
        self._typed.__enter__()
        self._listener.wait_for("listening on")
        return self

    def __exit__(self, *_: object) -> None:
        self._typed.__exit__(None, None, None)

    def all(self) -> list[Seen]:
        """Return everything that is found."""
        first, second = self._site.hosts
        return typed_there(second, first.ipv4, self._site.folder)

    def look(self, check: str, what: str, fix: str) -> tuple[Seen, float]:
        """Return one finding, and the duration of the check; fail unless it has this text and this fix."""
        began = time.monotonic()
        found = named(self.all(), check)
        took = time.monotonic() - began
        assert what in found.what, found
        assert fix in found.fix, found
        return found, took

    def green(self, found: Seen, took: float) -> Finding:
        """Return what was found; with its fix done, nothing may be left but green."""
        after = self.all()
        assert {each.level for each in after} == {"green"}, after
        return Finding(found.slug, found.what, took, found.fix)


# Clocks -------------------------------------------------------------------------------------------------------

# Preloaded into a program, it shifts the time of day by the number of seconds in a file.
SHIFT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, now);
  FILE *file = id == CLOCK_REALTIME ? fopen(getenv("SHIFT"), "r") : NULL;
  long seconds = 0;
  if (file) {
    if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
    fclose(file);
  }
  now->tv_sec += seconds;
  return code;
}
"""


def shim(site: Site) -> dict[str, str]:
    """Return the variables that shift a program's clock by 95 s, until the file is changed."""
    library, shift = site.folder / "shift.so", site.folder / "shift"
    if not library.exists():
        source = site.folder / "shift.c"
        source.write_text(SHIFT)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)  # noqa: S607
    shift.write_text("95")
    return {"LD_PRELOAD": str(library), "SHIFT": str(shift)}


@contextlib.contextmanager
def shifted(site: Site) -> Iterator[Mapping[str, str]]:
    """Let rank 0's clock be ahead."""
    yield {f"0:{name}": value for name, value in shim(site).items()}


def clocks(site: Site) -> Finding:
    """Check from a host one whose clock is 95 s ahead; then set that clock, as NTP does."""
    env = shim(site)
    with Visit(site, **env) as visit:
        found, took = visit.look("clock", "host-a is 95 s ahead", "keep their time by the same NTP server")
        Path(env["SHIFT"]).write_text("0")
        return visit.green(found, took)


# Ports, packets, addresses, names -------------------------------------------------------------------------------

SHUT = "tcp dport 32768-65535 ct state new drop"


def ports_there(site: Site) -> Finding:
    """Check a host that others cannot reach on the ports of Gloo and NCCL; then open these."""
    with firewall(SHUT)(site), Visit(site) as visit:
        fix = "on host-a accept connections from host-b on all ports above 1023"
        found, took = visit.look("ports-there", "host-b cannot reach", fix)
        let_in(site, 0, "1024-65535")
        return visit.green(found, took)


@contextlib.contextmanager
def narrow(site: Site) -> Iterator[Mapping[str, str]]:
    """Let the switch pass only smaller packets than the machines send."""
    switch = f"{site.hosts[0].namespace[:-2]}-s"
    ip(*(f"-n {switch} link set port{number} mtu 1300" for number in BOTH))
    # As on a real cable: many packets that travel as one would pass any switch of Linux's own.
    ip(*(f"-n {host.namespace} link set eth0 gso_max_segs 1" for host in site.hosts))
    yield {}
    ip(*(f"-n {switch} link set port{number} mtu 1500" for number in BOTH))
    ip(*(f"-n {host.namespace} link set eth0 mtu 1500" for host in site.hosts))


def large_packets(site: Site) -> Finding:
    """Check through such a switch; then run the command of the fix on both machines."""
    with narrow(site), Visit(site) as visit:
        found, took = visit.look(
            "packet-size", "large ones to host-a are lost", "the smallest MTU on the way; 1280 passes"
        )
        (command,) = found.commands
        for host in site.hosts:
            host.run("sh", "-c", command)
        return visit.green(found, took)


@contextlib.contextmanager
def translated(site: Site) -> Iterator[Mapping[str, str]]:
    """Let the second host be seen under another address than the one that it has."""
    with nat(site.hosts[1], "10.77.0.99"):
        yield {}


def translation(site: Site) -> Finding:
    """Check from a host whose address is translated; then use a route without translation."""
    with Visit(site) as visit:
        with translated(site):
            seen = "host-a sees this machine as 10.77.0.99, but its address is 10.77.0.2"
            fix = "use a network on which 10.77.0.2 itself can be reached from host-a"
            found, took = visit.look("translation", seen, fix)
        return visit.green(found, took)


def slow_server(site: Site) -> Finding:
    """Check with a slow name server; then run the command of the fix."""
    second = site.hosts[1]
    with named_server("node-a", slow_s=0.55)(site) as env:
        resolver = Path(env["RESOLVER"])
        began = time.monotonic()
        found = named(typed_there(second, "node-a", site.folder, resolver), "name-time")
        took = time.monotonic() - began
        assert found.fix.startswith("put the name into /etc/hosts")
        (command,) = found.commands
        finish([Machine(second, second.name, site.folder).type(command)])
        after = typed_there(second, "node-a", site.folder, resolver)
    assert not [each for each in after if each.check == "name-time"], after
    return Finding(found.slug, found.what, took, found.fix)


# A tensor of a megabyte is many packets of the largest size.
LARGE = "def large():\n    init()\n    dist.all_reduce(torch.ones(1 << 18))\nsay(outcome=attempt(large))\nend()\n"
GONE = {1: ("coordinator-lost", (0,))}

FAULTS = [
    Fault(
        "a cable is pulled in mid-collective, with a timeout of 20 s",
        "during",
        "peer-lost",
        (1,),
        layout=BOTH,
        certain=False,
        special=GONE,
        body=SPIN,
        around=mended,
        during=cable,
        timeout_s=20.0,
        fix=AGAIN,
    ),
    Fault(
        "a cable is pulled in mid-collective, with a timeout of 5 s",
        "during",
        "peer-silent",
        (1,),
        layout=BOTH,
        certain=False,
        observers=(0,),
        body=SPIN,
        around=mended,
        during=cable,
        fix=AGAIN,
    ),
    Fault(
        "a partition in mid-collective",
        "during",
        "peer-lost",
        (1,),
        layout=BOTH,
        certain=False,
        special=GONE,
        body=SPIN,
        around=mended,
        during=partition,
        timeout_s=20.0,
        fix=AGAIN,
    ),
    Fault(
        "packets are lost one way in mid-collective (half-open)",
        "during",
        "peer-lost",
        (1,),
        layout=BOTH,
        certain=False,
        special=GONE,
        body=SPIN,
        around=mended,
        during=one_way,
        timeout_s=20.0,
        fix=AGAIN,
    ),
    Fault(
        "clocks differ by 95 s",
        "doctor",
        "clock-skewed",
        (),
        layout=BOTH,
        look=clocks,
        around=shifted,
        fresh=True,
        body=FORM,
    ),
    Fault(
        "Gloo's ports are filtered in one direction",
        "doctor",
        "ports-filtered",
        (),
        layout=BOTH,
        certain=False,
        look=ports_there,
        around=firewall(SHUT),
        body=FORM,
    ),
    Fault(
        "large packets are lost",
        "doctor",
        "mtu-mismatch",
        (),
        layout=BOTH,
        certain=False,
        look=large_packets,
        around=narrow,
        body=LARGE,
    ),
    Fault(
        "addresses are translated between machines (NAT)",
        "doctor",
        "ports-filtered",
        (),
        layout=BOTH,
        certain=False,
        look=translation,
        around=translated,
        body=FORM,
    ),
    Fault(
        "the name server takes 0.6 s for each answer",
        "doctor",
        "name-server-silent",
        (),
        layout=BOTH,
        certain=False,
        look=slow_server,
        around=named_server("node-a", slow_s=0.55),
        body=FORM,
    ),
]
