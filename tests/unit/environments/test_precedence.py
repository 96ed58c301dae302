from __future__ import annotations

from collections.abc import Callable

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29501", "LOCAL_RANK": "1"}
STEP = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}


def test_arguments_without_environment() -> None:
    """Rank and size are enough; no address is invented."""
    world = identify({}, rank=2, world_size=3)
    assert (world.rank, world.world_size, world.coordinator, world.source) == (2, 3, None, "arguments")
    assert world.reasons["rank"] == "the argument rank=2"
    assert world.local_rank is None


def test_arguments_override_what_they_give() -> None:
    """Values that are not given are read from the environment."""
    world = identify(PLAIN, rank=3)
    assert (world.rank, world.world_size, world.coordinator) == (3, 4, Address("node-a", 29501))
    assert world.reasons["world_size"] == "WORLD_SIZE=4"


def test_same_arguments_keep_the_local_rank() -> None:
    """Arguments that repeat the environment leave its local rank in place."""
    assert identify(PLAIN, rank=1, world_size=4).local_rank == 1


def test_other_arguments_drop_the_local_rank() -> None:
    """A local rank that belongs to the environment's processes is not used."""
    world = identify(STEP, rank=9, world_size=16)
    assert world.local_rank is None
    assert "slurm" in world.reasons["local_rank"]


def test_arguments_are_not_compared() -> None:
    """RANK against SLURM_PROCID is no error if the caller gives the rank."""
    muddled = {**STEP, "RANK": "0"}
    world = identify(muddled, rank=3)
    assert (world.rank, world.world_size) == (3, 4)
    world = identify({**muddled, "WORLD_SIZE": "9"}, rank=5, world_size=6)
    assert (world.rank, world.world_size) == (5, 6)


def test_inconsistent_environment_is_not_used() -> None:
    """With rank and size given, an inconsistent environment is ignored, with a reason."""
    world = identify({"SLURM_NTASKS": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, rank=1, world_size=2)
    assert (world.rank, world.coordinator) == (1, Address("h", 1))
    assert "srun" in world.reasons["environment"]


@pytest.mark.parametrize(("given", "missing"), [({"rank": 1}, "world size"), ({"world_size": 2}, "rank")])
def test_half_given(refuse: Refuse, given: dict[str, int], missing: str) -> None:
    """One of rank and size alone is an error that names both the given and the missing one."""
    told = refuse("incomplete-environment", {}, **given).diagnosis
    assert f"the {missing} is missing" in told.what
    assert next(iter(given)) in told.what


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
def test_rank_out_of_range(refuse: Refuse, rank: int, size: int) -> None:
    """A rank is between 0 and world size - 1."""
    assert refuse("rank-out-of-range", {}, rank=rank, world_size=size).ranks == ((rank,) if rank >= 0 else ())


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("host:1234", Address("host", 1234)),
        ("tcp://host:1234", Address("host", 1234)),
        ("tcp://[fe80::1]:1234", Address("fe80::1", 1234)),
        (Address("host", 1), Address("host", 1)),
    ],
)
def test_coordinator(written: Address | str, address: Address) -> None:
    """A coordinator's address can be written in several ways and overrides MASTER_ADDR."""
    world = identify(PLAIN, coordinator=written)
    assert world.coordinator == address
    assert "argument" in world.reasons["coordinator"]


@pytest.mark.parametrize("written", ["host", "host:", ":1", "host:x", "fe80::1:1", "host:0", "host:65536", "[]:1", ""])
def test_strange_coordinator(refuse: Refuse, written: str) -> None:
    """An address that is not HOST:PORT is an error that shows it."""
    assert written in refuse("invalid-argument", PLAIN, coordinator=written).diagnosis.what


def test_given_coordinator_needs_no_host_list(refuse: Refuse) -> None:
    """With an address given, a scheduler's unreadable list of hosts is not needed."""
    env = {"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere/nodes", "PMI_RANK": "1", "PMI_SIZE": "2"}
    refuse("incomplete-environment", env)
    world = identify(env, coordinator="h:1")
    assert (world.rank, world.coordinator, world.source) == (1, Address("h", 1), "pbs")


def test_given_coordinator_is_not_in_the_agents_store() -> None:
    """Another address than torchrun's is not held by torchrun's agent."""
    env = {**PLAIN, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert identify(env).agent_store
    assert not identify(env, coordinator="h:1").agent_store
