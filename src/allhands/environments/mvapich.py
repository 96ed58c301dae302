"""MVAPICH2."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, text

__all__ = ["MARK", "NAME", "detect", "number"]

NAME = "mvapich"
MARK = "MV2_COMM_WORLD_RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a process that MVAPICH2's launcher started."""
    if not text(env, MARK):
        return None
    return number(Detection(NAME, f"{MARK} is set by MVAPICH2", env)).meet()


def number(found: Detection) -> Detection:
    """Read rank and sizes."""
    found.take("rank", MARK).take("world_size", "MV2_COMM_WORLD_SIZE")
    return found.take("local_rank", "MV2_COMM_WORLD_LOCAL_RANK").take("local_world_size", "MV2_COMM_WORLD_LOCAL_SIZE")
