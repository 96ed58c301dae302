from __future__ import annotations

from collections.abc import Callable

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

ENV = {
    "ALLHANDS_RANK": "5",
    "ALLHANDS_WORLD_SIZE": "8",
    "ALLHANDS_LOCAL_RANK": "1",
    "ALLHANDS_LOCAL_WORLD_SIZE": "4",
    "ALLHANDS_NODE_RANK": "1",
    "ALLHANDS_JOB": "brave-otter",
    "ALLHANDS_ATTEMPT": "2",
}


def test_values() -> None:
    """Every variable of the launcher becomes a value; job and attempt make the name."""
    world = identify({**ENV, "ALLHANDS_COORDINATOR": "tcp://[::1]:4000"})
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank) == (5, 8, 1, 4, 1)
    assert world.coordinator == Address("::1", 4000)
    assert (world.job, world.source, world.socket) == ("brave-otter-2", "allhands", "")


def test_socket() -> None:
    """unix:NAME is the launcher's socket on this host, and no address is needed then."""
    world = identify({**ENV, "ALLHANDS_COORDINATOR": "unix:allhands-7"})
    assert (world.socket, world.coordinator) == ("allhands-7", None)


@pytest.mark.parametrize(
    "inside",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_NTASKS": "16"},
    ],
)
def test_inside_anything(inside: dict[str, str]) -> None:
    """The launcher's values are used inside any scheduler, and nothing is compared with them."""
    assert identify({**ENV, **inside}).rank == 5


@pytest.mark.parametrize("left", ["ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE"])
def test_half(refuse: Refuse, left: str) -> None:
    """One of the pair alone is named, with what is missing."""
    told = refuse("incomplete-environment", {left: "3"}).diagnosis
    missing = ({"ALLHANDS_RANK", "ALLHANDS_WORLD_SIZE"} - {left}).pop()
    assert told.what == f"{missing} is missing: only {left}=3 is there"


@pytest.mark.parametrize("where", ["host:1", "unix:", "udp://h:1", "tcp://h", "tcp://h:0"])
def test_strange_coordinator(refuse: Refuse, where: str) -> None:
    """An address that is neither tcp://HOST:PORT nor unix:NAME is shown."""
    assert where in refuse("invalid-argument", {**ENV, "ALLHANDS_COORDINATOR": where}).diagnosis.what
