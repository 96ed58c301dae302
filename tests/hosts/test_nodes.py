"""`allhands run` over several nodes: an agent on each of several hosts, which are network namespaces."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import statistics
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hosts.agents import PORT, TRAINS, WAITS, agents, results
from hosts.conftest import Host, Making
from hosts.enter_host import CLONE_NEWNET

pytestmark = pytest.mark.hosts

# Jobs that go well -----------------------------------------------------------------------------------------------


def test_two_agents_train(network: Making) -> None:
    """Two agents with one and two ranks train to the end, over one TCP connection to node 0's agent and no other."""
    made = network()
    held: list[int] = []
    with agents(made, TRAINS, ranks=(1, 2)) as jobs:
        deadline = time.monotonic() + 90
        while jobs[0].process.poll() is None and time.monotonic() < deadline:
            held.append(_connections(made.hosts[0], PORT))
            time.sleep(0.1)
        first, second = results(jobs)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert sorted(line.split("trained ")[1] for line in (first.out + second.out).splitlines() if "trained" in line) == [
        "0 3 host-a",
        "1 3 host-b",
        "2 3 host-b",
    ]
    # The mode: on a loaded machine an agent may connect again while its first attempt is pending.
    assert statistics.mode(filter(None, held)) == 1
    assert [rank["node"] for rank in first.report["ranks"]] == [0, 1, 1]
    assert first.report == second.report


@pytest.mark.soak
def test_four_nodes_train(network: Making) -> None:
    """Four agents on four hosts, with a rank each, train to the end."""
    made = network(4)
    with agents(made, TRAINS, on=(0, 1, 2, 3), ranks=(1, 1, 1, 1)) as jobs:
        ran = results(jobs)
    assert [each.code for each in ran] == [0] * 4, "".join(each.err for each in ran)
    assert [each.lines(node)[-1] for node, each in enumerate(ran)] == [
        f"trained {node} 4 {made.hosts[node].name}" for node in range(4)
    ]


def _connections(host: Host, port: int) -> int:
    """Count the established connections to ``port`` on ``host``, as the kernel there lists them."""
    line = ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp"]
    rows = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    return sum(1 for row in rows if row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "01")


@pytest.mark.soak
@pytest.mark.parametrize("token", ["", "secret"])
def test_torch_script(network: Making, token: str) -> None:
    """A script that knows only torch meets at node 0, at a port that its agent chose; with and without a token."""
    made = network()
    source = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    print("sum", int(x.item()))
    dist.destroy_process_group()
    """
    # Each host's own name leads to loopback, as on Debian, and Gloo by itself would go there.
    env = {"GLOO_SOCKET_IFNAME": "eth0", **({"ALLHANDS_TOKEN": token} if token else {})}
    with agents(made, source, env={0: env, 1: env}, ranks=(1, 2)) as jobs:
        first, second = results(jobs)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.out + second.out).count("sum 3") == 3
    assert ("without a token" in first.err) is not bool(token)


def test_node_ranks_by_arrival(network: Making) -> None:
    """Without --node-rank, as with torchrun's c10d, the node that owns the address is node 0."""
    made = network()
    endpoint = f"{made.hosts[1].ipv4}:{PORT}"
    line = ("--rdzv-backend", "c10d", "--rdzv-id", "night", "--rdzv-endpoint", endpoint, "--coordinator", "")
    source = (
        "import os; print(*(os.environ[n] for n in ('RANK', 'GROUP_RANK', 'MASTER_ADDR', 'ALLHANDS_NODE_ADDRESS')))"
    )
    with agents(made, source, each={0: line, 1: line}, ranks=(1, 2)) as jobs:
        first, second = results(jobs)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    master = made.hosts[1].ipv4
    assert sorted(second.out.splitlines()) == [f"[{rank}] {rank} 0 {master} {master}" for rank in (0, 1)]
    assert first.out.splitlines() == [f"[2] 2 1 {master} {made.hosts[0].ipv4}"]


@pytest.mark.soak
def test_large_store_values(network: Making) -> None:
    """Large values of the store pass the agents' one connection in both directions."""
    made = network()
    source = """
    import allhands as dist
    from allhands.groups import session
    dist.init_process_group()
    store, rank = session.current().store, dist.get_rank()
    store.set(f"from {rank}", bytes([rank]) * (16 << 20))
    for other in (0, 1):
        found = store.get(f"from {other}")
        assert found == bytes([other]) * (16 << 20), (other, len(found))
    print("same")
    dist.destroy_process_group()
    """
    with agents(made, source, ranks=(1, 1)) as jobs:
        first, second = results(jobs)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.out + second.out).count("same") == 2


# The roll call between agents ------------------------------------------------------------------------------------


# Additional options of each agent; its environment; the slugs in the order of nodes. None of them affects
# before the deadline on node 0, so that is short; where it decides at once, the deadline is for a slow machine only.
Fault = tuple[dict[int, str], dict[int, dict[str, str]], tuple[str, ...]]

AT_THE_DEADLINE: dict[str, Fault] = {
    "two nodes 0": ({0: "--node-rank 0", 1: "--node-rank 0"}, {}, ("missing-ranks", "address-not-local")),
    "token": ({}, {0: {"ALLHANDS_TOKEN": "a"}, 1: {"ALLHANDS_TOKEN": "b"}}, ("not-authorised", "not-authorised")),
    "port": ({1: "--node-rank 1 --coordinator 10.77.0.1:29999"}, {}, ("missing-ranks", "connection-refused")),
    "name": ({1: "--node-rank 1 --coordinator nowhere.invalid:1"}, {}, ("missing-ranks", "address-unresolvable")),
    "route": ({1: "--node-rank 1 --coordinator 10.99.0.1:1"}, {}, ("missing-ranks", "no-route")),
    "loopback": ({1: "--node-rank 1 --coordinator localhost:29998"}, {}, ("missing-ranks", "loopback-advertised")),
}

