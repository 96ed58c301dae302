"""The three families of MPI, and the schedulers and clouds that let MPI number the processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
}


@pytest.mark.parametrize(("env", "source"), [(OPENMPI, "openmpi"), (HYDRA, "hydra"), (MVAPICH, "mvapich")])
def test_values(env: dict[str, str], source: str) -> None:
    """Rank and sizes are read; no address is given by MPI, and none is guessed."""
    world = identify(env)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)
    assert (world.source, world.coordinator) == (source, None)
    assert "MASTER_ADDR" in world.reasons["coordinator"]


@pytest.mark.parametrize("env", [OPENMPI, HYDRA, MVAPICH])
def test_node_rank_is_not_read(env: dict[str, str]) -> None:
    """OMPI_COMM_WORLD_NODE_RANK is the process's number on its node, not the node's: it is not read."""
    assert identify(env).node_rank is None


@pytest.mark.parametrize(
    ("env", "gone"), [(OPENMPI, "OMPI_COMM_WORLD_SIZE"), (HYDRA, "PMI_SIZE"), (MVAPICH, "MV2_COMM_WORLD_SIZE")]
)
def test_half(refuse: Refuse, env: dict[str, str], gone: str) -> None:
    """A rank without a size names the missing variable."""
    half = {name: value for name, value in env.items() if name != gone}
    assert refuse("incomplete-environment", half).diagnosis.what.startswith(f"{gone} is missing")


def test_users_address() -> None:
    """MASTER_ADDR and MASTER_PORT are used where the user sets them."""
    assert identify({**HYDRA, "MASTER_ADDR": "h", "MASTER_PORT": "9"}).coordinator == Address("h", 9)


def test_half_an_address(refuse: Refuse) -> None:
    """Where no port can be derived, because the job has no name, MASTER_ADDR alone is incomplete."""
    assert "MASTER_PORT is missing" in refuse("incomplete-environment", {**HYDRA, "MASTER_ADDR": "h"}).diagnosis.what
    world = identify({**OPENMPI, "MASTER_ADDR": "h"})
    assert world.coordinator is not None
    assert "derived" in world.reasons["coordinator"]


def test_half_an_address_of_the_allocation() -> None:
    """A host of the scheduler without a port is no error of the user: the reason explains it."""
    world = identify({**OPENMPI, "PMIX_NAMESPACE": "", "SLURM_JOB_NODELIST": "n[3-4]"})
    assert world.coordinator is None
    assert "set MASTER_PORT" in world.reasons["coordinator"]


def test_one_host() -> None:
    """Mpirun on one host needs no address."""
    world = identify({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (world.one_host, world.coordinator) == (True, None)


def test_job_names() -> None:
    """Open MPI's own name for this mpirun, of version 5 and of version 4."""
    assert identify(OPENMPI).job == "openmpi-prterun-host-77@1"
    four = {**OPENMPI, "PMIX_NAMESPACE": "", "OMPI_MCA_ess_base_jobid": "4711"}
    assert identify(four).job == "openmpi-4711"


def test_mpirun_in_a_slurm_allocation() -> None:
    """Mpirun puts rank 0 on the first node of the allocation."""
    world = identify({**OPENMPI, "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_NTASKS": "4"})
    assert world.coordinator is not None
    assert world.coordinator.host == "n3"


@pytest.mark.parametrize("mpi", [OPENMPI, HYDRA, MVAPICH, {**HYDRA, "PALS_RANKID": "3", "PALS_APID": "a-b"}])
def test_pbs(tmp_path: Path, mpi: dict[str, str]) -> None:
    """MPI gives the ranks; the host of rank 0 is the first line of PBS's node file."""
    nodes = tmp_path / "nodes"
    nodes.write_text("first.cluster\nsecond.cluster\n")
    pals = {"PALS_LOCAL_RANKID": "0", "PALS_NODEID": "1"}
    world = identify({**mpi, **pals, "PBS_JOBID": "9.pbs", "PBS_NODEFILE": str(nodes)})
    assert (world.rank, world.world_size, world.local_rank, world.node_rank, world.source) == (3, 4, 0, 1, "pbs")
    assert world.coordinator is not None
    assert world.coordinator.host == "first.cluster"
    assert world.job.startswith("pbs-9.pbs")
    assert world.job.endswith(mpi.get("PALS_APID", mpi.get("PMIX_NAMESPACE", "")))


def test_pbs_node_file_that_is_elsewhere(refuse: Refuse) -> None:
    """A node file that only the first node has is named, with the line that corrects it."""
    told = refuse("incomplete-environment", {**HYDRA, "PBS_JOBID": "9", "PBS_NODEFILE": "/nowhere/nodes"}).diagnosis
    assert "head -n 1 $PBS_NODEFILE" in told.fix


def test_pals_without_a_size(refuse: Refuse) -> None:
    """PALS gives no size."""
    env = {"PBS_JOBID": "9", "PBS_NODEFILE": "/nowhere", "PALS_RANKID": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert "PMI_SIZE is missing" in refuse("incomplete-environment", env).diagnosis.what


@pytest.mark.parametrize(
    ("node", "address"), [("10.0.0.4:6000", Address("10.0.0.4", 6000)), ("10.0.0.4", Address("10.0.0.4", 20000))]
)
def test_azureml_with_mpi(node: str, address: Address) -> None:
    """Azure ML's batch service gives the first node."""
    env = {**OPENMPI, "AZUREML_EXPERIMENT_ID": "e", "AZUREML_RUN_ID": "r", "AZ_BATCH_MASTER_NODE": node}
    world = identify(env)
    assert (world.rank, world.local_rank, world.source, world.job) == (3, 1, "azureml", "azureml-r")
    assert world.coordinator is not None
    assert world.coordinator.host == address.host
    assert world.coordinator.port == address.port or "derived" in world.reasons["coordinator"]


def test_azureml_with_torchs_variables() -> None:
    """Azure ML's PyTorch distribution sets RANK and the rest."""
    env = {"AZUREML_EXPERIMENT_ID": "e", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}
    world = identify({**env, "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert (world.rank, world.local_rank, world.node_rank, world.source) == (1, 1, 0, "azureml")
    assert world.coordinator == Address("h", 1)
