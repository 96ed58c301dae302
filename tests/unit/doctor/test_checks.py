"""Each check on its own: limits, cores, interfaces, packets of name servers, the software, the environment."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import pytest

from allhands.doctor import engines, environment, hostnames, request, resources, routes
from allhands.doctor.engines import Gpu, GpuUser, Installed, installed
from allhands.doctor.request import Interface, Request, make_request
from allhands.doctor.routes import select_interfaces
from allhands.environments.world import Address

LO = Interface("lo", ("127.0.0.1", "::1"), 65536, up=True)
ETH = Interface("eth0", ("10.0.0.2", "fe80::1"), 1500, up=True)
ETH1 = Interface("eth1", (), 1500, up=False)
MIB = 1 << 20


# Interfaces and names -----------------------------------------------------------------------------------------


def test_outer_addresses() -> None:
    """Only what other machines can use counts as outer."""
    assert LO.loopback
    assert (LO.outer, ETH.outer) == ((), ("10.0.0.2",))
    assert not ETH1.loopback


@pytest.mark.parametrize(
    ("value", "prefixes", "names", "unknown"),
    [
        ("eth0", False, ["eth0"], []),
        ("eth", False, [], ["eth"]),
        ("eth", True, ["eth0", "eth1"], []),
        ("=eth", True, [], ["eth"]),
        ("=eth1", True, ["eth1"], []),
        ("^lo,eth1", True, ["eth0"], []),
        ("eth0,ib0", True, ["eth0"], ["ib0"]),
    ],
)
def test_select_interfaces(value: str, prefixes: bool, names: list[str], unknown: list[str]) -> None:
    """Gloo takes names, NCCL also beginnings, exact names and exceptions."""
    found, missing = select_interfaces(value, [LO, ETH, ETH1], prefixes=prefixes)
    assert ([each.name for each in found], missing) == (names, unknown)


def test_this_machines_interfaces() -> None:
    """The real ones: loopback is among them, up, with an MTU."""
    lo = next(each for each in request.interfaces() if "127.0.0.1" in each.addresses)
    assert lo.up
    assert lo.loopback
    assert lo.mtu > 1000


def test_resolver_and_hosts_files(tmp_path: Path) -> None:
    """Comments, search domains and several servers are read as the system reads them; no file means this machine."""
    (tmp_path / "resolv").write_text("# x\nnameserver 10.0.0.1\nsearch a.example b.example\nnameserver 10.0.0.2 ; y\n")
    servers, names = hostnames.read_resolver(tmp_path / "resolv", "node")
    assert servers == ["10.0.0.1", "10.0.0.2"]
    assert names == ["node.a.example", "node.b.example", "node"]
    assert hostnames.read_resolver(tmp_path / "resolv", "node.c") == (servers, ["node.c"])
    assert hostnames.read_resolver(tmp_path / "none", "node.") == (["127.0.0.1"], ["node"])
    (tmp_path / "hosts").write_text("10.0.0.3 Node-A node # here\n#10.0.0.4 node\n\n::1 node\n")
    assert hostnames.hosts_file_entries(tmp_path / "hosts", "node") == ["10.0.0.3", "::1"]
    assert hostnames.hosts_file_entries(tmp_path / "hosts", "node-a") == ["10.0.0.3"]


@pytest.mark.parametrize("packet", [b"", b"\0\1", b"\0\1\x81\x80\0\1\0\5\0\0\0\0\xc0", b"\0\1" + b"\xff" * 40])
def test_malformed_packets_are_ignored(packet: bytes) -> None:
    """Packets of a broken or hostile server neither raise nor count."""
    answer, found = hostnames.Answer("x"), dict[str, list[str]]()
    hostnames._parse(packet, {1: ("name", 1)}, found, answer)
    assert found == {}


def test_name_that_cannot_be_encoded() -> None:
    """An empty label or one that is too long is never sent."""
    assert hostnames.query("127.0.0.1", ["a..b", "x" * 64], 0.1).error
    assert struct.unpack_from("!6H", hostnames._question(7, "a.b", 1))[0] == 7


# Limits -------------------------------------------------------------------------------------------------------


def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where even the hard limit is too low, yellow where the soft one is, green otherwise."""
    limits = [(100, 200)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    assert (resources._descriptors(500).level, resources._descriptors(500).slug) == ("red", "fd-limit")
    assert resources._descriptors(8).level == "yellow"
    limits[0] = (4096, 4096)
    assert resources._descriptors(8).level == "green"


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's 64 MiB is yellow, a full one red, none at all yellow."""
    import os

    real = os.statvfs(tmp_path)

    def sized(whole: int, free: int) -> object:
        class State:
            f_frsize, f_blocks, f_bavail = MIB, whole, free

        return lambda _: State if real else None

    for whole, free, level in ((64, 60, "yellow"), (64, 10, "red"), (4096, 4000, "green"), (1024, 20, "red")):
        monkeypatch.setattr(os, "statvfs", sized(whole, free))
        found = resources._shm(4)
        assert found.level == level
    monkeypatch.undo()
    missing = resources._shm(1, str(tmp_path / "none"))
    assert missing.slug == "shm-too-small"


@pytest.mark.parametrize(("left", "level"), [(100, "red"), (700, "yellow"), (9000, "green")])
def test_memory(monkeypatch: pytest.MonkeyPatch, left: int, level: str) -> None:
    """The memory left for two ranks decides; the smallest limit of machine and control groups counts."""
    monkeypatch.setattr(
        resources, "memory_limits", lambda: [(64 << 30, 32 << 30, "the machine"), (2 << 30, left * MIB, "a group")]
    )
    assert resources._memory(2).level == level


@pytest.mark.parametrize(
    ("env", "ranks", "level"),
    [
        ({}, None, "green"),
        ({}, 1, "green"),
        ({"OMP_NUM_THREADS": "1"}, 4, "green"),
        ({}, 4, "yellow"),
        ({"OMP_NUM_THREADS": "2"}, 4, "yellow"),
        ({"OMP_NUM_THREADS": "1"}, 5, "yellow"),
        ({"OMP_NUM_THREADS": "many"}, None, "yellow"),
    ],
)
def test_cores(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], ranks: int | None, level: str) -> None:
    """More ranks than cores, or more threads, are yellow; where the ranks are not known, nothing is."""
    monkeypatch.setattr(resources, "available_cores", lambda: (4, "4 in all"))
    (found,) = resources.check_cores(Request(env, ranks=ranks))
    assert found.level == level
    assert not found.slug or found.slug == "too-few-cores"


