"""Training services of clouds: Vertex AI, SageMaker and Azure ML. Google's plain machines are in `gce`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import AllhandsError, fail
from . import launchers, mpi
from .base import (
    DEFAULT_PORT,
    Detection,
    check_one_process,
    integer,
    me,
    parse_address,
    processes_per_node,
    text,
)

__all__ = ["detect_azureml", "detect_sagemaker", "detect_vertex"]

# Vertex AI: the chief and its workers; the pools after them hold servers and evaluators, which are not ranks.
_POOLS = ("workerpool0", "workerpool1")


def detect_vertex(env: Mapping[str, str]) -> Detection | None:
    """Recognise a machine of a Vertex AI job with several replicas; its RANK and WORLD_SIZE count machines."""
    job, spec = text(env, "CLOUD_ML_JOB_ID"), text(env, "CLUSTER_SPEC")
    if not job or not spec:
        return None
    pools, pool, index = _read_cluster(spec)
    machines = sum(len(pools.get(name, ())) for name in _POOLS)
    node = index if pool == _POOLS[0] else index + len(pools[_POOLS[0]])
    local = integer(env, "LOCAL_RANK")
    # Another WORLD_SIZE was set by a launcher that numbers processes; the comparison of sources checks it.
    if integer(env, "WORLD_SIZE") in (None, machines):
        evidence = processes_per_node(env) or (f"LOCAL_RANK={local}" if local else "")
        check_one_process(env, f"RANK={node}", "on Vertex AI, RANK and WORLD_SIZE count machines", evidence)
    found = Detection("vertex", "CLOUD_ML_JOB_ID and CLUSTER_SPEC are set by Vertex AI", env, late_names=True)
    found.set(f"CLUSTER_SPEC: {pool}, index {index}", rank=node, node_rank=node)
    found.set(f"CLUSTER_SPEC: machines of {' and '.join(_POOLS)}", world_size=machines)
    found.set(f"CLOUD_ML_JOB_ID={job}", job=f"vertex-{job}")
    where = "cluster.workerpool0[0] of CLUSTER_SPEC"
    first = parse_address(pools[_POOLS[0]][0], where)
    return found.locate(lambda: (first.host, where), first.port, where)


def _read_cluster(spec: str) -> tuple[dict[str, list[str]], str, int]:
    try:
        read: Any = json.loads(spec)
        pools, task = read["cluster"], read["task"]
        pool, index = str(task["type"]), int(task["index"])
        inside = bool(pools[_POOLS[0]]) and index in range(len(pools[pool]))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _strange(spec, f"it has no cluster and task as Vertex AI writes them ({error!r})") from error
    if not inside:
        raise _strange(spec, "the task is not in its own cluster")
    if pool not in _POOLS:
        raise _strange(spec, f"this machine is in {pool}, and only {' and '.join(_POOLS)} hold ranks")
    return pools, pool, index


def _strange(spec: str, why: str) -> AllhandsError:
    return fail(
        "incomplete-environment",
        f"CLUSTER_SPEC={spec[:120]!r} does not give this machine's rank",
        who=me(),
        why=why,
        fix="pass rank= and world_size=, or unset CLUSTER_SPEC",
    )


def detect_sagemaker(env: Mapping[str, str]) -> Detection | None:
    """Recognise a host of a SageMaker training job; one process per host, unless a launcher starts more."""
    listed, here = text(env, "SM_HOSTS"), text(env, "SM_CURRENT_HOST")
    if not listed or not here:
        return None
    try:
        hosts: Any = json.loads(listed)
        node = list(hosts).index(here)
    except (ValueError, TypeError) as error:
        raise fail(
            "incomplete-environment",
            f"SM_CURRENT_HOST={here} is not found in SM_HOSTS={listed}",
            who=me(),
            why=f"SM_HOSTS must be a JSON list of host names with this host among them ({error})",
            fix="leave both variables as SageMaker sets them, or pass rank= and world_size=",
        ) from error
    if not text(env, "LOCAL_RANK"):
        check_one_process(env, f"SM_CURRENT_HOST={here}", "SageMaker numbers hosts")
    # The other hosts' names appear in DNS some time after this container has started.
    found = Detection("sagemaker", "SM_HOSTS and SM_CURRENT_HOST are set by SageMaker", env, late_names=True)
    found.set(f"SM_CURRENT_HOST={here} in SM_HOSTS", rank=node, node_rank=node)
    found.set(f"SM_HOSTS={listed}", world_size=len(hosts))
    job = text(env, "TRAINING_JOB_NAME")
    if job:
        found.set(f"TRAINING_JOB_NAME={job}", job=f"sagemaker-{job}")
    return found.locate(lambda: (str(hosts[0]), "the first of SM_HOSTS"), DEFAULT_PORT, "the default")


def detect_azureml(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process of a distributed Azure ML job; the batch service gives the first node."""
    rank = next((name for name in (mpi.OPENMPI, "RANK") if text(env, name)), "")
    if not text(env, "AZUREML_EXPERIMENT_ID") or not rank:
        return None
    found = Detection("azureml", f"AZUREML_EXPERIMENT_ID is set by Azure ML, {rank} by its launcher", env)
    if rank == mpi.OPENMPI:
        mpi.read_ranks(found, rank).read(node_rank="NODE_RANK")
    else:
        launchers.read_ranks(found, "NODE_RANK")
    run = text(env, "AZUREML_RUN_ID")
    if run:
        found.set(f"AZUREML_RUN_ID={run}", job=f"azureml-{run}")
    first = text(env, "AZ_BATCH_MASTER_NODE")
    if not first:
        return found.locate()
    why = f"AZ_BATCH_MASTER_NODE={first}"
    if ":" not in first:
        return found.locate(lambda: (first, "AZ_BATCH_MASTER_NODE"))
    address = parse_address(first, why)
    return found.locate(lambda: (address.host, "AZ_BATCH_MASTER_NODE"), address.port, why)
