"""What Kubernetes makes of a manifest: which pods, with which host names, DNS names and variables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["Pod", "pods"]

SECRETS = {("train", "token"): "a secret of the test's own"}
# Kubernetes sets it in every container.
ALWAYS = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod, as its container sees it."""

    name: str
    domain: str
    env: dict[str, str]
    command: list[str]

    @property
    def full_name(self) -> str:
        """Its name in the cluster's DNS."""
        return f"{self.name}.{self.domain}"


def pods(documents: list[dict[str, Any]], command: list[str] | None = None) -> list[Pod]:
    """Return the pods of a manifest; its service must be there, headless, and select them."""
    *services, main = documents
    name, spec = main["metadata"]["name"], main["spec"]
    match main["kind"]:
        case "Job":
            labels = {"job-name": name}
            made = [
                _pod(f"{name}-{index}", spec["template"], _index(index), {}, spec["template"]["spec"]["subdomain"])
                for index in range(spec["completions"])
            ]
        case "StatefulSet":
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()
            names = [f"{name}-{index}" for index in range(spec["replicas"])]
            made = [_pod(each, spec["template"], {}, {}, spec["serviceName"]) for each in names]
        case "JobSet":
            # Its controller makes the headless service itself.
            return [_commanded(pod, command) for pod in _jobset(name, spec)]
    (service,) = services
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= labels.items()
    assert {pod.domain.partition(".")[0] for pod in made} == {service["metadata"]["name"]}
    return [_commanded(pod, command) for pod in made]


def _jobset(name: str, spec: dict[str, Any]) -> list[Pod]:
    assert spec["network"]["enableDNSHostnames"] is True
    made = []
    for part in spec["replicatedJobs"]:
        for job in range(part["replicas"]):
            about = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": part["name"],
                "jobset.sigs.k8s.io/job-index": str(job),
            }
            inner = part["template"]["spec"]
            made += [
                _pod(f"{name}-{part['name']}-{job}-{index}", inner["template"], _index(index), about, name)
                for index in range(inner.get("completions", 1))
            ]
    return made


def _index(index: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(index)}


def _pod(name: str, template: dict[str, Any], given: dict[str, str], about: dict[str, str], subdomain: str) -> Pod:
    (container,) = template["spec"]["containers"]
    env = {**ALWAYS, "HOSTNAME": name, **given}
    for each in container["env"]:
        env[each["name"]] = each["value"] if "value" in each else _source(each["valueFrom"], about)
    return Pod(name, f"{subdomain}.default.svc.cluster.local", env, container["command"])


def _source(source: dict[str, Any], about: dict[str, str]) -> str:
    if "secretKeyRef" in source:
        return SECRETS[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
    found = re.fullmatch(r"metadata\.annotations\['(.+)'\]", source["fieldRef"]["fieldPath"])
    assert found is not None
    return about[found[1]]


def _commanded(pod: Pod, command: list[str] | None) -> Pod:
    """Replace $(VARIABLES) of the pod in its command; ``command`` is put before it."""
    words = [re.sub(r"\$\((\w+)\)", lambda found: pod.env[found[1]], word) for word in command or pod.command]
    return Pod(pod.name, pod.domain, pod.env, words)