def test_firewall_rules() -> None:
    """Rules that drop packets are found in the output of both tools; rules that accept them are not."""
    text = """table inet filter {
        chain in { type filter hook input priority filter; policy drop;
            tcp dport 22 accept
            tcp dport 40000-50000 drop
        }
        chain out { type filter hook output priority filter; policy accept;
            tcp dport 25 drop
        }
    }"""
    text = text.replace("chain in { ", "chain in {\n").replace("chain out { ", "chain out {\n")
    assert routes._parse_nft(text) == ["chain in: policy drop", "chain in: tcp dport 40000-50000 drop"]
    saved = ":INPUT DROP [0:0]\n-A INPUT -i lo -j ACCEPT\n-A INPUT -p tcp -j REJECT\n-A FORWARD -j DROP\n"
    assert routes._parse_iptables(saved) == [":INPUT DROP [0:0]", "-A INPUT -p tcp -j REJECT"]


# The software -------------------------------------------------------------------------------------------------


def test_this_machines_software() -> None:
    """The installed torch has the version that its import reports."""
    import torch

    found = installed()
    assert found.torch == torch.__version__
    assert (found.cuda or None) == torch.version.cuda
    assert found.core


GPU = Gpu("0", "GPU-1", "H200", "141 GiB")
NVIDIA = Installed(torch="2.13.0", cuda="13.0", nccl="2.28", driver="13.1")


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (NVIDIA, "green"),
        (Installed(torch="2.13.0", cuda="13.2", driver="13.0"), "green"),
        (Installed(torch="2.13.0", cuda="13.0", driver="12.8"), "red"),
        (Installed(torch="2.13.0", cuda="12.8", driver="13.0"), "green"),
        (Installed(torch="2.13.0", driver="13.0"), "yellow"),
        (Installed(torch="2.13.0", cuda="13.0", driver=""), "red"),
    ],
)
def test_driver_and_torch(found: Installed, level: str) -> None:
    """A driver runs the CUDA of its own major version and older ones; no driver, or a torch for CPUs, is reported."""
    first = next(engines._gpus(Request({}), found, [GPU], "", hardware=True))
    assert first.level == level
    assert not first.slug or first.slug == "driver-mismatch"


