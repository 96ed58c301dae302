"""The Kubernetes manifests: what they make a pod see is run, on hosts as pods, with a DNS that learns names late."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts.conftest import Making, Network, ip
from hosts.machine import Machine, Typed, finish, routed, typed
from hosts.names import Names, serving
from hosts.pods import Pod, pods
from recipes import CLUSTERS

yaml = pytest.importorskip("yaml", reason="PyYAML is missing (make setup installs it)")

pytestmark = pytest.mark.hosts

DNS = "10.77.0.254"
# What the kubelet writes into a pod.
RESOLVER = f"nameserver {DNS}\nsearch default.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n"


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a manifest."""
    return list(yaml.safe_load_all((CLUSTERS / "kubernetes" / name).read_text(encoding="utf-8")))


@contextlib.contextmanager
def cluster(made: Network, folder: Path, wanted: list[Pod]) -> Iterator[tuple[Names, tuple[Typed, ...]]]:
    """Start ``wanted``, each on a host of its own, where the cluster's DNS is all they know of each other."""
    switch = made.hosts[0].namespace.removesuffix("-a") + "-s"
    ip(f"-n {switch} addr add {DNS}/24 dev br0")
    resolver = folder / "resolv.conf"
    resolver.write_text(RESOLVER)
    begun = []
    with serving(switch, DNS) as names:
        for pod, host in zip(wanted, routed(made), strict=True):
            # As the kubelet writes it. The name in MASTER_ADDR, host and service, is not in it: pod 0 resolves it too.
            host.hosts_file.write_text(f"127.0.0.1 localhost\n{host.ipv4} {pod.full_name} {pod.name}\n")
            machine = Machine(host, pod.name, folder, pod.env, resolver)
            begun.append(machine.type(shlex.join(pod.command), cwd=CLUSTERS))
        with typed(*begun):
            yield names, tuple(begun)


def appear(names: Names, made: Network, wanted: list[Pod]) -> None:
    """Let DNS know the pods."""
    names.known |= {pod.full_name: host.ipv4 for pod, host in zip(wanted, made.hosts, strict=True)}


def test_names_that_appear_late(network: Making, tmp_path: Path) -> None:
    """Pods of the Indexed Job resolve pod 0 until its name appears, print what they wait for, and train."""
    made, wanted = network(2), pods(documents("indexed-job.yaml"))
    with cluster(made, tmp_path, wanted) as (names, begun):
        for each in begun:
            each.wait_for("train-0.train does not resolve")
        assert "train-0.train.default.svc.cluster.local" in names.asked
        appear(names, made, wanted)
        said = finish(begun)
    assert "trained: 2 ranks on 2 hosts" in said[0]
    shown = (CLUSTERS / "kubernetes/README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^allhands rank 1: waiting.*$", shown, flags=re.MULTILINE)
    # The README shows the line as it is, but for how long it took.
    assert line.rpartition(" (")[0] in said[1]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["jobset.yaml", "statefulset.yaml"])
def test_a_manifest_trains(network: Making, tmp_path: Path, name: str) -> None:
    """Pods of a JobSet and of a StatefulSet find their number and pod 0 with the manifest's variables, and train."""
    made, wanted = network(2), pods(documents(name))
    with cluster(made, tmp_path, wanted) as (names, begun):
        begun[1].wait_for("does not resolve")
        appear(names, made, wanted)
        begun[0].wait_for("trained: 2 ranks on 2 hosts")
        if name == "jobset.yaml":
            finish(begun)
        else:
            for each in begun:
                each.wait_to_be("sleep infinity")


@pytest.mark.soak
def test_several_ranks_in_a_pod(network: Making, tmp_path: Path) -> None:
    """With an agent as the README's command, each pod of the Indexed Job starts four ranks."""
    text = (CLUSTERS / "kubernetes/README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    manifest = documents("indexed-job.yaml")
    (container,) = manifest[-1]["spec"]["template"]["spec"]["containers"]
    container["env"] = [each for each in container["env"] if each["name"] not in {"WORLD_SIZE", "MASTER_ADDR"}]
    made, wanted = network(2), pods(manifest, yaml.safe_load(found)["command"])
    with cluster(made, tmp_path, wanted) as (names, begun):
        appear(names, made, wanted)
        said = finish(begun, 240)
    assert "[0] trained: 8 ranks on 2 hosts" in said[0]
