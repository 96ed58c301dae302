"""Vertex AI, SageMaker and Ray Train."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]


def vertex(pool: str, index: int, **extra: str) -> dict[str, str]:
    """Return the environment of a machine of a job with one chief and two workers."""
    cluster = {"workerpool0": ["chief-0:2222"], "workerpool1": ["w-0:2222", "w-1:2222"], "workerpool2": ["s-0:2222"]}
    spec = {"cluster": cluster, "task": {"type": pool, "index": index, "trial": ""}, "environment": "cloud"}
    return {"CLOUD_ML_JOB_ID": "123", "CLUSTER_SPEC": json.dumps(spec), **extra}


@pytest.mark.parametrize(
    ("pool", "index", "rank"), [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)]
)
def test_vertex(pool: str, index: int, rank: int) -> None:
    """The chief is node 0, a worker its index + 1; the address is the chief's."""
    told = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "chief-0", "MASTER_PORT": "2222"}
    for extra in ({}, told):
        world = identify(vertex(pool, index, **extra))
        assert (world.rank, world.world_size, world.node_rank, world.source) == (rank, 3, rank, "vertex")
        assert world.coordinator == Address("chief-0", 2222)
        assert (world.job, world.late_names) == ("vertex-123", True)


@pytest.mark.parametrize(
    "meant", [{"NPROC_PER_NODE": "8"}, {"LOCAL_RANK": "2"}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}]
)
def test_vertex_counts_machines(refuse: Refuse, meant: dict[str, str]) -> None:
    """RANK and WORLD_SIZE count machines, so they are no ranks if each machine runs several processes."""
    told = refuse("node-not-process", vertex("workerpool1", 0, RANK="1", WORLD_SIZE="3", **meant)).diagnosis
    assert "machines" in told.why


def test_vertex_with_a_launcher_inside() -> None:
    """The numbers of a launcher on each machine are used."""
    world = identify(vertex("workerpool1", 0, RANK="6", WORLD_SIZE="12", LOCAL_RANK="2", LOCAL_WORLD_SIZE="4"))
    assert (world.rank, world.world_size, world.local_rank, world.source) == (6, 12, 2, "plain")


def test_vertex_with_one_replica() -> None:
    """CLUSTER_SPEC is not set for one replica: it is a world of one."""
    assert identify({"CLOUD_ML_JOB_ID": "123"}).source == "alone"


@pytest.mark.parametrize(
    "spec", ["", "{", "[]", "{}", '{"cluster": {"workerpool0": []}, "task": {"type": "workerpool0", "index": 0}}']
)
def test_vertex_with_a_strange_spec(refuse: Refuse, spec: str) -> None:
    """A CLUSTER_SPEC without the rank is shown in the error; an empty one counts as unset."""
    env = {"CLOUD_ML_JOB_ID": "123", "CLUSTER_SPEC": spec}
    if spec:
        assert "CLUSTER_SPEC" in refuse("incomplete-environment", env).diagnosis.what
    else:
        assert identify(env).source == "alone"


def test_vertex_server_is_no_rank(refuse: Refuse) -> None:
    """A machine of the later pools has no rank, which is an error."""
    assert "workerpool2" in refuse("incomplete-environment", vertex("workerpool2", 0)).diagnosis.why


SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "t"}


def test_sagemaker() -> None:
    """The host's place in the list is its rank, and the names of peers may resolve late."""
    world = identify(SAGEMAKER)
    assert (world.rank, world.world_size, world.node_rank, world.source) == (1, 2, 1, "sagemaker")
    assert world.coordinator == Address("algo-1", 29500)
    assert (world.late_names, world.job) == (True, "sagemaker-t")


def test_sagemaker_on_one_host() -> None:
    """One host is a world of one, without an address."""
    world = identify({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"})
    assert (world.rank, world.world_size, world.coordinator) == (0, 1, None)


@pytest.mark.parametrize("hosts", ['["algo-1"]', "algo-1,algo-2", "3", "{"])
def test_sagemaker_with_a_strange_list(refuse: Refuse, hosts: str) -> None:
    """A list without this host, or that is no list, is shown."""
    told = refuse("incomplete-environment", {**SAGEMAKER, "SM_HOSTS": hosts}).diagnosis
    assert f"SM_HOSTS={hosts}" in told.what


def test_sagemaker_numbers_hosts(refuse: Refuse) -> None:
    """If several processes per host are intended, the host's place is no rank."""
    refuse("node-not-process", {**SAGEMAKER, "LOCAL_WORLD_SIZE": "8"})


RAY = {"RAY_JOB_ID": "02000000", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1"}


def test_ray() -> None:
    """Ray Train sets torch's variables, and NODE_RANK."""
    world = identify({**RAY, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "4"})
    assert (world.rank, world.world_size, world.local_rank, world.node_rank, world.source) == (3, 4, 1, 1, "ray")
    assert world.coordinator == Address("h", 4)
    assert world.job == "ray-02000000-h:4"


def test_ray_task_is_alone() -> None:
    """A Ray task that is no worker of Ray Train has no rank: Ray alone does not make a world."""
    assert identify({"RAY_JOB_ID": "02000000"}).source == "alone"
