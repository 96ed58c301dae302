from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

STEP = {
    "SLURM_STEP_NODELIST": "node[02-03],gpu-a",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "4",
}

# What `srun --nodes=2 --ntasks=4` of Slurm 22.05 gave its four tasks, less what nobody could read a rank from (user,
# folder, ports of srun's own). tests/soak/test_slurm.py asks a real srun for the same.
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOBID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "3,1",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
}
# What differs between them.
TASKS = [
    {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"},
    {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"},
    {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2"},
    {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "3"},
]
# What the script of `sbatch --nodes=2 --ntasks=4` sees itself, and the shell of such a salloc.
BATCH = {name: value for name, value in SRUN.items() if not name.startswith(("SLURM_STEP", "SLURM_LAUNCH"))} | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}
SALLOC = {name: value for name, value in BATCH.items() if name not in {*TASKS[0]}}


@pytest.mark.parametrize("rank", range(4))
def test_what_srun_gives(rank: int) -> None:
    """The four tasks of a real srun, three on one node and one on the other."""
    world = identify({**SRUN, **TASKS[rank]})
    assert (world.rank, world.world_size, world.source, world.job) == (rank, 4, "slurm", "slurm-1.0")
    place = (0, 1, 1) if rank == 3 else (rank, 3, 0)
    assert (world.local_rank, world.local_world_size, world.node_rank) == place
    assert world.coordinator is not None
    assert world.coordinator.host == "node1"


@pytest.mark.parametrize("env", [BATCH, SALLOC])
def test_what_a_batch_script_sees(refuse: Refuse, env: dict[str, str]) -> None:
    """The script of sbatch looks like rank 0, and is none: it is told to use srun."""
    assert "srun" in refuse("not-launched", env).diagnosis.fix


def test_values() -> None:
    """A task's numbers come from the step, not from the job."""
    world = identify(STEP)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (3, 5, 1, 2, 1)
    assert (world.job, world.source) == ("slurm-77.4", "slurm")
    assert world.reasons["world_size"] == "SLURM_STEP_NUM_TASKS=5"


def test_size_of_the_job_where_the_step_tells_none() -> None:
    """SLURM_NTASKS is the size where SLURM_STEP_NUM_TASKS is not set."""
    assert identify({**STEP, "SLURM_STEP_NUM_TASKS": ""}).world_size == 9


def test_host_is_the_steps_first() -> None:
    """Rank 0 is on the first host of the step: neither where srun was typed nor the first of the job."""
    other = {"SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9", "SLURM_JOB_NODELIST": "node[01-03],gpu-a"}
    world = identify({**STEP, **other})
    assert world.coordinator is not None
    assert world.coordinator.host == "node02"


def test_arbitrary_distribution_follows_the_host_file(tmp_path: Path) -> None:
    """With --distribution=arbitrary rank 0 is on the first host of SLURM_HOSTFILE; otherwise the file is not read."""
    listed = tmp_path / "hosts"
    listed.write_text("gpu-a\nnode02\nnode03\n")
    world = identify({**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(listed)})
    assert world.coordinator is not None
    assert world.coordinator.host == "gpu-a"
    world = identify({**STEP, "SLURM_DISTRIBUTION": "block", "SLURM_HOSTFILE": str(listed)})
    assert world.coordinator is not None
    assert world.coordinator.host == "node02"


def test_arbitrary_distribution_without_a_list() -> None:
    """After `srun -m arbitrary -w n2,n1` nothing tells where rank 0 is: no host is guessed, and the reason says so."""
    world = identify({**STEP, "SLURM_DISTRIBUTION": "arbitrary"})
    assert world.coordinator is None
    assert "MASTER_ADDR" in world.reasons["coordinator"]


def test_host_file_that_cannot_be_read(refuse: Refuse) -> None:
    """A host file that is not on this node is named."""
    env = {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "/nowhere/hosts"}
    assert "SLURM_HOSTFILE=/nowhere/hosts" in refuse("incomplete-environment", env).diagnosis.what


def test_derived_port_differs_between_steps() -> None:
    """The port is stable for a step, differs for concurrent steps, stays in its range, and its origin is said."""
    ports = set()
    for step in range(8):
        env = {**STEP, "SLURM_STEP_ID": str(step)}
        world = identify(env)
        assert world.coordinator is not None
        assert world.coordinator == identify({**env, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).coordinator
        assert 20000 <= world.coordinator.port < 30000
        assert "derived" in world.reasons["coordinator"]
        ports.add(world.coordinator.port)
    assert len(ports) == 8


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        ({"SLURM_STEP_RESV_PORTS": "12010-12013"}, Address("node02", 12010)),
        ({"SLURM_STEP_RESV_PORTS": "12015,12013"}, Address("node02", 12015)),
        ({"SLURM_STEP_RESV_PORTS": "12010-12013", "MASTER_PORT": "1234"}, Address("node02", 1234)),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1234"}, Address("h", 1234)),
    ],
)
def test_ports(extra: dict[str, str], address: Address) -> None:
    """What the user sets goes first, then a real reservation of Slurm's."""
    assert identify({**STEP, **extra}).coordinator == address


def test_one_host_needs_no_address() -> None:
    """All tasks on one node: no coordinator's address, unless the user gives one."""
    env = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node02"}
    world = identify(env)
    assert (world.coordinator, world.one_host) == (None, True)
    world = identify({**env, "SLURM_STEP_TASKS_PER_NODE": "", "SLURM_STEP_NUM_NODES": "1"})
    assert (world.coordinator, world.local_world_size) == (None, 5)
    assert identify({**env, "MASTER_ADDR": "h", "MASTER_PORT": "1"}).coordinator == Address("h", 1)


def test_local_world_size_is_slurms() -> None:
    """A LOCAL_WORLD_SIZE from elsewhere is not believed."""
    assert identify({**STEP, "LOCAL_WORLD_SIZE": "5"}).local_world_size == 2
    assert identify({**STEP, "LOCAL_WORLD_SIZE": "5", "SLURM_STEP_TASKS_PER_NODE": ""}).local_world_size is None


def test_strange_node_list(refuse: Refuse) -> None:
    """A node list that was cut off is shown."""
    assert "n[1-" in refuse("invalid-argument", {**STEP, "SLURM_STEP_NODELIST": "n[1-"}).diagnosis.what


def test_pmi2_of_slurm() -> None:
    """Slurm's pmi2 sets PMI_RANK as well: the process is still Slurm's."""
    assert identify({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5"}).source == "slurm"
