"""Groups across hosts, with faults between them. Each host is a network namespace on this machine."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hosts.conftest import Making, Network, outcomes
from hosts.names import serving
from ranks.harness import launch, running, well

pytestmark = pytest.mark.hosts

PORT = 29500

# A certain cause is reported at once; any other within the deadline and a second. Wider, because others use the
# machine too, and far below the deadline where that is not to be waited for.
AT_ONCE_S = 5.0
GRACE_S = 3.0

# How long ranks wait where the cause shows only by waiting: those that come must have come by then.
WITHIN_S = 5

# The kernel gives up a host whose cable was pulled after about 8 s; twice that is a deadline, not a figure.
CABLE_S = 16.0

ENTER = """
from hosts.enter_host import enter
enter()
import os, socket, time
import torch
import allhands as dist
from allhands.groups import session
"""

FORM = (
    ENTER
    + """
from allhands.control import join as roll
roll._TROUBLE_S = 20.0  # how long a rank with trouble of its own waits for a coordinator to tell it to
if str(rank) in os.environ.get("ONLY", "01"):
    method, timeout = os.environ.get("METHOD"), float(os.environ["TIMEOUT"])
    say(outcome=attempt(dist.init_process_group, "gloo", method, timeout, size, rank))
"""
)

REDUCE = (
    ENTER
    + """
dist.init_process_group("gloo", os.environ["METHOD"], 20, size, rank)
x = torch.full((100_000,), float(rank + 1))
dist.all_reduce(x)
peers = sorted({host for host, _ in session.current().connections._peers})
say(sum=float(x[0]), same=bool((x == x[0]).all()), peers=peers,
    name=socket.gethostbyname(socket.gethostname()))
dist.destroy_process_group()
"""
)

# Reduces until it fails.
SPIN = (
    ENTER
    + """
dist.init_process_group("gloo", os.environ["METHOD"], 60, size, rank)
say(formed=True)
def spin():
    while True:
        dist.all_reduce(torch.ones(1000))
say(outcome=attempt(spin))
"""
)


def form(made: Network, layout: list[int], timeout: float, **env: str) -> list[dict[str, Any]]:
    """Let ranks form a group across hosts, by default at rank 0's address; return the outcome of each."""
    method = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}"}
    results = launch(FORM, len(layout), {**method, "TIMEOUT": str(timeout), **env}, each=made.each(layout))
    return outcomes(results, at_most=timeout + GRACE_S)


# Groups that form ------------------------------------------------------------------------------------------------


