from __future__ import annotations

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.launch.job import Job
from allhands.launch.variables import variables


def found(job: Job, local_rank: int, environment: dict[str, str]) -> dict[str, str]:
    """Return what a worker finds."""
    return variables(
        job, local_rank, 2, coordinator="unix:allhands-7", token="t", master=Address("h", 1), environment=environment
    )


def test_threads() -> None:
    """Several ranks get one thread each, as with torchrun, unless the user says otherwise; one rank gets all."""
    two, one = Job("a.py", local_world_size=2), Job("a.py")
    assert found(two, 0, {})["OMP_NUM_THREADS"] == "1"
    assert found(two, 0, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in found(one, 0, {})


def test_what_an_outer_launcher_left() -> None:
    """Variables of another launcher are replaced or taken out; all else is passed on."""
    outer = {"RANK": "9", "TORCHELASTIC_USE_AGENT_STORE": "True", "ALLHANDS_RECORDER_FD": "3:1", "HOME": "/root"}
    made = found(Job("a.py", local_world_size=2), 1, outer)
    assert (made["RANK"], made["HOME"]) == ("1", "/root")
    assert not {"TORCHELASTIC_USE_AGENT_STORE", "ALLHANDS_RECORDER_FD"} & set(made)


def test_detection_reads_what_was_set() -> None:
    """A rank of the second node recognises itself, and that the launcher's word comes first."""
    job = Job("a.py", name="night", local_world_size=2, nodes=2, node_rank=1)
    world = identify(found(job, 1, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}))
    assert (world.rank, world.world_size, world.local_rank, world.node_rank) == (3, 4, 1, 1)
    assert (world.job, world.source, world.socket) == ("night-2", "allhands", "allhands-7")
