"""Slurm as Debian packages it, on two nodes that are network namespaces: the recipe, and the environment of tasks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hosts.conftest import Making
from hosts.machine import Machine, Typed, finish, routed, typed
from recipes import block, blocks, copy
from unit.environments.test_slurm import BATCH, SALLOC, SRUN, TASKS

pytestmark = [pytest.mark.soak, pytest.mark.hosts]

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "munged")

# CPUs are claimed, not counted: four tasks must fit on any machine. The cgroup plugins want a machine of their own.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=node1(10.77.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A cluster of two nodes, and a folder that both see."""

    nodes: list[Machine]
    shared: Path

    def run(self, script: str, **env: str) -> str:
        """Type ``script`` on the first node, in the folder of the recipes; return what it printed."""
        with typed(self.nodes[0].type(script, env, self.shared)) as begun:
            return finish(begun)[0]


@pytest.fixture
def slurm(network: Making, tmp_path: Path) -> Iterator[Slurm]:
    """Start munge, a controller and two node daemons; they are gone after the test."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found (apt install slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs of any user, so it must be root")
    hosts = routed(network(2))
    for host in hosts:
        # As on a cluster: a node's name leads to its address on the network, on itself too.
        host.hosts_file.write_text("127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
    for name in ("munge", "state", "spool-node1", "spool-node2"):
        (tmp_path / name).mkdir(mode=0o755)
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=tmp_path))
    key = tmp_path / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(128))
    env = {"SLURM_CONF": str(configuration)}
    nodes = [Machine(host, f"node{number}", tmp_path, env) for number, host in enumerate(hosts, 1)]
    daemons: list[Typed] = []
    try:
        munge = [f"--{name}-file={tmp_path}/munge/{name}" for name in ("pid", "log", "seed")]
        # --force: the folder above the socket belongs to one user only.
        words = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={tmp_path}/munge/socket", *munge]
        daemons.append(Machine(None, "munged", tmp_path).type("exec " + " ".join(words)))
        _until((tmp_path / "munge/socket").exists, daemons)
        daemons.append(nodes[0].type("exec slurmctld -D"))
        daemons += [node.type(f"exec slurmd -D -N {node.name}") for node in nodes]
        _until(lambda: _idle(nodes[0]), daemons)
        yield Slurm(nodes, copy(tmp_path))
    finally:
        # Node daemons first, so that the controller records no failed nodes.
        for daemon in reversed(daemons):
            with typed(daemon):
                pass


def _idle(node: Machine) -> bool:
    with typed(node.type("sinfo --noheader --format='%D %t'")) as (asked,):
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked.process.wait(20)
        return asked.said.strip() == "2 idle"


def _until(ready: Callable[[], bool], daemons: list[Typed]) -> None:
    end = time.monotonic() + 60
    while not ready():
        ended = [daemon.said for daemon in daemons if daemon.process.poll() is not None]
        assert not ended, f"a daemon ended: {ended}"
        assert time.monotonic() < end, "\n".join(daemon.said for daemon in daemons)
        time.sleep(0.2)


SHOW = f"{sys.executable} -c 'import json, os; print(\"env \" + json.dumps(dict(os.environ)))'"


def _shown(said: str) -> list[dict[str, str]]:
    return [json.loads(line.removeprefix("env ")) for line in said.splitlines() if line.startswith("env ")]


def _checked(env: dict[str, str], expected: dict[str, str]) -> None:
    job = env["SLURM_JOB_ID"]
    expected = {**expected, "SLURM_JOB_ID": job, "SLURM_JOBID": job}
    assert {name: env.get(name) for name in expected} == expected
    # Nor is anything there that would be read and was not in the fixtures.
    steps = {name for name in env if name.startswith(("SLURM_STEP_", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "PMI_"))}
    assert steps - {"SLURM_STEP_LAUNCHER_PORT"} == {name for name in expected if name.startswith("SLURM_STEP_")}


def test_environment_of_tasks(slurm: Slurm) -> None:
    """The variables of a real srun, sbatch and salloc are those that the unit tests feed to the environments."""
    tasks = _shown(slurm.run(f"srun --nodes=2 --ntasks=4 {SHOW}"))
    tasks.sort(key=lambda env: int(env["SLURM_PROCID"]))
    assert len(tasks) == 4
    for env, task in zip(tasks, TASKS, strict=True):
        _checked(env, {**SRUN, **task})
    script = slurm.shared / "show.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks=4 --output=show.out\n{SHOW}\n")
    slurm.run("sbatch show.sh", SBATCH_WAIT="1")
    (batch,) = _shown((slurm.shared / "show.out").read_text())
    _checked(batch, BATCH)
    (shell,) = _shown(slurm.run(f"salloc --nodes=2 --ntasks=4 {SHOW}"))
    _checked(shell, SALLOC)
    assert not {*TASKS[0]} & {*shell}


@pytest.mark.parametrize("token", [False, True])
def test_srun(slurm: Slurm, token: bool) -> None:
    """The recipe's srun, with and without a token: four ranks on two nodes form a group by themselves and train."""
    (command,) = (each for each in blocks("slurm") if "srun" in each and ("ALLHANDS_TOKEN" in each) == token)
    said = slurm.run(command)
    assert "trained: 4 ranks on 2 hosts" in said
    assert ("without a token" in said) != token


def test_sbatch(slurm: Slurm) -> None:
    """The recipe's sbatch: an agent on each of two nodes, two ranks each, one training."""
    slurm.run(block("slurm", "sbatch"), SBATCH_WAIT="1")
    (output,) = slurm.shared.glob("slurm-*.out")
    said = output.read_text()
    assert "[0] trained: 4 ranks on 2 hosts" in said
    assert "without a token" not in said


def test_a_batch_script_without_srun(slurm: Slurm) -> None:
    """The script of sbatch is not rank 0 of four: it gets an error that names srun, at once."""
    script = slurm.shared / "wrong.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --ntasks=4 --output=wrong.out\npython train.py\n")
    slurm.run("sbatch wrong.sh || true", SBATCH_WAIT="1")
    assert "[not-launched]" in (slurm.shared / "wrong.out").read_text()


def test_an_arbitrary_distribution(slurm: Slurm) -> None:
    """Rank 0 on the second node: trains with a host file, and raises an error without one."""
    arbitrary = "srun --ntasks=3 --distribution=arbitrary"
    said = slurm.run(f"salloc --nodes=2 --ntasks=4 {arbitrary} --nodelist=node2,node1,node1 python train.py || true")
    assert "[incomplete-environment]" in said
    (slurm.shared / "hosts.txt").write_text("node2\nnode1\nnode1\n")
    said = slurm.run(f"{arbitrary} --nodes=2 python train.py", SLURM_HOSTFILE=str(slurm.shared / "hosts.txt"))
    assert "trained: 3 ranks on 2 hosts" in said
