"""Ray Train: Ray sets torch's variables in each worker before the training function runs."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "ray"
MARK = "RAY_JOB_ID or RAY_RAYLET_PID (any Ray worker), with RANK and NODE_RANK (Ray Train)"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a worker of Ray Train. A Ray task or actor that is not one has no RANK."""
    mark = next((name for name in ("RAY_JOB_ID", "RAY_RAYLET_PID") if text(env, name)), "")
    if not mark or not text(env, "RANK") or not text(env, "NODE_RANK"):
        return None
    found = Detection(NAME, f"{mark} is set by Ray, RANK and NODE_RANK by Ray Train", env)
    found.take("rank", "RANK").take("world_size", "WORLD_SIZE")
    found.take("local_rank", "LOCAL_RANK").take("local_world_size", "LOCAL_WORLD_SIZE").take("node_rank", "NODE_RANK")
    # One Ray job may run several trainings, so the job's id alone is no name; rank 0's address is.
    address = f"{text(env, 'MASTER_ADDR')}:{text(env, 'MASTER_PORT')}"
    if address != ":":
        found.call(f"ray-{text(env, 'RAY_JOB_ID')}-{address}", "RAY_JOB_ID, MASTER_ADDR and MASTER_PORT")
    return found.meet()
