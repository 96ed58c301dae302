from __future__ import annotations

from allhands.environments.identify import identify

ENV = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_ID": "ƒ2Xk9TTF",
    "FLUX_JOB_NNODES": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}


def test_values() -> None:
    """Flux also sets PMI_RANK, and is recognised before PMI."""
    world = identify(ENV)
    assert (world.rank, world.world_size, world.local_rank, world.source) == (3, 4, 1, "flux")
    assert world.local_world_size is None


def test_job_id_is_not_a_number() -> None:
    """The job's id is text; a port is derived from it all the same."""
    world = identify({**ENV, "MASTER_ADDR": "h"})
    assert world.job == "flux-ƒ2Xk9TTF"
    assert world.coordinator is not None
    assert 20000 <= world.coordinator.port < 30000


def test_a_missing_address_is_explained() -> None:
    """Only a command of Flux prints its hosts: the reason names it."""
    world = identify(ENV)
    assert world.coordinator is None
    assert "flux hostlist" in world.reasons["coordinator"]


def test_one_node() -> None:
    """A job on one node is on one host."""
    assert identify({**ENV, "FLUX_JOB_NNODES": "1"}).one_host
