"""The recipes' manifests against the schemas of Kubernetes and of JobSet, which packages of `make setup` bring."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from recipes import CLUSTERS

yaml = pytest.importorskip("yaml", reason="PyYAML is missing (make setup installs it)")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing (make setup)")
trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is missing (make setup)")

FOLDER = CLUSTERS / "kubernetes"
# The oldest version whose schemas are there, and the newest: what is valid in both is not new and not going away.
VERSIONS = [kubernetes_validate.utils.all_versions()[0], kubernetes_validate.utils.latest_version()]


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a manifest."""
    found = list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    assert all(isinstance(each, dict) for each in found)
    return found


def check(document: dict[str, Any], version: str) -> None:
    """Raise where ``document`` is not valid; a field that does not exist is not."""
    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, version, strict=True)
        return
    # Pydantic's models of JobSet's own API drop what they do not know, so that it would be missing afterwards.
    model = trainer.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(document))
    assert model.to_dict() == document
    for part in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", **part["template"]}
        kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_a_manifest_is_valid(name: str, version: str) -> None:
    """Every document is what the API takes: no field that it does not have, none of another type, none missing."""
    for document in documents(name):
        check(document, version)


@pytest.mark.parametrize(
    ("name", "path", "field"),
    [
        ("indexed-job.yaml", ("spec",), "completionsMode"),
        ("indexed-job.yaml", ("spec", "template", "spec", "containers", 0, "env", 0), "val"),
        ("jobset.yaml", ("spec", "network"), "enableDnsHostnames"),
        ("jobset.yaml", ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec"), "restart"),
        ("statefulset.yaml", ("spec",), "podManagement"),
    ],
)
def test_a_field_that_does_not_exist_is_found(name: str, path: tuple[str | int, ...], field: str) -> None:
    """The check is strict: a misspelt field, however deep, is not passed over."""
    document = documents(name)[-1]
    place: Any = document
    for step in path:
        place = place[step]
    place[field] = True
    with pytest.raises(Exception, match=rf"{field}|assert"):
        check(document, VERSIONS[-1])


def test_the_numbers_agree() -> None:
    """WORLD_SIZE, which Kubernetes does not tell, is the number of pods that the same file asks for."""
    for name in ("indexed-job.yaml", "jobset.yaml", "statefulset.yaml"):
        spec = documents(name)[-1]["spec"]
        pods = spec.get("completions") or spec.get("replicas")
        inner = spec
        if name == "jobset.yaml":
            (part,) = spec["replicatedJobs"]
            inner = part["template"]["spec"]
            pods = part["replicas"] * inner["completions"]
        assert inner.get("completions") == inner.get("parallelism")
        (container,) = inner["template"]["spec"]["containers"]
        values = {each["name"]: each.get("value") for each in container["env"]}
        assert values["WORLD_SIZE"] == str(pods), name
