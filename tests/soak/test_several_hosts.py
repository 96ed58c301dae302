"""The recipes by hand: one machine, and an agent on each of two network namespaces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hosts.conftest import Making
from hosts.machine import Machine, finish, routed, typed
from recipes import CLUSTERS, block

pytestmark = pytest.mark.soak


def test_one_machine(tmp_path: Path) -> None:
    """The first line of the index of recipes: two ranks on this machine train."""
    index = (CLUSTERS / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\| one machine \| \| `([^`]+)`", index, flags=re.MULTILINE)
    with typed(Machine(None, "machine", tmp_path).type(command, cwd=CLUSTERS)) as begun:
        (said,) = finish(begun)
    assert "[0] trained: 2 ranks on 1 hosts" in said


@pytest.mark.hosts
@pytest.mark.parametrize("first", [0, 1])
def test_an_agent_on_each_host(network: Making, tmp_path: Path, first: int) -> None:
    """The recipe's lines, whichever machine is first: two agents with two ranks each, one training."""
    hosts = routed(network(2))
    env = {"HOME": str(tmp_path)}
    machines = [Machine(host, f"node{number}", tmp_path, env) for number, host in enumerate(hosts, 1)]
    for host in hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    with typed(machines[0].type(block("hosts", "/dev/urandom"))) as begun:
        finish(begun)
    assert (tmp_path / ".allhands-token").stat().st_mode & 0o777 == 0o600
    lines = [block("hosts", f"--node-rank {number}") for number in range(2)]
    one = machines[first].type(lines[first], cwd=CLUSTERS)
    with typed(one), typed(machines[1 - first].type(lines[1 - first], cwd=CLUSTERS)) as (other,):
        said = finish([one, other])
    assert "[0] trained: 4 ranks on 2 hosts" in said[first]
