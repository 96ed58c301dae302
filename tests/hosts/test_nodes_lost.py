"""`allhands run` on several nodes: the verdict and the remaining processes when one of them fails."""

from __future__ import annotations

import signal
import textwrap
import time
from pathlib import Path

import pytest

import leaks
from hosts.agents import ENTERING, PORT, TRAINS, WAITS, agents, pids, results
from hosts.conftest import Making
from ranks.runner import running

pytestmark = pytest.mark.hosts

# Failures --------------------------------------------------------------------------------------------------------


def test_verdict_on_all_nodes(network: Making, tmp_path: Path) -> None:
    """A rank of node 1 is killed, restarted with all others, and exits with 7: both agents name it and exit alike."""
    made = network()
    # Rank 3 fails once all have printed, and in attempt 0 once the test has their pids.
    fails = f"""
    first = os.environ['ALLHANDS_RESTART'] == '0'
    here = {str(tmp_path)!r} + '/here-' + os.environ['ALLHANDS_RESTART'] + '-'
    open(here + os.environ['RANK'], 'w').close()
    if os.environ['RANK'] == '3':
        while not all(os.path.exists(here + name) for name in ('0', '1', '2', *(['counted'] if first else []))):
            time.sleep(0.01)
        os.kill(os.getpid(), 9) if first else sys.exit(7)
    time.sleep(600)
    """
    source = textwrap.dedent(WAITS).replace("time.sleep(600)", textwrap.dedent(fails))
    options = ("--grace", "2", "--max-restarts", "3", "--restart-if", "signal,lost")
    with agents(made, source, *options) as jobs:
        workers = [pid for job in jobs for pid in pids(job, 2)]
        (tmp_path / "here-0-counted").touch()
        first, second = results(jobs)
    assert (first.code, second.code) == (7, 7), first.err + second.err
    for ran in (first, second):
        assert "allhands: rank 3 called sys.exit(7)\n  who:   rank 3 (node 1, host-b, pid " in ran.verdict
        assert "restart 1 of 3" in ran.err
    assert "after: ranks 0-2: ended by allhands (SIGTERM)" in first.verdict
    assert sorted(first.lines(1) + second.lines(2)) == ["here 1 4 0", "here 1 4 1", "here 2 4 0", "here 2 4 1"]
    assert len(workers) == 4
    assert not any(leaks.alive(pid) for pid in workers)
    assert (first.report["attempt"], first.report["ranks"][3]["exit_code"]) == (1, 7)
    assert [rank["host"] for rank in first.report["ranks"]] == ["host-a", "host-a", "host-b", "host-b"]
    assert first.report == second.report


def test_ctrl_c_on_one_node(network: Making) -> None:
    """SIGINT to the agent of node 1 ends the job on both nodes, and both verdicts name node 1."""
    made = network()
    with agents(made, WAITS) as jobs:
        workers = [pid for job in jobs for pid in pids(job, 2)]
        jobs[1].send(signal.SIGINT)
        first, second = results(jobs)
    assert (first.code, second.code) == (130, 130), first.err + second.err
    for ran in (first, second):
        assert "the job was stopped by Ctrl-C or SIGINT on node 1 (host-b)" in ran.verdict
    assert "node 1 (host-b) was asked to stop: ending the job" in first.err
    assert not any(leaks.alive(pid) for pid in workers)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_killed_agent(network: Making, victim: int) -> None:
    """After kill -9 of one agent, the other names the node with host, address and reason; no worker survives."""
    made = network()
    with agents(made, WAITS, "--grace", "2") as jobs:
        workers = [pid for job in jobs for pid in pids(job, 2)]
        jobs[victim].send(signal.SIGKILL)
        other = results(jobs)[1 - victim]
        host = made.hosts[victim]
        lost = f"allhands: node {victim} ({host.name}, {host.ipv4}) was lost, and ranks "
        assert lost in other.verdict
        assert "connection" in other.verdict
        assert "(observed)" in other.verdict
        assert other.code == 1
        assert other.report["cause"] == "lost"
        deadline = time.monotonic() + 10
        while any(leaks.alive(pid) for pid in workers):
            assert time.monotonic() < deadline, "workers survive their agent"
            time.sleep(0.05)


