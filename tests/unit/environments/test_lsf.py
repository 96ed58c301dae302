from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from allhands.environments.identify import identify
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

ENV = {
    "LSB_JOBID": "55",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
}


def test_first_line_is_the_launch_node(tmp_path: Path) -> None:
    """Rank 0 is on the second line of LSB_DJOB_RANKFILE: the first is the launch node."""
    ranks = tmp_path / "ranks"
    ranks.write_text("batch1\nc1\nc1\nc2\n")
    world = identify({**ENV, "LSB_DJOB_RANKFILE": str(ranks)})
    assert (world.rank, world.world_size, world.local_rank, world.source) == (3, 4, 1, "lsf")
    assert world.coordinator is not None
    assert world.coordinator.host == "c1"
    assert world.job == "lsf-55"


def test_no_rank_file() -> None:
    """Without the file no address is guessed."""
    assert identify(ENV).coordinator is None


def test_unreadable_rank_file(refuse: Refuse) -> None:
    """A rank file that cannot be read is named."""
    env = {**ENV, "LSB_DJOB_RANKFILE": "/nowhere/ranks"}
    assert "LSB_DJOB_RANKFILE" in refuse("incomplete-environment", env).diagnosis.what


def test_half(refuse: Refuse) -> None:
    """A rank without a size names the missing variable."""
    told = refuse("incomplete-environment", {"LSB_JOBID": "55", "JSM_NAMESPACE_RANK": "3"}).diagnosis
    assert told.what.startswith("JSM_NAMESPACE_SIZE is missing")
