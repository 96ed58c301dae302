"""Azure ML: its MPI or PyTorch distribution numbers the processes, the batch service gives the first node."""

from __future__ import annotations

from collections.abc import Mapping

from . import openmpi
from .base import Detection, parse_address, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "azureml"
MARK = "AZUREML_EXPERIMENT_ID and OMPI_COMM_WORLD_RANK or RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process of a distributed Azure ML job."""
    mpi = bool(text(env, openmpi.MARK))
    if not text(env, "AZUREML_EXPERIMENT_ID") or not (mpi or text(env, "RANK")):
        return None
    given = openmpi.MARK if mpi else "RANK"
    found = Detection(NAME, f"AZUREML_EXPERIMENT_ID is set by Azure ML, {given} by its launcher", env)
    if mpi:
        openmpi.number(found)
    else:
        found.take("rank", "RANK").take("world_size", "WORLD_SIZE").take("local_rank", "LOCAL_RANK")
        found.take("local_world_size", "LOCAL_WORLD_SIZE")
    found.take("node_rank", "NODE_RANK")
    run = text(env, "AZUREML_RUN_ID")
    found.call(f"azureml-{run}" if run else "", f"AZUREML_RUN_ID={run}")
    first = text(env, "AZ_BATCH_MASTER_NODE")
    if not first:
        return found.meet()
    why = f"AZ_BATCH_MASTER_NODE={first}"
    if ":" not in first:
        return found.meet(lambda: (first, "AZ_BATCH_MASTER_NODE"))
    address = parse_address(first, why)
    return found.meet(lambda: (address.host, "AZ_BATCH_MASTER_NODE"), address.port, why)
