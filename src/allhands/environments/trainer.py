"""Kubeflow Trainer v2: made for a launcher in each pod; without one, only one process per pod can be numbered."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import fail
from .base import DEFAULT_PORT, Detection, integer, me, node_not_process, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "trainer"
MARK = "PET_MASTER_ADDR without RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a TrainJob whose script was started without torchrun."""
    host = text(env, "PET_MASTER_ADDR")
    if not host or text(env, "RANK"):
        return None
    wanted = text(env, "PET_NPROC_PER_NODE") or "1"
    if not wanted.isdecimal():
        raise fail(
            "not-launched",
            f"PET_NPROC_PER_NODE={wanted} leaves the number of processes to a launcher that was not used",
            who=me(),
            why="Kubeflow Trainer gives a pod only its own index; a launcher in the pod numbers the processes",
            fix="start the script with torchrun, or set numProcPerNode: 1 in the TrainJob",
        )
    if several(env):
        counted = f"PET_NODE_RANK={text(env, 'PET_NODE_RANK')}"
        raise node_not_process(counted, several(env), "Kubeflow Trainer numbers pods")
    found = Detection(NAME, "PET_MASTER_ADDR is set by Kubeflow Trainer, and there is one process per pod", env)
    found.take("rank", "PET_NODE_RANK").take("world_size", "PET_NNODES").take("node_rank", "PET_NODE_RANK")
    found.late_names = True
    found.call(f"trainer-{host}", f"PET_MASTER_ADDR={host}")
    number = integer(env, "PET_MASTER_PORT") or DEFAULT_PORT
    return found.meet(lambda: (host, "PET_MASTER_ADDR"), number, f"PET_MASTER_PORT={number}")
