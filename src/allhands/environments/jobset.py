"""A JobSet on Kubernetes. Its controller sets no variables; the manifest must, through the downward API.

The names are those that JobSet manifests commonly use for the annotations `jobset.sigs.k8s.io/jobset-name`
(JOBSET_NAME), `…/replicatedjob-name` (REPLICATED_JOB_NAME) and `…/job-index` (JOB_INDEX); PROCESSES_IN_JOB is
the pods of one Job. JOB_COMPLETION_INDEX, the pod's index in its Job, comes from Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import DEFAULT_PORT, Detection, integer, node_not_process, several, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "jobset"
MARK = "JOBSET_NAME, REPLICATED_JOB_NAME and JOB_COMPLETION_INDEX without RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a JobSet whose manifest passes the annotations on."""
    name, part, pod = text(env, "JOBSET_NAME"), text(env, "REPLICATED_JOB_NAME"), integer(env, "JOB_COMPLETION_INDEX")
    if not name or not part or pod is None or text(env, "RANK"):
        return None
    if several(env):
        raise node_not_process(f"JOB_COMPLETION_INDEX={pod}", several(env), "a JobSet numbers pods")
    found = Detection(NAME, "JOBSET_NAME and REPLICATED_JOB_NAME are passed on by the manifest", env, late_names=True)
    job, pods = integer(env, "JOB_INDEX"), integer(env, "PROCESSES_IN_JOB")
    if not job:
        found.take("rank", "JOB_COMPLETION_INDEX")
    elif pods is not None:
        why = f"JOB_INDEX={job} times PROCESSES_IN_JOB={pods} plus JOB_COMPLETION_INDEX={pod}"
        found.say("rank", job * pods + pod, why)
    if found.rank is not None:
        found.say("node_rank", found.rank, found.reasons["rank"])
    found.take("world_size", "WORLD_SIZE")
    found.remedy = "in the manifest, set WORLD_SIZE to the number of all pods and PROCESSES_IN_JOB to those of one Job"
    found.call(f"jobset-{name}-{part}", "JOBSET_NAME and REPLICATED_JOB_NAME")
    # The subdomain is the JobSet's name unless the manifest says otherwise, and then it can set MASTER_ADDR.
    host = f"{name}-{part}-0-0.{name}"
    return found.meet(lambda: (host, "the JobSet's name for its first pod"), DEFAULT_PORT, "the default")
