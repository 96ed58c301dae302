"""The Compute Engine recipe: its gcloud commands are run, and its start-up script with their metadata."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hosts.conftest import Making
from hosts.machine import Machine, Typed, finish, routed, typed
from hosts.metadata_server import PREFIX, Metadata
from recipes import CLUSTERS, block, copy

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl, which the start-up script needs, is not installed"),
]

DOMAIN = "us-central1-a.c.my-project.internal"
# Writes down its arguments, one list in a line.
GCLOUD = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["GCLOUD_LOG"], "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
"""


def _typed(folder: Path, recipes: Path) -> list[list[str]]:
    """Type the recipe's gcloud lines at a gcloud that writes them down; return its arguments, line by line."""
    gcloud = folder / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text(GCLOUD)
    gcloud.chmod(0o755)
    log = folder / "gcloud.log"
    script = f"set -e\nPATH={gcloud.parent}:$PATH\n" + block("compute", "instance-templates create")
    machine = Machine(None, "laptop", folder, {"GCLOUD_LOG": str(log)})
    with typed(machine.type(script, cwd=recipes)) as begun:
        finish(begun)
    return [json.loads(line) for line in log.read_text().splitlines()]


def _pairs(text: str) -> dict[str, str]:
    """Read KEY=VALUE,KEY=VALUE as gcloud does; a prefix ^;^ replaces the comma by another character."""
    sign = ","
    if text.startswith("^"):
        _, sign, text = text.split("^", 2)
    return dict(each.split("=", 1) for each in text.split(sign))


def _option(line: list[str], name: str) -> str:
    (found,) = (word.removeprefix(f"--{name}=") for word in line if word.startswith(f"--{name}="))
    return found


def _asked(folder: Path, recipes: Path) -> tuple[dict[str, str], list[str]]:
    """Return the metadata and the instances that the recipe requests."""
    template, group, *instances = _typed(folder, recipes)
    assert template[:3] == ["compute", "instance-templates", "create"]
    assert _option(group, "template") == template[3]
    metadata = _pairs(_option(template, "metadata"))
    for key, file in _pairs(_option(template, "metadata-from-file")).items():
        metadata[key] = (recipes / file).read_text()
    assert all(line[3] == "create-instance" and line[4] == group[4] for line in instances)
    return metadata, [_option(line, "instance") for line in instances]


def test_the_startup_script(network: Making, tmp_path: Path) -> None:
    """Two instances with the metadata that the gcloud lines set: each starts its ranks, and all train as one job."""
    recipes = copy(tmp_path)
    metadata, instances = _asked(tmp_path, recipes)
    assert metadata["startup-script"] == (CLUSTERS / "compute/startup.sh").read_text()
    assert metadata["allhands-ranks"] == "8"
    metadata["allhands-ranks"] = "1"  # Sixteen ranks would only show how many cores there are.
    hosts = routed(network(2))
    with contextlib.ExitStack() as stack:
        begun: list[Typed] = []
        for host, name in zip(hosts, instances, strict=True):
            host.hosts_file.write_text(
                "127.0.0.1 localhost\n"
                + "".join(f"{each.ipv4} {other}.{DOMAIN}\n" for each, other in zip(hosts, instances, strict=True))
            )
            # Boot: the metadata server is there, the disk has the folder, and root's shell runs what the metadata has.
            served = stack.enter_context(Metadata(name, DOMAIN, metadata).serving(host.namespace))
            env = {"GCE_METADATA_HOST": served, "TRAIN_DIR": str(recipes)}
            begun.append(Machine(host, name, tmp_path, env).type(metadata["startup-script"]))
            stack.enter_context(typed(begun[-1]))
        said = finish(begun)
    assert "[0] trained: 2 ranks on 2 hosts" in said[0]


def test_an_instance_that_is_not_listed(tmp_path: Path) -> None:
    """An instance that is not in allhands-hosts reports it and starts nothing."""
    metadata = {"allhands-hosts": "train-0,train-1", "allhands-token": "t"}
    with Metadata("other-7", DOMAIN, metadata).serving() as served:
        machine = Machine(None, "other", tmp_path, {"GCE_METADATA_HOST": served})
        with typed(machine.type(str(CLUSTERS / "compute/startup.sh"))) as (begun,):
            assert begun.process.wait(30) == 1
    assert "other-7, is not in its metadata's allhands-hosts=train-0 train-1" in begun.said


def test_the_stand_in_has_googles_manners() -> None:
    """The metadata server refuses requests without Metadata-Flavor: Google, as the real one does."""
    served = Metadata("train-0", DOMAIN, {"a": "b"})
    with served.serving() as where:
        url = f"http://{where}{PREFIX}attributes/a"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url)
        refused.value.close()
        asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(asked) as answer:  # noqa: S310  # loopback
            assert answer.read() == b"b"
    assert (refused.value.code, served.refused) == (403, 1)


@pytest.mark.soak
def test_a_rank_on_each_instance(network: Making, tmp_path: Path) -> None:
    """Without the start-up script, a bare `python train.py` on each instance reads the same metadata itself."""
    metadata, instances = _asked(tmp_path, recipes := copy(tmp_path))
    hosts = routed(network(2))
    with contextlib.ExitStack() as stack:
        begun: list[Typed] = []
        for host, name in zip(hosts, instances, strict=True):
            host.hosts_file.write_text(f"127.0.0.1 localhost\n{hosts[0].ipv4} {instances[0]}.{DOMAIN}\n")
            served = stack.enter_context(Metadata(name, DOMAIN, metadata).serving(host.namespace))
            env = {"GCE_METADATA_HOST": served, "ALLHANDS_TOKEN": "t"}
            begun.append(Machine(host, name, tmp_path, env).type("python train.py", cwd=recipes))
            stack.enter_context(typed(begun[-1]))
        said = finish(begun)
    assert "trained: 2 ranks on 2 hosts" in said[0]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["compute/startup.sh", "slurm/job.sh"])
def test_shellcheck(name: str) -> None:
    """The scripts have none of the mistakes that shellcheck knows."""
    done = subprocess.run(["shellcheck", CLUSTERS / name], capture_output=True, text=True, check=False)  # noqa: S607
    assert done.returncode == 0, done.stdout
