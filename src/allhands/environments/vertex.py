"""Vertex AI custom training: RANK and WORLD_SIZE count machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import AllhandsError, fail
from .base import Detection, integer, me, node_not_process, parse_address, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "vertex"
MARK = "CLOUD_ML_JOB_ID and CLUSTER_SPEC (unset for one replica)"
# The chief and its workers; the pools after them hold servers and evaluators, which are not ranks.
_POOLS = ("workerpool0", "workerpool1")


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a machine of a Vertex AI job with several replicas."""
    job, spec = text(env, "CLOUD_ML_JOB_ID"), text(env, "CLUSTER_SPEC")
    if not job or not spec:
        return None
    pools, pool, index = _read(spec)
    machines = sum(len(pools.get(name, ())) for name in _POOLS)
    node = index if pool == _POOLS[0] else index + len(pools[_POOLS[0]])
    local = integer(env, "LOCAL_RANK")
    evidence = several(env) or (f"LOCAL_RANK={local}" if local else "")
    # Another WORLD_SIZE was set by a launcher that numbers processes; the comparison of sources checks it.
    if evidence and integer(env, "WORLD_SIZE") in (None, machines):
        raise node_not_process(f"RANK={node}", evidence, "on Vertex AI, RANK and WORLD_SIZE count machines")
    found = Detection(NAME, "CLOUD_ML_JOB_ID and CLUSTER_SPEC are set by Vertex AI", env, late_names=True)
    place = f"CLUSTER_SPEC: {pool}, index {index}"
    found.say("rank", node, place).say("node_rank", node, place)
    found.say("world_size", machines, f"CLUSTER_SPEC: machines of {' and '.join(_POOLS)}")
    found.call(f"vertex-{job}", f"CLOUD_ML_JOB_ID={job}")
    where = "cluster.workerpool0[0] of CLUSTER_SPEC"
    first = parse_address(pools[_POOLS[0]][0], where)
    return found.meet(lambda: (first.host, where), first.port, where)


def _read(spec: str) -> tuple[dict[str, list[str]], str, int]:
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
