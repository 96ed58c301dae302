"""Kubeflow's PyTorchJob (training operator v1): the operator numbers pods, not processes."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, integer, node_not_process, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "pytorchjob"
MARK = "PET_NNODES and RANK"

# The operator's default port.
_PORT = 23456
_WHERE = "in a PyTorchJob, RANK is the pod's index and WORLD_SIZE is pods times processes per pod"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a PyTorchJob that runs one process; raise where more are meant."""
    if not text(env, "PET_NNODES") or not text(env, "RANK"):
        return None
    rank, size, local = integer(env, "RANK"), integer(env, "WORLD_SIZE"), integer(env, "LOCAL_RANK")
    # An elastic PyTorchJob gives a range of pods (1:4) and no fixed number of processes.
    pods = integer(env, "PET_NNODES") if text(env, "PET_NNODES").isdecimal() else None
    per_pod = size // pods if pods and size else 1
    if local is not None:
        pod = integer(env, "PET_NODE_RANK")
        if pod is not None and per_pod > 1 and rank != pod * per_pod + local:
            raise node_not_process(f"RANK={rank}", f"LOCAL_RANK={local} is set, but RANK was left as it was", _WHERE)
        return None  # a launcher in the pod has numbered the processes: RANK can be taken as it is
    if per_pod > 1 or several(env):
        raise node_not_process(f"RANK={rank}", several(env) or f"WORLD_SIZE={size} with PET_NNODES={pods}", _WHERE)
    found = Detection(NAME, "PET_NNODES and RANK are set by Kubeflow's training operator", env, late_names=True)
    found.take("rank", "RANK").take("world_size", "WORLD_SIZE").take("node_rank", "PET_NODE_RANK", "RANK")
    master = text(env, "MASTER_ADDR")
    if master.endswith("-master-0"):
        found.call(f"pytorchjob-{master.removesuffix('-master-0')}", f"MASTER_ADDR={master}")
    return found.meet(number=_PORT, why="the operator's default")
