"""The kinds of Kubernetes: PyTorchJob, Trainer, JobSet, Indexed Job, StatefulSet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]

PYTORCHJOB = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "bert-master-0",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "bert-master-0",
    "MASTER_PORT": "23456",
}
TRAINER = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "bert-node-0-0.bert",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "3",
}
INDEXED = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "bert-3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
JOBSET = {**INDEXED, "JOBSET_NAME": "js", "REPLICATED_JOB_NAME": "workers"}
STATEFULSET = {"HOSTNAME": "bert-3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_pytorchjob() -> None:
    """With one process per pod, the pod's index is the rank."""
    world = identify(PYTORCHJOB)
    assert (world.rank, world.world_size, world.node_rank, world.source) == (3, 4, 3, "pytorchjob")
    assert world.coordinator == Address("bert-master-0", 23456)
    assert (world.job, world.late_names) == ("pytorchjob-bert", True)
    assert identify({**PYTORCHJOB, "MASTER_PORT": ""}).coordinator == Address("bert-master-0", 23456)


@pytest.mark.parametrize("more", [{"WORLD_SIZE": "8"}, {"PET_NPROC_PER_NODE": "2"}])
def test_pytorchjob_with_several_processes_per_pod(refuse: Refuse, more: dict[str, str]) -> None:
    """RANK is the pod's index while WORLD_SIZE counts processes: the group would never form, so it is an error."""
    told = refuse("node-not-process", {**PYTORCHJOB, **more}).diagnosis
    assert "RANK=3" in told.what
    assert "torchrun" in told.fix


def test_pytorchjob_with_a_launcher_in_the_pod(refuse: Refuse) -> None:
    """A launcher that numbers the pod's processes makes RANK right; LOCAL_RANK beside an old RANK does not."""
    inside = {**PYTORCHJOB, "PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    world = identify({**inside, "RANK": "7"})
    assert (world.rank, world.world_size, world.source) == (7, 8, "plain")
    refuse("node-not-process", inside)


def test_trainer() -> None:
    """With one process per pod, Trainer's variables are enough without a launcher."""
    world = identify(TRAINER)
    assert (world.rank, world.world_size, world.node_rank, world.source) == (3, 4, 3, "trainer")
    assert world.coordinator == Address("bert-node-0-0.bert", 29500)
    assert world.late_names


def test_trainer_with_several_processes_per_pod(refuse: Refuse) -> None:
    """Trainer numbers pods, not processes."""
    assert "PET_NODE_RANK=3" in refuse("node-not-process", {**TRAINER, "PET_NPROC_PER_NODE": "8"}).diagnosis.what


@pytest.mark.parametrize("number", ["auto", "gpu"])
def test_trainer_that_leaves_the_number_to_a_launcher(refuse: Refuse, number: str) -> None:
    """PET_NPROC_PER_NODE may be `auto`: then only a launcher in the pod knows the world size."""
    told = refuse("not-launched", {**TRAINER, "PET_NPROC_PER_NODE": number}).diagnosis
    assert f"PET_NPROC_PER_NODE={number}" in told.what
    assert "torchrun" in told.fix


def test_indexed_job_without_its_size(refuse: Refuse) -> None:
    """Kubernetes does not set the number of pods: WORLD_SIZE or an argument must give it."""
    told = refuse("incomplete-environment", INDEXED).diagnosis
    assert told.what == "WORLD_SIZE is missing: only JOB_COMPLETION_INDEX=3 is there"
    assert "spec.completions" in told.fix
    world = identify({**INDEXED, "WORLD_SIZE": "4"})
    assert (world.rank, world.world_size, world.job, world.late_names) == (3, 4, "indexed-bert", True)
    assert "bert-0." in world.reasons["coordinator"]
    assert identify(INDEXED, world_size=4).rank == 3


def test_indexed_job_with_an_address() -> None:
    """The manifest sets MASTER_ADDR to the headless service's name; the port has a default."""
    env = {**INDEXED, "WORLD_SIZE": "4", "MASTER_ADDR": "bert-0.svc"}
    assert identify(env).coordinator == Address("bert-0.svc", 29500)


def test_index_does_not_contradict_rank() -> None:
    """RANK of the manifest is used: in a JobSet the index restarts in every Job."""
    world = identify({**INDEXED, "RANK": "7", "WORLD_SIZE": "8"})
    assert (world.rank, world.source) == (7, "plain")


@pytest.mark.parametrize(
    "env", [{**INDEXED, "WORLD_SIZE": "4"}, {**JOBSET, "WORLD_SIZE": "4"}, {**STATEFULSET, "WORLD_SIZE": "4"}]
)
def test_pods_are_not_processes(refuse: Refuse, env: dict[str, str]) -> None:
    """A pod's index is no rank if the manifest asks for several processes per pod."""
    refuse("node-not-process", {**env, "NPROC_PER_NODE": "8"})


def test_jobset() -> None:
    """Rank counts through the Jobs, and the first pod's name follows from those of the JobSet."""
    env = {**JOBSET, "JOB_INDEX": "1", "PROCESSES_IN_JOB": "4", "WORLD_SIZE": "8"}
    world = identify(env)
    assert (world.rank, world.world_size, world.source, world.late_names) == (7, 8, "jobset", True)
    assert world.coordinator == Address("js-workers-0-0.js", 29500)
    assert identify({**JOBSET, "WORLD_SIZE": "4"}).rank == 3


def test_jobset_that_passes_too_little_on(refuse: Refuse) -> None:
    """The controller sets no variables: the error names those that the manifest must add."""
    assert "PROCESSES_IN_JOB" in refuse("incomplete-environment", {**JOBSET, "JOB_INDEX": "1"}).diagnosis.fix


def test_statefulset() -> None:
    """The number in the host name is the rank if WORLD_SIZE gives the number of replicas."""
    world = identify({**STATEFULSET, "WORLD_SIZE": "4", "MASTER_ADDR": "bert-0.svc"})
    assert (world.rank, world.world_size, world.source, world.late_names) == (3, 4, "statefulset", True)
    assert world.coordinator == Address("bert-0.svc", 29500)


def test_statefulset_with_unknown_replicas() -> None:
    """A pod's name alone makes no job: notebooks have such names too."""
    assert identify(STATEFULSET).source == "alone"


def test_host_name_outside_kubernetes(refuse: Refuse) -> None:
    """A machine whose name ends in a number is not a StatefulSet's pod."""
    refuse("incomplete-environment", {"HOSTNAME": "node-3", "WORLD_SIZE": "4"})
