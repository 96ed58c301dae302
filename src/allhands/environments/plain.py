"""Torch's own variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, node_not_process, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "plain"
MARK = "RANK and WORLD_SIZE"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise torch's variables, also if only some of them are set, which is then an error."""
    there = [name for name in ("RANK", "WORLD_SIZE") if text(env, name)]
    if not there:
        return None
    if "RANK" in there and not text(env, "LOCAL_RANK") and several(env):
        where = "without LOCAL_RANK or torchrun, RANK is usually the node's number (Vertex AI, PyTorchJob, PAI)"
        raise node_not_process(f"RANK={text(env, 'RANK')}", several(env), where)
    found = Detection(NAME, f"{' and '.join(there)} {'are' if len(there) > 1 else 'is'} set", env)
    found.take("rank", "RANK").take("world_size", "WORLD_SIZE")
    found.take("local_rank", "LOCAL_RANK").take("local_world_size", "LOCAL_WORLD_SIZE")
    found.take("node_rank", "GROUP_RANK", "NODE_RANK")
    return found.meet()
