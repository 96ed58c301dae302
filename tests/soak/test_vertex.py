"""The Vertex AI recipe: its file against Google's schema, and its command with the CLUSTER_SPEC that the file makes."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hosts.conftest import Making
from hosts.machine import Machine, finish, routed, typed
from recipes import CLUSTERS, block

yaml = pytest.importorskip("yaml", reason="PyYAML is missing (make setup installs it)")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is missing (make setup installs it)")

pytestmark = pytest.mark.soak


def _spec() -> dict[str, Any]:
    """Return the file that the recipe's gcloud line names."""
    (config,) = (word for word in shlex.split(block("vertex", "gcloud ai")) if word.startswith("--config="))
    found: dict[str, Any] = yaml.safe_load((CLUSTERS / config.removeprefix("--config=")).read_text(encoding="utf-8"))
    return found


def _described(folder: Path) -> dict[str, Any]:
    """Return Google's description of the API, which its Python client carries."""
    words = ["download", "--quiet", "--no-deps", "--dest", str(folder), "google-api-python-client"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot download from PyPI here: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob("google_api_python_client-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        found: dict[str, Any] = json.loads(packed.read("googleapiclient/discovery_cache/documents/aiplatform.v1.json"))
    return found


def _strict(schema: Any) -> Any:
    """Turn a schema of Google's discovery format into a JSON Schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # "required" is a property of the field there, not of its owner; the omitted keys are documentation.
    kept = ("type", "items", "properties", "additionalProperties", "enum", "format")
    made = {name: _strict(schema[name]) for name in kept if name in schema and name != "properties"}
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{schema['$ref']}"}
    if "properties" in schema:
        made["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        made.setdefault("additionalProperties", False)
    if made.get("type") == "any":
        del made["type"]
    if made.get("format") == "int64":
        # Written as text in JSON, where numbers are not exact; read from either.
        made["type"] = ["string", "integer"]
    return made


def test_the_file_is_valid(tmp_path: Path) -> None:
    """The file is a CustomJobSpec as the API has it; a field that the API does not have would be found."""
    schemas = _described(tmp_path)["schemas"]
    root = {
        "$ref": "#/$defs/GoogleCloudAiplatformV1CustomJobSpec",
        "$defs": {name: _strict(schema) for name, schema in schemas.items()},
    }
    spec = _spec()
    jsonschema.validate(spec, root)
    spec["workerPoolSpecs"][0]["containerSpec"]["imageURI"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imageURI"):
        jsonschema.validate(spec, root)


@pytest.mark.hosts
def test_the_machines_train(network: Making, tmp_path: Path) -> None:
    """Each machine of the file runs its pool's command with its CLUSTER_SPEC, finds its rank, and all train."""
    pools = {f"workerpool{number}": pool for number, pool in enumerate(_spec()["workerPoolSpecs"])}
    places = [(name, index) for name, pool in pools.items() for index in range(pool["replicaCount"])]
    cluster = {
        name: [f"cmle-training-{name}-a1b2-{index}:2222" for index in range(pool["replicaCount"])]
        for name, pool in pools.items()
    }
    hosts = routed(network(len(places)))
    addresses = zip(hosts, (each.partition(":")[0] for name in pools for each in cluster[name]), strict=True)
    known = "127.0.0.1 localhost\n" + "".join(f"{host.ipv4} {name}\n" for host, name in addresses)
    with contextlib.ExitStack() as stack:
        begun = []
        for rank, (host, (pool, index)) in enumerate(zip(hosts, places, strict=True)):
            host.hosts_file.write_text(known)
            env = {
                "CLOUD_ML_JOB_ID": "4242",
                "CLUSTER_SPEC": json.dumps(
                    {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": index}}
                ),
                # As Vertex AI sets them: they count machines.
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "ALLHANDS_TOKEN": "t",
            }
            command = shlex.join(pools[pool]["containerSpec"]["command"])
            begun.append(Machine(host, f"{pool}-{index}", tmp_path, env).type(command, cwd=CLUSTERS))
            stack.enter_context(typed(begun[-1]))
        said = finish(begun)
    assert f"trained: {len(places)} ranks on {len(places)} hosts" in said[0]
