"""Network namespaces as hosts: each with an interface, addresses, a host name and an /etc/hosts of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ranks import harness

Making = Callable[..., "Network"]


def ip(*lines: str) -> None:
    """Run `ip` with each of ``lines`` as its arguments."""
    for line in lines:
        done = subprocess.run(["ip", *line.split()], text=True, check=False, capture_output=True)  # noqa: S607
        assert done.returncode == 0, f"ip {line}: {done.stderr}"


@dataclass(frozen=True, slots=True)
class Host:
    """One host, by the name of its network namespace."""

    number: int
    namespace: str
    hosts_file: Path

    @property
    def name(self) -> str:
        """The output of `hostname` there."""
        return f"host-{'abcd'[self.number]}"

    @property
    def ipv4(self) -> str:
        """Its address on the common network."""
        return f"10.77.0.{self.number + 1}"

    @property
    def ipv6(self) -> str:
        """Its address on the common network."""
        return f"fd77::{self.number + 1}"

    def environment(self) -> dict[str, str]:
        """Return what a rank needs to move there (`enter_host.enter`)."""
        return {"HOST": json.dumps([self.namespace, self.name, str(self.hosts_file)])}

    def run(self, *command: str, text: str = "") -> None:
        """Run a command there."""
        whole = ["ip", "netns", "exec", self.namespace, *command]
        done = subprocess.run(whole, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{whole}: {done.stderr}"

    def link(self, state: str) -> None:
        """Pull the cable (down) or put it back (up)."""
        ip(f"-n {self.namespace} link set eth0 {state}")

    def firewall(self, *rules: str) -> None:
        """Apply nftables ``rules`` to packets that arrive at eth0."""
        lines = "\n".join(f'iifname "eth0" {rule}' for rule in rules)
        self.nft(f"table inet test {{ chain in {{ type filter hook input priority 0;\n{lines}\n}}\n}}")

    def nft(self, table: str) -> None:
        """Add the nftables ``table``."""
        if shutil.which("nft") is None:
            pytest.skip("nft is not installed, and nothing else here filters single ports (apt install nftables)")
        self.run("nft", "-f", "-", text=table)

    def lose(self, other: Host) -> None:
        """Drop every packet to ``other`` silently, by sending them to a network card that does not exist."""
        ip(f"-n {self.namespace} neigh replace {other.ipv4} lladdr 02:00:00:00:00:99 dev eth0 nud permanent")


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts that are joined by a switch."""

    hosts: list[Host]

    def each(self, layout: list[int], env: Mapping[int, Mapping[str, str]] | None = None) -> dict[int, dict[str, str]]:
        """Return the environment of each rank; ``layout`` has the host of each rank."""
        return {
            rank: {**self.hosts[host].environment(), **((env or {}).get(rank, {}))} for rank, host in enumerate(layout)
        }


@pytest.fixture
def network(fork_server: None, cables: Making) -> Making:  # noqa: ARG001  # started before anything is counted
    """Make a network of hosts on which ranks run."""
    return cables


@pytest.fixture
def cables(tmp_path: Path) -> Iterator[Making]:
    """Make a network of hosts; they are gone after the test, however it ended."""
    made: list[str] = []

    def make(number: int = 2, *, families: tuple[int, ...] = (4, 6)) -> Network:
        prefix = f"ah{os.getpid()}"
        switch = f"{prefix}-s"
        hosts = [Host(index, f"{prefix}-{'abcd'[index]}", tmp_path / f"hosts-{index}") for index in range(number)]
        for name in (switch, *(host.namespace for host in hosts)):
            _add(name)
            made.append(name)
        lines = [f"-n {switch} link add br0 type bridge", f"-n {switch} link set br0 up"]
        for host in hosts:
            ours, port = host.namespace, f"port{host.number}"
            lines += [
                f"-n {ours} link set lo up",
                f"-n {ours} link add eth0 type veth peer name {port} netns {switch}",
                f"-n {switch} link set {port} master br0 up",
                f"-n {ours} link set eth0 up",
                *([f"-n {ours} addr add {host.ipv4}/24 dev eth0"] if 4 in families else []),
                *([f"-n {ours} addr add {host.ipv6}/64 dev eth0 nodad"] if 6 in families else []),
            ]
            # What Debian writes: the machine's own name leads to loopback.
            host.hosts_file.write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {host.name}\n")
        ip(*lines)
        return Network(hosts)

    try:
        yield make
    finally:
        for name in made:
            ip(f"netns delete {name}")


def _add(name: str) -> None:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces cannot be made: `ip` is not installed (apt install iproute2)")
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)  # noqa: S607
    if done.returncode != 0:
        pytest.skip(f"network namespaces cannot be made: {done.stderr.strip()}")


def outcomes(results: list[harness.Result], *, at_most: float = float("inf")) -> list[dict[str, Any]]:
    """Return the outcome of each rank that made an attempt; none may have lasted longer than ``at_most``."""
    for result in results:
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    found: list[dict[str, Any]] = [line["outcome"] for result in results for line in result.lines if "outcome" in line]
    assert all(outcome["seconds"] < at_most for outcome in found), found
    return found
