from __future__ import annotations

from collections.abc import Callable

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29501"}


def without(*names: str) -> dict[str, str]:
    """Return ENV without some variables."""
    return {name: value for name, value in ENV.items() if name not in names}


def test_values() -> None:
    """LOCAL_RANK may be absent, and is then not guessed."""
    world = identify(ENV)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (1, 4, None, None)
    assert world.coordinator == Address("node-a", 29501)
    assert dict(world.reasons)["rank"] == "RANK=1"


def test_no_address_is_not_half_an_address() -> None:
    """Without MASTER_ADDR and MASTER_PORT the ranks may meet in another way; the reason names what to set."""
    world = identify(without("MASTER_ADDR", "MASTER_PORT"))
    assert world.coordinator is None
    assert "MASTER_ADDR" in world.reasons["coordinator"]


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("RANK", "WORLD_SIZE=4"),
        ("WORLD_SIZE", "RANK=1"),
        ("MASTER_ADDR", "MASTER_PORT=29501"),
        ("MASTER_PORT", "MASTER_ADDR=node-a"),
    ],
)
def test_half(refuse: Refuse, gone: str, left: str) -> None:
    """Each half of a pair alone is an error that names what is there and what is missing."""
    assert refuse("incomplete-environment", without(gone)).diagnosis.what == f"{gone} is missing: only {left} is there"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["x", "1.0", "1_0", "$RANK", "0x1", "+1", "--1", "²"])
def test_not_a_number(refuse: Refuse, name: str, value: str) -> None:
    """A value that is no whole number is shown with its variable."""
    assert f"{name}={value!r}" in refuse("invalid-argument", {**ENV, name: value}).diagnosis.what


@pytest.mark.parametrize("value", ["0", "65536", "-1"])
def test_not_a_port(refuse: Refuse, value: str) -> None:
    """A port outside 1 to 65535 is shown."""
    assert f"MASTER_PORT={value}" in refuse("invalid-argument", {**ENV, "MASTER_PORT": value}).diagnosis.what


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("0", "0")])
def test_rank_out_of_range(refuse: Refuse, rank: str, size: str) -> None:
    """A rank outside the world is refused, with both variables."""
    told = refuse("rank-out-of-range", {**ENV, "RANK": rank, "WORLD_SIZE": size}).diagnosis
    assert f"RANK={rank}, WORLD_SIZE={size}" in told.why


def test_local_rank_out_of_range(refuse: Refuse) -> None:
    """A local rank outside the node is refused too."""
    refuse("rank-out-of-range", {**ENV, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"})


def test_more_here_than_in_all(refuse: Refuse) -> None:
    """A node cannot have more ranks than the world."""
    told = refuse("launcher-mismatch", {**ENV, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"}).diagnosis
    assert "LOCAL_WORLD_SIZE=8" in told.why


@pytest.mark.parametrize("meant", ["LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "PET_NPROC_PER_NODE"])
def test_rank_that_counts_nodes(refuse: Refuse, meant: str) -> None:
    """Without LOCAL_RANK or torchrun, RANK is no process's rank if several processes per node are intended."""
    told = refuse("node-not-process", {**ENV, meant: "8"}).diagnosis
    assert "RANK=1" in told.what
    assert f"{meant}=8" in told.why


def test_rank_with_one_process_per_node() -> None:
    """With one process per node, or with LOCAL_RANK, RANK is the rank of the process."""
    assert identify({**ENV, "NPROC_PER_NODE": "1"}).rank == 1
    assert identify({**ENV, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).local_world_size == 2