@pytest.mark.soak
def test_link_down(network: Making) -> None:
    """When the link of node 1 goes down, both sides end their ranks and report the loss of the other."""
    made = network()
    source = TRAINS.replace("range(40)", "range(10**9)").replace("loss.backward()", "loss.backward(); print('here')")
    with agents(made, source, "--grace", "3") as jobs:
        for job in jobs:
            job.wait_for("here", 20)
        made.hosts[1].link("down")
        first, second = results(jobs)
    assert (first.code, second.code) == (1, 1), first.err + second.err
    assert f"allhands: node 1 (host-b, {made.hosts[1].ipv4}) was lost, and ranks 2 and 3 with it" in first.verdict
    assert f"allhands: node 0 (host-a, {made.hosts[0].ipv4}) was lost" in second.verdict
    assert "this node ended its ranks" in second.verdict
    assert max(first.seconds, second.seconds) < 60


# Restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_restarts(network: Making) -> None:
    """All nodes restart together with the same attempt number, whichever rank failed."""
    made = network()
    source = WAITS.replace(
        "time.sleep(600)",
        "n = os.environ['ALLHANDS_RESTART']\nif n == '2': sys.exit(0)\n"
        "if os.environ['RANK'] == n: os.kill(os.getpid(), 9)\ntime.sleep(600)",
    )
    options = ("--max-restarts", "2", "--restart-if", "signal", "--grace", "2")
    with agents(made, source, *options, ranks=(1, 1)) as jobs:
        first, second = results(jobs)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.lines(0) == [f"here 0 2 {number}" for number in range(3)]
    assert second.lines(1) == [f"here 1 2 {number}" for number in range(3)]
    for ran in (first, second):
        assert "restart 1 of 2" in ran.err
        assert "restart 2 of 2" in ran.err


@pytest.mark.soak
def test_lost_node_rejoins(network: Making) -> None:
    """With restarts left, node 0 waits for a lost node: the job continues once its agent is started again."""
    made = network()
    source = WAITS.replace("time.sleep(600)", "n = os.environ['ALLHANDS_RESTART']\nif n == '0': time.sleep(600)")
    options = ("--max-restarts", "1", "--restart-if", "lost", "--grace", "2")
    with agents(made, source, *options) as jobs:
        pids(jobs[1], 2)
        jobs[1].send(signal.SIGKILL)
        jobs[0].wait_for("the job goes on once the agent there is started again")
        line = ("--nnodes", "2", "--coordinator", f"{made.hosts[0].ipv4}:{PORT}", "--node-rank", "1", *options)
        with running(source, *line, env=made.hosts[1].environment(), before=ENTERING) as back:
            first, again = jobs[0].result(), back.result()
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert "here 0 4 1" in first.out
    assert "here 2 4 1" in again.out


@pytest.mark.soak
def test_stall_across_nodes(network: Making) -> None:
    """When rank 3 does not reach a collective, node 0 reports it, with the stacks of all ranks of all nodes."""
    made = network()
    source = """
    import os, time, torch, allhands as dist
    dist.init_process_group()
    dist.all_reduce(torch.ones(1))
    def somewhere_else():
        time.sleep(600)
    if dist.get_rank() == 3:
        somewhere_else()
    dist.all_reduce(torch.ones(1))
    """
    with agents(made, source, "--hang-timeout", "3", "--grace", "2") as jobs:
        first, second = results(jobs)
    assert (first.code, second.code) == (124, 124), first.err + second.err
    assert "the others wait for rank 3" in first.verdict
    assert "the others wait for rank 3" in second.verdict
    assert "somewhere_else" in first.verdict
    assert sorted(first.report["stacks"]) == ["0", "1", "2", "3"]
