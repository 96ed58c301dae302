"""torchrun and every other launcher built on torch elastic."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "torchrun"
MARK = "TORCHELASTIC_RUN_ID"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a worker of torchrun, also where torchrun itself runs inside Slurm or MPI."""
    run = text(env, MARK)
    if not run:
        return None
    found = Detection(NAME, f"{MARK}={run} is set by torchrun's agent", env, innermost=True)
    found.remedy = "torchrun sets both: start the script with torchrun, or unset TORCHELASTIC_RUN_ID"
    found.take("rank", "RANK").take("world_size", "WORLD_SIZE")
    found.take("local_rank", "LOCAL_RANK").take("local_world_size", "LOCAL_WORLD_SIZE")
    found.take("node_rank", "GROUP_RANK")
    if run == "none":
        # torchrun's default id: every such job has it, so the address must distinguish them.
        run = f"none-{text(env, 'MASTER_ADDR')}:{text(env, 'MASTER_PORT')}"
    attempt = text(env, "TORCHELASTIC_RESTART_COUNT") or "0"
    found.call(f"torchrun-{run}-{attempt}", f"{MARK} and TORCHELASTIC_RESTART_COUNT={attempt}")
    found.meet()
    shared = text(env, "TORCHELASTIC_USE_AGENT_STORE")
    if shared.lower() in {"true", "1"} and found.coordinator is not None:
        found.say("agent_store", True, f"TORCHELASTIC_USE_AGENT_STORE={shared}")
    return found
