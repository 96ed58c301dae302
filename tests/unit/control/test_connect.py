"""Why the coordinator cannot be reached: each kind of evidence has its name, and a fix that names what to do."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from allhands.control.connect import Attempts, diagnose
from allhands.control.wording import NODES, Wording
from allhands.diagnosis import Diagnosis
from allhands.environments.world import Address


def said(
    problem: OSError,
    *,
    host: str = "node-a",
    at: str = "10.0.0.1",
    several_hosts: bool = False,
    wording: Wording | None = None,
) -> Diagnosis:
    """Return the diagnosis of one attempt that ended with ``problem``."""
    attempts = Attempts(Address(host, 29500)) if wording is None else Attempts(Address(host, 29500), wording)
    attempts.tries = 1
    if isinstance(problem, socket.gaierror):
        attempts.name_error = problem
    else:
        attempts.outcomes[at] = problem
    return diagnose(attempts, who="rank 1", several_hosts=several_hosts).diagnosis


def failure(number: int) -> OSError:
    """Return what the system raises."""
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("problem", "slug", "certain", "fix"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "address-unresolvable",
            True,
            "give the right name or the address of rank 0's machine as MASTER_ADDR or init_method",
        ),
        (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
            "name-server-silent",
            False,
            "give the IP address of rank 0's machine as MASTER_ADDR or init_method, or add it to /etc/hosts",
        ),
        (
            failure(errno.ECONNREFUSED),
            "connection-refused",
            True,
            "open port 29500 on node-a for this machine",
        ),
        (
            failure(errno.ENETUNREACH),
            "no-route",
            True,
            "give an address of rank 0's machine on a network that this machine is in as MASTER_ADDR or init_method",
        ),
        (TimeoutError(), "connection-filtered", False, "open port 29500 on node-a for this machine"),
        (failure(errno.EPERM), "connection-filtered", True, "open port 29500 on node-a for this machine"),
    ],
)
def test_each_kind_of_evidence(problem: OSError, slug: str, fix: str, *, certain: bool) -> None:
    """Each kind of evidence has its slug, and the fix names the address, port or host to change."""
    found = said(problem)
    assert (found.slug, found.certain, found.hosts) == (slug, certain, ("node-a",))
    assert fix in found.fix


def test_loopback_with_others_elsewhere() -> None:
    """Refused on one's own loopback, with ranks on several machines: the address is wrong, not the rank."""
    problem = failure(errno.ECONNREFUSED)
    assert said(problem, host="localhost", at="127.0.0.1").slug == "connection-refused"
    found = said(problem, host="localhost", at="127.0.0.1", several_hosts=True)
    assert (found.slug, found.certain) == ("loopback-advertised", False)
    assert "give a name of rank 0's machine" in found.fix


def test_the_fix_for_nodes_names_the_options_of_the_launcher() -> None:
    """The wording for nodes replaces MASTER_ADDR by --coordinator."""
    found = said(socket.gaierror(socket.EAI_AGAIN, "x"), wording=NODES)
    assert "the IP address of node 0's machine as --coordinator" in found.fix
