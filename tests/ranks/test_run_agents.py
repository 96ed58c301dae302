"""Several agents of `allhands run` on one host."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from ranks import harness
from ranks.runner import TWO_GROUPS, Running, running


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_two_agents_on_one_host(host: str) -> None:
    """Two agents that are given the same coordinator make one job of both nodes' ranks, over IPv6 too."""
    if host == "[::1]" and not harness.ipv6():
        pytest.skip("there is no IPv6 here")
    port = harness.free_port()
    options = ("--nnodes", "2", "--coordinator", f"{host}:{port}")
    env = {"ALLHANDS_TOKEN": "secret"}
    with (
        running(TWO_GROUPS, *options, "--node-rank", "0", ranks=1, env=env) as first,
        running(TWO_GROUPS, *options, "--node-rank", "1", ranks=1, env=env) as second,
    ):
        one, two = first.result(), second.result()
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert (one.lines(0), two.lines(1)) == (["sum [3.0, 3.0] 2"] * 2, ["sum [3.0, 3.0] 2"] * 2)


def agents(stack: ExitStack, source: str, *options: str, nodes: int) -> list[Running]:
    """Start the agents of ``nodes`` nodes, all on this host and with one rank each."""
    line = ("--nnodes", str(nodes), "--coordinator", f"127.0.0.1:{harness.free_port()}", "--grace", "1", *options)
    env = {"ALLHANDS_TOKEN": "secret"}
    return [
        stack.enter_context(running(source, *line, "--node-rank", str(node), ranks=1, env=env)) for node in range(nodes)
    ]


def test_four_agents(tmp_path: Path) -> None:
    """Four nodes are one job: every rank has its place, and the one that fails is named on each of them."""
    source = f"""
    import os, sys, time
    print("here", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"])
    open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").close()
    while os.environ["RANK"] != "2" or len(os.listdir({str(tmp_path)!r})) < 4:
        time.sleep(0.01)
    sys.exit(7)
    """
    with ExitStack() as stack:
        ran = [job.result() for job in agents(stack, source, nodes=4)]
    assert [each.code for each in ran] == [7] * 4, "".join(each.err for each in ran)
    for node, each in enumerate(ran):
        assert each.lines(node) == [f"here {node} 4 {node}"]
        assert "allhands: rank 2 called sys.exit(7)\n  who:   rank 2 (node 2, " in each.verdict
        assert each.report == ran[0].report


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_agent(victim: int) -> None:
    """The other agent reports that it does not answer, and once a rank fails ends without it and names it."""
    source = """
    import os, pathlib, sys, time
    print("here", os.environ["RANK"], flush=True)
    while not (go := pathlib.Path("go")).exists():
        time.sleep(0.05)
    sys.exit(int(go.read_text()))
    """
    with ExitStack() as stack:
        jobs = agents(stack, source, nodes=2)
        for job in jobs:
            job.wait_for("here")
        other = jobs[1 - victim]
        jobs[victim].send(signal.SIGSTOP)
        (other.folder / "go").write_text("3")
        ran = other.result()
        # Its connection closes, so the end is noticed, and no process is left behind.
        jobs[victim].send(signal.SIGCONT)
        late = jobs[victim].result()
    assert ran.code == 1, ran.err
    assert f"allhands: node {victim} (" in ran.verdict
    assert "does not answer" in ran.verdict
    assert "inferred from silence: it may live" in ran.verdict
    assert f"waiting for node {victim} (" in ran.err
    assert "its agent has not answered for" in ran.err
    assert late.code != 0


@pytest.mark.soak
def test_agent_stopped_for_a_while() -> None:
    """Where nothing failed, the silent agent is named, and the job succeeds once it continues."""
    source = """
    import os, pathlib, time
    print("here", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    """
    with ExitStack() as stack:
        jobs = agents(stack, source, nodes=2)
        for job in jobs:
            job.wait_for("here")
        jobs[1].send(signal.SIGSTOP)
        for job in jobs:
            (job.folder / "go").touch()
        jobs[0].wait_for("its agent has not answered for")
        jobs[1].send(signal.SIGCONT)
        assert [job.result().code for job in jobs] == [0, 0]
