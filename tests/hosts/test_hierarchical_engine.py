"""The hierarchical engine: several ranks on each of several hosts, and ranks of one host without shared memory."""

from __future__ import annotations

import signal

import pytest

from hosts.conftest import Making, Network
from hosts.test_backend import FORM, LAYOUT
from hosts.test_hosts import PORT
from ranks.harness import Result, free_port, launch, running, well

pytestmark = pytest.mark.hosts

# Within 2 s; the kernel reports a dead process at once.
TOLD_S = 2.0

# Every kind of call, on sizes around those where the method changes: of a fingerprint, a connection, a chunk.
EVERY_CALL = """
assert dist.group.WORLD.engine.name == "hierarchical", dist.group.WORLD.engine
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool)
for number, count in enumerate((1, 63, 65, 8193, 40_003, 600_001)):
    for kind in KINDS[number % 2 :: 2] if count < 100_000 else KINDS[:3]:
        everyone = [(torch.arange(count) % 5 + each).to(kind) for each in range(size)]
        total = sum(each.double() for each in everyone).to(kind)
        root = (number + count) % size
        mine = everyone[rank].clone()
        dist.all_reduce(mine)
        assert torch.equal(mine, total), (count, kind)
        mine = everyone[rank].clone()
        dist.reduce(mine, root)
        assert torch.equal(mine, total if rank == root else everyone[rank]), (count, kind)
        dist.broadcast(mine, root)
        assert torch.equal(mine, total), (count, kind)
        got = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(got, everyone[rank])
        assert all(map(torch.equal, got, everyone)), (count, kind)
        dist.scatter(mine, everyone if rank == root else None, root)
        assert torch.equal(mine, everyone[rank])
        got = [torch.empty_like(mine) for _ in range(size)]
        dist.gather(mine, got if rank == root else None, root)
        assert rank != root or all(map(torch.equal, got, everyone))
        dist.reduce_scatter(mine, [each.clone() for each in everyone])
        want = everyone[rank] if kind is torch.bool else (everyone[rank].double() * size).to(kind)
        assert torch.equal(mine, want), (count, kind)
        dist.all_to_all(got, everyone)
        assert all(torch.equal(each, everyone[rank]) for each in got)
        if kind.is_floating_point:
            mine = everyone[rank].clone()
            dist.all_reduce(mine, op=dist.ReduceOp.AVG)
            assert torch.equal(mine, (sum(each.float() for each in everyone) / size).to(kind)), (count, kind)
        mine = everyone[rank].clone()
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        assert torch.equal(mine, everyone[-1] if kind is not torch.bool else everyone[-1] | everyone[0])
for scale in (1, 30_000):
    sizes = [each * scale for each in range(size)]
    want = [torch.full((each,), number, dtype=torch.int16) for number, each in enumerate(sizes)]
    got = [torch.zeros_like(each) for each in want]
    dist.all_gather(got, want[rank])
    assert all(map(torch.equal, got, want)), got
import hashlib
torch.manual_seed(rank)
digests = []
for count in (50, 5000, 200_001):
    x = torch.randn(count)
    dist.all_reduce(x)
    digests.append(hashlib.sha256(bytes(x.view(torch.uint8).tolist())).hexdigest())
dist.barrier()
say(hosts=dist.group.WORLD.engine.hosts, digests=digests)
dist.destroy_process_group()
"""


def run(made: Network, source: str, layout: list[int], timeout: float = 30) -> list[Result]:
    """Run ``source`` on the hosts of ``layout``, after the ranks formed a group."""
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": str(timeout)}
    return launch(FORM + source, len(layout), env, each=made.each(layout))


