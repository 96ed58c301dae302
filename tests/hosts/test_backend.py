"""The backend `allhands` across hosts: right results, the same checks as on one host, and no hangs."""

from __future__ import annotations

import signal

import pytest

from hosts.conftest import Making, Network, outcomes
from hosts.test_hosts import ENTER, PORT
from ranks.harness import Result, launch, running

pytestmark = pytest.mark.hosts

LAYOUT = [0, 0, 1, 1]
HOSTS = ["host-a", "host-a", "host-b", "host-b"]

# Deadlines, an order of magnitude above the times on an idle machine.
AT_ONCE_S = 5.0

FORM = (
    ENTER
    + """
torch.set_num_threads(1)
dist.init_process_group("allhands", os.environ["METHOD"], float(os.environ["TIMEOUT"]), size, rank)
"""
)


def run(made: Network, source: str, timeout: float = 30) -> list[Result]:
    """Run ``source`` on two ranks of each of two hosts, after they formed a group."""
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": str(timeout)}
    return launch(FORM + source, 4, env, each=made.each(LAYOUT))


def test_collectives_across_hosts(network: Making) -> None:
    """Every kind of collective is right on four ranks on two hosts, small and large."""
    results = run(
        network(),
        """
assert dist.group.WORLD.engine.name == "hierarchical"
for count in (1, 7, 5000, 300_001):
    for kind in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
        everyone = [(torch.arange(count) % 5 + each).to(kind) for each in range(size)]
        total = sum(each.double() for each in everyone).to(kind)
        mine = everyone[rank].clone()
        dist.all_reduce(mine)
        assert torch.equal(mine, total), (count, kind)
        mine = everyone[rank].clone()
        dist.reduce(mine, 3)
        assert torch.equal(mine, total if rank == 3 else everyone[rank])
        dist.broadcast(mine, 1)
        assert torch.equal(mine, everyone[1])
        got = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(got, everyone[rank])
        assert all(map(torch.equal, got, everyone))
        dist.scatter(mine, everyone if rank == 2 else None, 2)
        assert torch.equal(mine, everyone[rank])
        dist.gather(mine, got if rank == 0 else None, 0)
        assert all(map(torch.equal, got, everyone))
        dist.reduce_scatter(mine, [each.clone() for each in everyone])
        assert torch.equal(mine, (everyone[rank].double() * size).to(kind))
        dist.all_to_all(got, everyone)
        assert all(torch.equal(each, everyone[rank]) for each in got)
dist.barrier()
pair = dist.new_group([1, 2])
if rank in (1, 2):
    x = torch.ones(1000)
    dist.all_reduce(x, group=pair)
    assert x[0] == 2
boxes = [None] * size
dist.all_gather_object(boxes, socket.gethostname())
if rank == 0:
    dist.send(torch.ones(3), 3)
if rank == 3:
    x = torch.zeros(3)
    dist.recv(x, 0)
    assert x.tolist() == [1, 1, 1]
say(boxes=boxes)
dist.destroy_process_group()
""",
    )
    for result in results:
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        assert result["boxes"] == HOSTS


MISMATCHES = {
    "operation": ("dist.all_reduce(torch.ones(4))", "dist.broadcast(torch.ones(4), 0)"),
    "count": ("dist.all_reduce(torch.ones(5))", "dist.all_reduce(torch.ones(6))"),
    "type": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4, dtype=torch.int32))"),
    "root": ("dist.broadcast(torch.ones(4), 0)", "dist.broadcast(torch.ones(4), 1)"),
    "reduction": ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_across_hosts(network: Making, kind: str) -> None:
    """A different call of a rank on one host: all four raise collective-mismatch with its rank and line."""
    usual, odd = MISMATCHES[kind]
    results = run(network(), f"say(outcome=attempt(lambda: {odd} if rank == 3 else {usual}))")
    found = outcomes(results, at_most=AT_ONCE_S)
    assert [(outcome["slug"], outcome["ranks"]) for outcome in found] == [("collective-mismatch", [3])] * 4
    assert all("rank 3 called" in outcome["text"] and "script.py:" in outcome["text"] for outcome in found)


def test_a_killed_rank_across_hosts(network: Making) -> None:
    """A kill -9 of a rank amid large reductions: the other three raise peer-lost with its host, promptly."""
    made = network()
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": "60"}
    source = """
x = torch.ones(200_000)
dist.all_reduce(x)
say(formed=True)
def spin():
    while True:
        dist.all_reduce(x)
say(outcome=attempt(spin))
"""
    with running(FORM + source, 4, env, each=made.each(LAYOUT)) as job:
        job.wait_for("formed")
        killed = job.signal(2, signal.SIGKILL)
        results = job.results()
    assert results[2].returncode == -signal.SIGKILL
    for result in results:
        if result.rank != 2:
            outcome = result["outcome"]
            assert (outcome["slug"], outcome["ranks"], outcome["hosts"]) == ("peer-lost", [2], ["host-b"])
            assert outcome["over"] - killed < AT_ONCE_S


def test_a_skipped_call_across_hosts(network: Making) -> None:
    """At the deadline the missing rank is named with its host and its current line."""
    results = run(
        network(),
        """
import datetime
dist.group.WORLD.set_timeout(datetime.timedelta(seconds=3))
dist.barrier()
if rank == 2:
    while not all(os.path.exists(f"{os.environ['GATES']}/told.{each}") for each in (0, 1, 3)):
        time.sleep(0.05)
else:
    say(outcome=attempt(lambda: dist.all_reduce(torch.ones(10))))
    gate("told", 3)
""",
    )
    found = [result["outcome"] for result in results if result.rank != 2]
    for outcome in found:
        assert (outcome["slug"], outcome["ranks"], outcome["hosts"]) == ("collective-timeout", [2], ["host-b"])
        assert "rank 2 is at script.py:" in outcome["text"]
        assert outcome["seconds"] < 3 + AT_ONCE_S
