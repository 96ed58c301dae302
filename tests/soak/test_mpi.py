"""The MPI recipe on two hosts: real mpiruns of both families, with a script for ssh."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hosts.conftest import Making
from hosts.machine import Machine, finish, routed, typed
from ranks.test_mpi import MEANT, mpi
from recipes import CLUSTERS, block

pytestmark = [pytest.mark.soak, pytest.mark.hosts]

# ssh [options] HOST COMMAND...: a shell on that host, with its own small environment, not the caller's.
SSH = """#!{python}
import json, os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
hosts, command = json.loads({hosts!r}), {command!r}
env = json.loads({env!r}) | {{"HOST": json.dumps(hosts[words[0]])}}
os.chdir("/")
os.execve(sys.executable, [sys.executable, command, "bash", "-c", " ".join(words[1:])], env)
"""


@pytest.mark.parametrize(("kind", "having"), [("openmpi", "mpirun --host"), ("mpich", "mpiexec -hosts")])
def test_two_hosts(network: Making, tmp_path: Path, kind: str, having: str) -> None:
    """The recipe's line starts two ranks on each of two hosts, and the four train."""
    beginning = mpi(kind, tmp_path)
    hosts = routed(network(2))
    for host in hosts:
        host.hosts_file.write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    names = ["node1", "node2"]
    places = {name: [host.namespace, name, str(host.hosts_file)] for name, host in zip(names, hosts, strict=True)}
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE") if name in os.environ}
    ssh = tmp_path / "ssh"
    ssh.write_text(
        SSH.format(
            python=sys.executable,
            hosts=json.dumps(places),
            env=json.dumps({"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **MEANT, **kept}),
            command=str(Path(__file__).parents[1] / "hosts/command.py"),
        )
    )
    ssh.chmod(0o755)
    env = {**MEANT, "OMPI_MCA_plm_rsh_agent": str(ssh), "HYDRA_LAUNCHER_EXEC": str(ssh)}
    machine = Machine(hosts[0], "node1", tmp_path, env)
    with typed(machine.type(beginning + block("mpi", having), cwd=CLUSTERS)) as begun:
        (said,) = finish(begun)
    assert "trained: 4 ranks on 2 hosts" in said
    assert "without a token" not in said