def test_a_group_forms_across_hosts(network: Making) -> None:
    """Two ranks on each of two hosts reduce over the cable, although each host's own name leads to loopback."""
    made = network()
    results = launch(REDUCE, 4, {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}"}, each=made.each([0, 0, 1, 1]))
    for result in results:
        assert result.returncode == 0, result.stderr
        assert (result["sum"], result["same"]) == (10.0, True)
        assert result["peers"]
        assert set(result["peers"]) <= {made.hosts[0].ipv4, made.hosts[1].ipv4}
        assert result["name"] == "127.0.1.1"


def test_a_group_forms_by_a_name_with_an_ipv6_address_only(network: Making, tmp_path: Path) -> None:
    """The coordinator's name has nothing but an AAAA record; ranks listen and connect there."""
    made = network(families=(6,))
    resolver = tmp_path / "resolv"
    resolver.write_text("nameserver 127.0.0.53\n")
    with ExitStack() as stack:
        for host in made.hosts:
            stack.enter_context(serving(host.namespace, "127.0.0.53")).known["node-a"] = made.hosts[0].ipv6
        lay = "from hosts.enter_host import enter, lay\nimport os\nenter()\n"
        lay += "lay(os.environ['RESOLVER'], '/etc/resolv.conf')\n"
        env = {"METHOD": f"tcp://node-a:{PORT}", "RESOLVER": str(resolver)}
        results = launch(lay + REDUCE.replace("\nenter()\n", "\n"), 2, env, each=made.each([0, 1]))
    assert [result["sum"] for result in well(results)] == [3.0, 3.0]


@pytest.mark.parametrize("families", [(6,), (4, 6)], ids=["ipv6-only", "both"])
def test_a_group_forms_over_ipv6(network: Making, families: tuple[int, ...]) -> None:
    """The coordinator's address may be an IPv6 one, on hosts with and without IPv4."""
    made = network(families=families)
    results = launch(REDUCE, 2, {"METHOD": f"tcp://[{made.hosts[0].ipv6}]:{PORT}"}, each=made.each([0, 1]))
    for result in results:
        assert result.returncode == 0, result.stderr
        assert result["sum"] == 3.0
        assert result["peers"]
        assert not any(peer.startswith("127.") or peer == "::1" for peer in result["peers"])


# Connecting to the coordinator -----------------------------------------------------------------------------------


def test_a_dropped_port_is_filtered(network: Making) -> None:
    """A firewall that drops packets to the coordinator: filtered on the rank behind it, missing on rank 0."""
    made = network()
    if shutil.which("nft") is not None:
        made.hosts[0].firewall(f"tcp dport {PORT} drop")
    else:
        made.hosts[1].lose(made.hosts[0])
    first, second = form(made, [0, 1], WITHIN_S)
    assert (first["slug"], first["ranks"]) == ("missing-ranks", [1])
    assert (second["slug"], second["ranks"], second["certain"]) == ("connection-filtered", [0], False)


def test_a_rejected_port_is_refused(network: Making) -> None:
    """A firewall that rejects: refused on the rank behind it, missing on rank 0."""
    made = network()
    made.hosts[0].firewall(f"tcp dport {PORT} reject")
    first, second = form(made, [0, 1], WITHIN_S)
    assert (first["slug"], first["ranks"]) == ("missing-ranks", [1])
    assert (second["slug"], second["ranks"]) == ("connection-refused", [0])


def test_no_route_is_reported_at_once(network: Making) -> None:
    """A coordinator's address that no route leads to is not waited for."""
    made = network()
    env = {"METHOD": f"tcp://10.99.0.1:{PORT}", "TIMEOUT": "20", "ONLY": "1"}
    (only,) = outcomes(launch(FORM, 2, env, each=made.each([0, 1])), at_most=AT_ONCE_S)
    assert (only["slug"], only["ranks"]) == ("no-route", [0])


def test_localhost_across_hosts_is_loopback(network: Making) -> None:
    """MASTER_ADDR=localhost with one rank on each host: the other rank gets an error that loopback is itself."""
    made = network()
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(PORT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    each = made.each([0, 1], {rank: {"RANK": str(rank), "LOCAL_RANK": "0"} for rank in (0, 1)})
    first, second = outcomes(launch(FORM, 2, {**env, "TIMEOUT": str(WITHIN_S)}, each=each), at_most=WITHIN_S + GRACE_S)
    assert (second["slug"], second["ranks"]) == ("loopback-advertised", [0])
    assert (first["slug"], first["ranks"]) == ("missing-ranks", [1])
    assert "listens on loopback only" in first["text"]


def test_a_name_that_is_loopback_at_home(network: Making) -> None:
    """Debian's 127.0.1.1 line: rank 0 refuses at once to listen where no other host can reach it."""
    made = network()
    env = {"MASTER_ADDR": made.hosts[0].name, "MASTER_PORT": str(PORT), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    each = made.each([0, 1], {rank: {"RANK": str(rank), "LOCAL_RANK": "0"} for rank in (0, 1)})
    (first,) = outcomes(launch(FORM, 2, {**env, "TIMEOUT": "20", "ONLY": "0"}, each=each), at_most=AT_ONCE_S)
    assert (first["slug"], first["ranks"]) == ("loopback-advertised", [0])
    assert "127.0.1.1" in first["text"]


def test_rank_0_on_the_wrong_host(network: Making) -> None:
    """Rank 0 that was started on another host than its address raises at once; the others find no listener there."""
    made = network()
    first, second = form(made, [1, 0], WITHIN_S)
    assert (first["slug"], first["ranks"]) == ("address-not-local", [0])
    assert first["seconds"] < AT_ONCE_S
    assert (second["slug"], second["ranks"]) == ("connection-refused", [0])


# Between the ranks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [(0, 1), (1,)], ids=["everywhere", "on one rank"])
def test_gloo_on_loopback_across_hosts(network: Making, odd: tuple[int, ...]) -> None:
    """GLOO_SOCKET_IFNAME=lo across hosts: every rank gets interface-mismatch at once, on whichever rank it is set."""
    made = network()
    each = made.each([0, 1], {rank: {"GLOO_SOCKET_IFNAME": "lo"} for rank in odd})
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": "20"}
    for outcome in outcomes(launch(FORM, 2, env, each=each), at_most=AT_ONCE_S):
        assert outcome["slug"] == "interface-mismatch"
        assert set(outcome["ranks"]) <= set(odd)


def test_filtered_gloo_ports_end_by_the_deadline(network: Making) -> None:
    """The coordinator's port is open, Gloo's are not: every rank reports it within the deadline and a second."""
    made = network()
    for host in made.hosts:
        host.firewall(f"tcp dport {PORT} accept", f"tcp sport {PORT} accept", "meta l4proto tcp drop")
    for outcome in form(made, [0, 1], WITHIN_S):
        assert outcome["slug"] == "engine-failed"
        assert outcome["hosts"] in ([made.hosts[0].ipv4], [made.hosts[1].ipv4])


@pytest.mark.soak
def test_a_pulled_cable_is_noticed(network: Making) -> None:
    """A host that vanishes in the middle of a collective is lost to the others, and they to it, within seconds."""
    made = network()
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}"}
    with running(SPIN, 2, env, each=made.each([0, 1])) as job:
        job.wait_for("formed")
        time.sleep(0.2)
        made.hosts[1].link("down")
        pulled = time.time()
        first, second = outcomes(job.results())
    assert (first["slug"], first["ranks"], first["hosts"]) == ("peer-lost", [1], ["host-b"])
    assert second["slug"] == "coordinator-lost"
    assert max(first["over"], second["over"]) - pulled < CABLE_S
