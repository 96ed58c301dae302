"""A Kubernetes Indexed Job: the index is the pod's, and the number of pods is not given."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .base import DEFAULT_PORT, Detection, node_not_process, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "indexed"
MARK = "JOB_COMPLETION_INDEX without RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of an Indexed Job whose manifest does not number the processes itself."""
    index = text(env, "JOB_COMPLETION_INDEX")
    if not index or text(env, "RANK"):
        return None
    if several(env):
        raise node_not_process(f"JOB_COMPLETION_INDEX={index}", several(env), "an Indexed Job numbers pods")
    found = Detection(NAME, "JOB_COMPLETION_INDEX is set by Kubernetes for an Indexed Job", env, late_names=True)
    found.take("rank", "JOB_COMPLETION_INDEX").take("world_size", "WORLD_SIZE")
    found.take("node_rank", "JOB_COMPLETION_INDEX")
    found.remedy = "set WORLD_SIZE in the pod's env to the Job's spec.completions: Kubernetes does not give it"
    match = re.fullmatch(rf"(.+)-{re.escape(index)}", text(env, "HOSTNAME"))
    job = match[1] if match else "<job>"
    if match:
        found.call(f"indexed-{job}", f"HOSTNAME={text(env, 'HOSTNAME')}")
    # The name of the headless service is not given; without it the host name does not resolve.
    found.reasons["coordinator"] = f"Kubernetes gives no address; set MASTER_ADDR={job}-0.<headless service>"
    return found.meet(number=DEFAULT_PORT, why="the default")
