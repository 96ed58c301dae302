"""Pods on Kubernetes: PyTorchJob and Trainer of Kubeflow, JobSet, Indexed Job, StatefulSet. All of them number pods.

The controller of a JobSet sets no variables; the manifest must, through the downward API. The names are those that
JobSet manifests commonly use for the annotations `jobset.sigs.k8s.io/jobset-name` (JOBSET_NAME),
`…/replicatedjob-name` (REPLICATED_JOB_NAME) and `…/job-index` (JOB_INDEX); PROCESSES_IN_JOB is the pods of one Job.
JOB_COMPLETION_INDEX, the pod's index in its Job, is set by Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import fail
from .base import DEFAULT_PORT, Detection, check_one_process, integer, me, processes_per_node, text

__all__ = ["detect_indexed", "detect_jobset", "detect_pytorchjob", "detect_statefulset", "detect_trainer"]

# The default port of Kubeflow's training operator.
_OPERATOR_PORT = 23456


def detect_pytorchjob(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a PyTorchJob (training operator v1) that runs one process; raise where more are meant."""
    if not text(env, "PET_NNODES") or not text(env, "RANK"):
        return None
    rank, size, local = integer(env, "RANK"), integer(env, "WORLD_SIZE"), integer(env, "LOCAL_RANK")
    # An elastic PyTorchJob gives a range of pods (1:4) and no fixed number of processes.
    pods = integer(env, "PET_NNODES") if text(env, "PET_NNODES").isdecimal() else None
    per_pod = size // pods if pods and size else 1
    where = "in a PyTorchJob, RANK is the pod's index and WORLD_SIZE is pods times processes per pod"
    if local is not None:
        pod = integer(env, "PET_NODE_RANK")
        if pod is not None and per_pod > 1 and rank != pod * per_pod + local:
            evidence = f"LOCAL_RANK={local} is set, but RANK was left as it was"
            check_one_process(env, f"RANK={rank}", where, evidence)
        return None  # a launcher in the pod has numbered the processes: RANK can be used as it is
    evidence = f"WORLD_SIZE={size} with PET_NNODES={pods}" if per_pod > 1 else ""
    check_one_process(env, f"RANK={rank}", where, processes_per_node(env) or evidence)
    found = Detection("pytorchjob", "PET_NNODES and RANK are set by Kubeflow's training operator", env, late_names=True)
    found.read(rank="RANK", world_size="WORLD_SIZE", node_rank=("PET_NODE_RANK", "RANK"))
    master = text(env, "MASTER_ADDR")
    if master.endswith("-master-0"):
        found.set(f"MASTER_ADDR={master}", job=f"pytorchjob-{master.removesuffix('-master-0')}")
    return found.locate(number=_OPERATOR_PORT, why="the operator's default")


