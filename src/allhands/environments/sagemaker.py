"""SageMaker training: a list of hosts, the same on each, and the name of this one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import fail
from .base import DEFAULT_PORT, Detection, me, node_not_process, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "sagemaker"
MARK = "SM_HOSTS and SM_CURRENT_HOST"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a host of a SageMaker training job; one process per host, unless a launcher starts more."""
    listed, here = text(env, "SM_HOSTS"), text(env, "SM_CURRENT_HOST")
    if not listed or not here:
        return None
    try:
        hosts: Any = json.loads(listed)
        node = list(hosts).index(here)
    except (ValueError, TypeError) as error:
        raise fail(
            "incomplete-environment",
            f"SM_CURRENT_HOST={here} is not found in SM_HOSTS={listed}",
            who=me(),
            why=f"SM_HOSTS must be a JSON list of host names with this host among them ({error})",
            fix="leave both variables as SageMaker sets them, or pass rank= and world_size=",
        ) from error
    if several(env) and not text(env, "LOCAL_RANK"):
        raise node_not_process(f"SM_CURRENT_HOST={here}", several(env), "SageMaker numbers hosts")
    found = Detection(NAME, "SM_HOSTS and SM_CURRENT_HOST are set by SageMaker", env)
    # The other hosts' names appear in DNS some time after this container has started.
    found.late_names = True
    place = f"SM_CURRENT_HOST={here} in SM_HOSTS"
    found.say("rank", node, place).say("node_rank", node, place)
    found.say("world_size", len(hosts), f"SM_HOSTS={listed}")
    job = text(env, "TRAINING_JOB_NAME")
    found.call(f"sagemaker-{job}" if job else "", f"TRAINING_JOB_NAME={job}")
    return found.meet(lambda: (str(hosts[0]), "the first of SM_HOSTS"), DEFAULT_PORT, "the default")
