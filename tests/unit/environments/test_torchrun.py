from __future__ import annotations

from collections.abc import Callable

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

ENV = {
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}


def test_values() -> None:
    """A worker's variables are read, the group's rank being the node's."""
    world = identify(ENV)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (5, 8, 1, 4, 1)
    assert world.coordinator == Address("node-a", 29500)
    assert (world.job, world.source) == ("torchrun-run7-2", "torchrun")


@pytest.mark.parametrize(("value", "held"), [("True", True), ("False", False), ("", False)])
def test_agent_store(value: str, *, held: bool) -> None:
    """With the agent's store in use, rank 0 must not bind MASTER_PORT: the agent listens there."""
    assert identify({**ENV, "TORCHELASTIC_USE_AGENT_STORE": value}).agent_store is held


def test_inside_slurm() -> None:
    """The Slurm task is torchrun's agent, so SLURM_PROCID is not the rank and does not contradict it."""
    step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    assert identify({**ENV, **step}).rank == 5


def test_inside_pytorchjob() -> None:
    """A per-pod torchrun numbers the processes: the operator's variables are ignored then."""
    assert identify({**ENV, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}).source == "torchrun"


def test_default_run_id_is_no_name() -> None:
    """Two jobs that both have torchrun's default id differ in their addresses."""
    one = identify({**ENV, "TORCHELASTIC_RUN_ID": "none"})
    two = identify({**ENV, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29501"})
    assert one.job != two.job


def test_restart_changes_the_name() -> None:
    """Workers of an earlier start are not of this job."""
    assert identify(ENV).job != identify({**ENV, "TORCHELASTIC_RESTART_COUNT": "3"}).job


def test_half(refuse: Refuse) -> None:
    """A run id without WORLD_SIZE names what is missing."""
    told = refuse("incomplete-environment", {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}).diagnosis
    assert told.what == "WORLD_SIZE is missing: only RANK=0 is there"