@pytest.mark.parametrize(
    ("layout", "hosts"),
    [
        pytest.param([0, 0, 1, 1], [[0, 1], [2, 3]], id="2x2"),
        pytest.param([0, 1, 2, 1, 2], [[0], [1, 3], [2, 4]], id="1+2+2"),
    ],
)
def test_every_call(network: Making, layout: list[int], hosts: list[list[int]]) -> None:
    """Every kind of call is right on hosts of one size and of several, wherever ranks are; sums are the same bits."""
    results = well(run(network(len(hosts)), EVERY_CALL, layout))
    for result in results:
        assert result["hosts"] == hosts
        assert result["digests"] == results[0]["digests"]


def test_a_group_inside_one_host_has_shared_memory(network: Making) -> None:
    """Subgroups: shared memory for one on one host, Gloo for one with a rank on each host."""
    results = well(
        run(
            network(),
            """
near, far = dist.new_group([2, 3]), dist.new_group([1, 2])
found = []
for group, members in ((near, (2, 3)), (far, (1, 2))):
    if rank in members:
        x = torch.full((70_000,), float(rank))
        dist.all_reduce(x, group=group)
        assert x[0] == sum(members)
        found.append(group.engine.name)
say(found=found)
dist.destroy_process_group()
""",
            LAYOUT,
        )
    )
    assert [result["found"] for result in results] == [[], ["gloo"], ["shm", "gloo"], ["shm"]]


def test_a_host_without_memory_moves_all_ranks_to_gloo(network: Making) -> None:
    """Where one host has no memory for its segment, the ranks of all hosts agree on Gloo, and the group forms."""
    made = network()
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": "30"}
    source = """
x = torch.ones(1000)
dist.all_reduce(x)
say(engine=dist.group.WORLD.engine.name, sum=x[0].item())
dist.destroy_process_group()
"""
    each = made.each(LAYOUT, {2: {"ALLHANDS_SLOT_KIB": "1000000000"}})
    for result in well(launch(FORM + source, 4, env, each=each)):
        assert (result["engine"], result["sum"]) == ("gloo", 4.0)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_reported_on_both_hosts(network: Making, victim: int) -> None:
    """A kill -9 of a rank on either host during large reductions: survivors raise peer-lost within 2 s."""
    made = network()
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": "60"}
    source = """
x = torch.ones(3_000_000)
dist.all_reduce(x)
say(formed=True)
def spin():
    while True:
        dist.all_reduce(x.fill_(1.0))
say(outcome=attempt(spin))
"""
    with running(FORM + source, 4, env, each=made.each(LAYOUT)) as job:
        job.wait_for("formed")
        killed = job.signal(victim, signal.SIGKILL)
        results = job.results()
    for result in results:
        if result.rank != victim:
            outcome = result["outcome"]
            assert (outcome["slug"], outcome["ranks"]) == ("peer-lost", [victim]), outcome
            assert outcome["over"] - killed < TOLD_S


# Ranks 2 and 3 run as another user, who gets no descriptors of the segment, as in a container with its own users. They
# read files as root, because Python may be installed in a folder that other users cannot read.
TWO_USERS = """
import ctypes, os
if rank > 1:
    os.setresuid(65534, 65534, 0)
    ctypes.CDLL(None).setfsuid(0)
import torch
import allhands as dist
torch.set_num_threads(1)
dist.init_process_group("allhands", os.environ["METHOD"], 20, size, rank)
for count in (3, 50_000):
    x = torch.full((count,), rank + 1.0)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((count,), 10.0)), x
say(kind=dist.group.WORLD.engine.name, hosts=dist.group.WORLD.engine.hosts)
dist.destroy_process_group()
"""


def test_ranks_of_one_machine_that_share_no_memory(fork_server: None) -> None:  # noqa: ARG001  # started before all else
    """Ranks of one machine that cannot share memory count as ranks of different hosts."""
    env = {"METHOD": f"tcp://127.0.0.1:{free_port()}", "ALLHANDS_TOKEN": "between users"}
    for result in well(launch(TWO_USERS, 4, env)):
        assert (result["kind"], result["hosts"]) == ("hierarchical", [[0, 1], [2, 3]])