AT_ONCE: dict[str, Fault] = {
    "twice": (
        {0: "--node-rank 0", 1: "--node-rank 1", 2: "--node-rank 1"},
        {},
        ("duplicate-rank", "duplicate-rank", "duplicate-rank"),
    ),
    "sizes": ({1: "--node-rank 1 --nnodes 3"}, {}, ("world-size-mismatch", "world-size-mismatch")),
    "names": ({1: "--node-rank 1 --rdzv-id other"}, {}, ("job-mismatch", "job-mismatch")),
    "stranger": ({}, {}, ("port-in-use", "wrong-service")),
    "own name": ({0: "--node-rank 0 --coordinator host-a:29997"}, {}, ("loopback-advertised",)),
}

SERVED = 29600


@pytest.mark.parametrize(
    ("faults", "timeout"),
    [pytest.param(AT_ONCE, "60", id="at-once"), pytest.param(AT_THE_DEADLINE, "8", id="late", marks=pytest.mark.soak)],
)
def test_roll_call_faults(network: Making, tmp_path: Path, faults: dict[str, Fault], timeout: str) -> None:
    """Each fault ends every agent within the deadline with its own slug, in terms of nodes; no rank starts."""
    made = network(3)
    # The metadata of an installation with another torch; the agent does not import torch.
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    other = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    if faults is AT_ONCE:
        faults = faults | {"versions": ({}, {1: other}, ("version-mismatch", "version-mismatch"))}
    stranger = _service(made.hosts[0], SERVED)
    try:
        with ExitStack() as stack:
            begun = {}
            for number, (name, (given, env, slugs)) in enumerate(faults.items()):
                begun[name] = stack.enter_context(
                    agents(
                        made,
                        WAITS,
                        *("--timeout", timeout),
                        port=SERVED if name == "stranger" else PORT + number,
                        each={node: tuple(line.split()) for node, line in given.items()},
                        env=env,
                        on=(0, 1, 2)[: len(slugs)],
                        nodes=max(2, len(slugs)),
                        ranks=(1, 1, 1),
                    )
                )
            ended = {name: results(jobs) for name, jobs in begun.items()}
    finally:
        stranger.close()
    for name, (_, _, slugs) in faults.items():
        for ran, slug in zip(ended[name], slugs, strict=True):
            assert f"[{slug}]" in ran.err, f"{name}: {ran.err}"
            assert (ran.code, ran.out) == (1, "")
    if "port" in faults:
        assert "nothing was ever received from node 1" in ended["port"][0].err
        assert "1 of 2 nodes answered" in ended["port"][0].err
    else:
        assert "node 1 has torch 9.9" in ended["versions"][0].err
        assert "two processes claim node 1 of 3" in ended["twice"][1].err
        assert "node 0 claims 2 and node 1 claims 3" in ended["sizes"][0].err
        assert "start every node with the same --nnodes" in ended["sizes"][1].err


def _service(host: Host, port: int) -> socket.socket:
    """Listen on ``host`` as something that is not a coordinator."""
    made: list[socket.socket] = []

    def serve() -> None:
        # A thread moves to the host by itself; the test stays where it is.
        with (Path("/run/netns") / host.namespace).open() as place:
            ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET)
        server = socket.create_server((host.ipv4, port))
        made.append(server)
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    while not made:
        time.sleep(0.01)
    # Closing alone would not wake the thread that accepts.
    return made[0]


@pytest.mark.soak
def test_firewall(network: Making) -> None:
    """Packets to node 0 vanish: filtered on the node behind that, missing on node 0."""
    made = network()
    made.hosts[1].lose(made.hosts[0])
    with agents(made, WAITS, "--timeout", "8") as jobs:
        first, second = results(jobs)
    assert "[missing-ranks]" in first.err
    assert "[connection-filtered]" in second.err


@pytest.mark.soak
def test_ctrl_c_during_the_roll_call(network: Making) -> None:
    """SIGINT to an agent that waits in the roll call ends the others too, and the text names its node."""
    made = network(3)
    with agents(made, WAITS, nodes=3, ranks=(1, 1)) as jobs:
        jobs[0].wait_for("2 of 3 nodes are here; waiting for node 2")
        jobs[1].send(signal.SIGINT)
        first, second = results(jobs)
    assert (first.code, second.code) == (130, 130)
    assert "the job was stopped by SIGINT on node 1 (host-b), before all nodes were there" in first.err
    assert "the job was stopped by SIGINT on this node" in second.err


@pytest.mark.soak
def test_host_name_that_resolves_late(network: Making) -> None:
    """A name that does not exist yet is resolved again, the wait is shown, and the job runs once it exists."""
    made = network()
    late = ("--node-rank", "1", "--coordinator", f"late-name:{PORT}")
    with agents(made, "print('done')", each={1: late}, ranks=(1, 1)) as jobs:
        jobs[1].wait_for("late-name does not resolve")
        jobs[0].wait_for("1 of 2 nodes are here; waiting for node 1")
        with made.hosts[1].hosts_file.open("a") as file:
            file.write(f"{made.hosts[0].ipv4} late-name\n")
        first, second = results(jobs)
    assert (first.code, second.code) == (0, 0), first.err + second.err
