"""A Kubernetes StatefulSet: the host name ends in the pod's ordinal, and the number of replicas is not given."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .base import DEFAULT_PORT, Detection, node_not_process, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "statefulset"
MARK = "KUBERNETES_SERVICE_HOST, WORLD_SIZE without RANK, and a HOSTNAME that ends in a number"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a StatefulSet whose manifest sets WORLD_SIZE to the number of replicas.

    Without WORLD_SIZE it is not recognised: notebooks run in pods with such names too.
    """
    name = text(env, "HOSTNAME")
    match = re.fullmatch(r"(.+)-([0-9]+)", name)
    known = text(env, "KUBERNETES_SERVICE_HOST") and text(env, "WORLD_SIZE") and not text(env, "RANK")
    if match is None or not known:
        return None
    if several(env):
        raise node_not_process(f"HOSTNAME={name}", several(env), "a StatefulSet numbers pods")
    found = Detection(NAME, f"HOSTNAME={name} looks like a StatefulSet's pod, and WORLD_SIZE is set", env)
    found.say("rank", int(match[2]), f"HOSTNAME={name}").say("node_rank", int(match[2]), f"HOSTNAME={name}")
    found.take("world_size", "WORLD_SIZE").call(f"statefulset-{match[1]}", f"HOSTNAME={name}")
    found.late_names = True
    found.reasons["coordinator"] = f"Kubernetes gives no address; set MASTER_ADDR={match[1]}-0.<service>"
    return found.meet(number=DEFAULT_PORT, why="the default")
