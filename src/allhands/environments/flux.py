"""Flux."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "flux"
MARK = "FLUX_TASK_RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a task that Flux started."""
    if not text(env, MARK):
        return None
    found = Detection(NAME, f"{MARK} is set by Flux", env)
    found.take("rank", MARK).take("world_size", "FLUX_JOB_SIZE").take("local_rank", "FLUX_TASK_LOCAL_ID")
    if text(env, "FLUX_JOB_NNODES") == "1":
        found.say("local_world_size", found.world_size, "FLUX_JOB_NNODES=1")
    job = text(env, "FLUX_JOB_ID")
    # Flux writes it in a base of its own (ƒ2Xk9), so it is used as a name only.
    found.call(f"flux-{job}" if job else "", f"FLUX_JOB_ID={job}")
    # Only the `flux` command knows the hosts, and starting it here would be too slow.
    found.reasons["coordinator"] = "flux gives no address; set MASTER_ADDR=$(flux hostlist -n 0 local)"
    return found.meet()