def detect_trainer(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a TrainJob (Kubeflow Trainer v2) whose script was started without torchrun.

    Such pods are made for a launcher in each; without one, only one process per pod can be numbered.
    """
    host = text(env, "PET_MASTER_ADDR")
    if not host or text(env, "RANK"):
        return None
    wanted = text(env, "PET_NPROC_PER_NODE") or "1"
    if not wanted.isdecimal():
        raise fail(
            "not-launched",
            f"PET_NPROC_PER_NODE={wanted} leaves the number of processes to a launcher that was not used",
            who=me(),
            why="Kubeflow Trainer gives a pod only its own index; a launcher in the pod numbers the processes",
            fix="start the script with torchrun, or set numProcPerNode: 1 in the TrainJob",
        )
    check_one_process(env, f"PET_NODE_RANK={text(env, 'PET_NODE_RANK')}", "Kubeflow Trainer numbers pods")
    reason = "PET_MASTER_ADDR is set by Kubeflow Trainer, and there is one process per pod"
    found = Detection("trainer", reason, env, late_names=True)
    found.read(rank="PET_NODE_RANK", world_size="PET_NNODES", node_rank="PET_NODE_RANK")
    found.set(f"PET_MASTER_ADDR={host}", job=f"trainer-{host}")
    number = integer(env, "PET_MASTER_PORT") or DEFAULT_PORT
    return found.locate(lambda: (host, "PET_MASTER_ADDR"), number, f"PET_MASTER_PORT={number}")


def detect_jobset(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a JobSet whose manifest passes the annotations on."""
    name, part, pod = text(env, "JOBSET_NAME"), text(env, "REPLICATED_JOB_NAME"), integer(env, "JOB_COMPLETION_INDEX")
    if not name or not part or pod is None or text(env, "RANK"):
        return None
    check_one_process(env, f"JOB_COMPLETION_INDEX={pod}", "a JobSet numbers pods")
    reason = "JOBSET_NAME and REPLICATED_JOB_NAME are passed on by the manifest"
    found = Detection("jobset", reason, env, late_names=True)
    job, pods = integer(env, "JOB_INDEX"), integer(env, "PROCESSES_IN_JOB")
    if not job:
        found.read(rank="JOB_COMPLETION_INDEX", node_rank="JOB_COMPLETION_INDEX")
    elif pods is not None:
        why = f"JOB_INDEX={job} times PROCESSES_IN_JOB={pods} plus JOB_COMPLETION_INDEX={pod}"
        found.set(why, rank=job * pods + pod, node_rank=job * pods + pod)
    found.read(world_size="WORLD_SIZE")
    found.remedy = "in the manifest, set WORLD_SIZE to the number of all pods and PROCESSES_IN_JOB to those of one Job"
    found.set("JOBSET_NAME and REPLICATED_JOB_NAME", job=f"jobset-{name}-{part}")
    # The subdomain is the JobSet's name unless the manifest sets another one, and then it can set MASTER_ADDR.
    host = f"{name}-{part}-0-0.{name}"
    return found.locate(lambda: (host, "the JobSet's name for its first pod"), DEFAULT_PORT, "the default")


def detect_indexed(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of an Indexed Job whose manifest does not number the processes itself."""
    index = text(env, "JOB_COMPLETION_INDEX")
    if not index or text(env, "RANK"):
        return None
    check_one_process(env, f"JOB_COMPLETION_INDEX={index}", "an Indexed Job numbers pods")
    reason = "JOB_COMPLETION_INDEX is set by Kubernetes for an Indexed Job"
    found = Detection("indexed", reason, env, late_names=True)
    found.read(rank="JOB_COMPLETION_INDEX", world_size="WORLD_SIZE", node_rank="JOB_COMPLETION_INDEX")
    found.remedy = "set WORLD_SIZE in the pod's env to the Job's spec.completions: Kubernetes does not give it"
    match = re.fullmatch(rf"(.+)-{re.escape(index)}", text(env, "HOSTNAME"))
    job = match[1] if match else "<job>"
    if match:
        found.set(f"HOSTNAME={text(env, 'HOSTNAME')}", job=f"indexed-{job}")
    # The name of the headless service is not given; without it the host name does not resolve.
    found.reasons["coordinator"] = f"Kubernetes gives no address; set MASTER_ADDR={job}-0.<headless service>"
    return found.locate(number=DEFAULT_PORT, why="the default")


def detect_statefulset(env: Mapping[str, str]) -> Detection | None:
    """Recognise a pod of a StatefulSet (its host name ends in its number) whose manifest sets WORLD_SIZE.

    Without WORLD_SIZE, the number of replicas, it is not recognised: notebooks run in pods with such names too.
    """
    name = text(env, "HOSTNAME")
    match = re.fullmatch(r"(.+)-([0-9]+)", name)
    known = text(env, "KUBERNETES_SERVICE_HOST") and text(env, "WORLD_SIZE") and not text(env, "RANK")
    if match is None or not known:
        return None
    check_one_process(env, f"HOSTNAME={name}", "a StatefulSet numbers pods")
    reason = f"HOSTNAME={name} looks like a StatefulSet's pod, and WORLD_SIZE is set"
    found = Detection("statefulset", reason, env, late_names=True)
    number, job = int(match[2]), f"statefulset-{match[1]}"
    found.set(f"HOSTNAME={name}", rank=number, node_rank=number, job=job).read(world_size="WORLD_SIZE")
    found.reasons["coordinator"] = f"Kubernetes gives no address; set MASTER_ADDR={match[1]}-0.<service>"
    return found.locate(number=DEFAULT_PORT, why="the default")