def test_gpus_and_their_users() -> None:
    """Processes on a GPU are named by pid; more ranks than GPUs, and a variable that hides them all, are reported."""
    used = Gpu("1", "GPU-2", "H200", "141 GiB", [GpuUser(4711, "python train.py", "100 MiB", mine=True)])
    found = {each.slug: each for each in engines._gpus(Request({}, ranks=3), NVIDIA, [GPU, used], "", hardware=True)}
    assert found["gpu-busy"].details["pids"] == [4711]
    assert "pid 4711 (python train.py" in found["gpu-busy"].why
    assert found["gpu-shared"].level == "yellow"
    _, hidden = engines._gpus(Request({"CUDA_VISIBLE_DEVICES": ""}), NVIDIA, [GPU], "", hardware=True)
    assert hidden.slug == "gpu-missing"
    assert list(engines._gpus(Request({}), NVIDIA, [], "", hardware=False)) == []


def test_torch_missing_or_too_old() -> None:
    """Both are red, with the command that installs one."""
    for found in (Installed(), Installed(torch="2.4.1")):
        assert engines._torch(found).level == "red"
        assert "pip install" in engines._torch(found).commands[0]
    assert engines._torch(Installed(torch="2.11.0+cu128", cuda="12.8")).level == "green"
    broken = Installed(torch="2.13", core=False)
    assert engines._engines(broken, engines.offers(broken, engines.Probe())).level == "red"


# The environment ----------------------------------------------------------------------------------------------

TWO = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


def test_contradictions_are_red() -> None:
    """Environments that whoami refuses are red, with its slug: half an environment, a RANK that counts nodes."""
    half = list(environment.check(make_request(env={"RANK": "0"})))
    assert (half[0].level, half[0].slug) == ("red", "incomplete-environment")
    node = list(environment.check(make_request(env={"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "8"})))
    assert (node[0].level, node[0].slug) == ("red", "node-not-process")


@pytest.mark.parametrize(("host", "slugs"), [("localhost", {"", "loopback-advertised"}), ("10.0.0.1", {""})])
def test_localhost_on_several_machines(host: str, slugs: set[str]) -> None:
    """MASTER_ADDR=localhost is red where only some of the ranks are here."""
    found = environment.check(make_request(env={**TWO, "MASTER_ADDR": host}))
    assert {each.slug for each in found} == slugs


def test_localhost_on_one_machine() -> None:
    """On one machine it is fine."""
    env = {**TWO, "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "4"}
    assert {each.level for each in environment.check(make_request(env=env))} == {"green"}


def test_debugging_variables() -> None:
    """Those that make a job slow are named; other values of them are not."""
    *_, found = environment.check(make_request(env={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0"}))
    assert found.slug == "debugging-left"
    assert found.commands == ("unset CUDA_LAUNCH_BLOCKING",)


def test_target_of_a_request() -> None:
    """The command line precedes the environment; the address determines whether the target is this machine."""
    env = {**TWO, "MASTER_ADDR": "10.0.0.1"}
    assert str(make_request(env=env).target) == "10.0.0.1:29500"
    made = make_request(Address("127.0.0.1", 1), env=env)
    assert made.target == Address("127.0.0.1", 1)
    assert made.target_is_here
    assert made.local_ranks == 2
    assert make_request(env={}).target is None
    assert not make_request(env={}).several_hosts
