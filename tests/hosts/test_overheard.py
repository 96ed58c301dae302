"""torch's own groups across hosts: calls that differ are told on every rank, and what only looks odd is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from hosts.conftest import Making, Network, outcomes
from hosts.test_hosts import ENTER, PORT
from hosts.test_wide import LAYOUT, MISMATCHES
from ranks.harness import Result, launch

pytestmark = pytest.mark.hosts

# A deadline, not a figure: everyone is told about half a second after the calls.
SOON_S = 10.0

FORM = (
    ENTER
    + """
import torch.distributed as torch_dist
torch.set_num_threads(1)
dist.init_process_group("gloo", os.environ["METHOD"], float(os.environ["TIMEOUT"]), size, rank)
"""
)


def run(made: Network, source: str, timeout: float = 30, layout: list[int] = LAYOUT) -> list[Result]:
    """Run ``source`` on ranks of two hosts, after they formed a group of torch's Gloo."""
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": str(timeout)}
    return launch(FORM + source, len(layout), env, each=made.each(layout), timeout=120)


def told(found: list[dict[str, Any]], odd: int) -> None:
    """Check that all were told of the odd rank, with what it called and where."""
    assert [(outcome["slug"], outcome["ranks"]) for outcome in found] == [("collective-mismatch", [odd])] * len(found)
    assert all(f"rank {odd} called" in outcome["text"] and "script.py:" in outcome["text"] for outcome in found)


def check_mismatch(made: Network, usual: str, odd: str) -> None:
    """Check that a rank that calls something else is named on all, at the latest in their next call."""
    results = run(
        made,
        f"""
dist.barrier()
def calls():
    {odd} if rank == 3 else {usual}
    # Whoever came out of it with garbage learns of it here.
    time.sleep(2)
    dist.barrier()
say(outcome=attempt(calls))
""",
    )
    found = outcomes(results, at_most=SOON_S)
    assert len(found) == 4
    told(found, 3)


def test_a_mismatch_across_hosts(network: Making) -> None:
    """A rank on one host that calls something else: all raise collective-mismatch. The soak test has every kind."""
    check_mismatch(network(), *MISMATCHES["operation"])


# More bytes arrive than are expected, for which Gloo ends the process.
TOO_LARGE = {
    "waited for": "dist.all_reduce(torch.ones(500_000 + 100_000 * (rank == 3)))",
    "in flight": "dist.all_reduce(torch.ones(500_000 + 100_000 * (rank == 3)), async_op=True).wait()",
    "to a root": "dist.broadcast(torch.ones(5 - 2 * (rank == 3)), 0)",
}


def check_too_large(made: Network, call: str) -> None:
    """Check that the rank that gets too much raises the reason, as the others do, and ends in order."""
    results = run(
        made,
        f"""
dist.barrier()
def calls():
    {call}
    time.sleep(2)
    dist.barrier()
say(outcome=attempt(calls))
began = time.monotonic()
dist.destroy_process_group()
say(ended=time.monotonic() - began)
""",
    )
    found = outcomes(results, at_most=SOON_S)
    assert len(found) == 4
    told(found, 3)


def test_gloo_that_gives_up_ends_no_process(network: Making) -> None:
    """Gloo would abort the rank that gets more than it expects; nobody dies of it."""
    check_too_large(network(), TOO_LARGE["waited for"])


def test_garbage_of_the_last_call_is_told_at_the_end(network: Making) -> None:
    """Sums and maxima come out without a word from Gloo; the end of the group says so, with a line for each."""
    results = run(
        network(),
        """
def calls():
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)
    dist.destroy_process_group()
say(outcome=attempt(calls))
dist.destroy_process_group()
""",
    )
    found = outcomes(results, at_most=SOON_S)
    assert len(found) == 4
    told(found, 0)
    assert all("by MAX" in outcome["text"] and "by SUM" in outcome["text"] for outcome in found)
    assert all(outcome["hosts"] == ["host-a"] for outcome in found)


def check_skipped(made: Network, instead: str, slug: str, words: str) -> None:
    """Check that the rank that does something instead of a call is named with what it does and where."""
    results = run(
        made,
        f"""
dist.barrier()
def calls():
    if rank == 2:
        {instead}
    else:
        dist.all_reduce(torch.ones(10))
        dist.barrier()
say(outcome=attempt(calls))
""",
        timeout=10,
    )
    for result in results:
        outcome = result["outcome"]
        if result.rank != 2:
            assert (outcome["slug"], outcome["ranks"], outcome["hosts"]) == (slug, [2], ["host-b"]), outcome
            assert words in outcome["text"]
            assert outcome["seconds"] < 10 + SOON_S


def test_a_skipped_call_across_hosts(network: Making) -> None:
    """A rank that skips a call and makes the next is told apart at once."""
    check_skipped(network(), "dist.barrier()", "collective-mismatch", "rank 2 called barrier at script.py:")


# Everything that may look like a difference and is none.
MATCHING = """
import random, threading
same = random.Random(5)
x = torch.ones(4)
pair = dist.new_group([0, 3])
alone = [dist.new_group([each]) for each in range(size)][rank]
inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
for turn in range(int(os.environ["TURNS"])):
    group = same.choice([None, None, pair, alone, inside])
    length, root, kind = same.randrange(1, 2000), same.randrange(size), same.randrange(7)
    if group in (None, alone) or group is inside or rank in (0, 3):
        root = root if group is None else torch_dist.get_process_group_ranks(group)[0]
        members = torch_dist.get_world_size(group)
        if kind == 0:
            dist.all_reduce(torch.ones(length), group=group)
        elif kind == 1:
            dist.broadcast(torch.ones(length), root, group=group)
        elif kind == 2:
            dist.all_gather([torch.empty(length) for _ in range(members)], torch.ones(length), group=group)
        elif kind == 3:
            works = [dist.all_reduce(torch.ones(each + 1), group=group, async_op=True) for each in range(length % 40)]
            [work.wait() for work in works]
        elif kind == 4:
            dist.barrier(group=group)
        elif kind == 5:
            dist.reduce(torch.ones(length), root, group=group)
        else:
            boxes = [None] * members
            dist.all_gather_object(boxes, turn, group=group)
    # Messages of two of the ranks, and a rank that is slower than the others.
    if turn % 5 == 0 and rank in (1, 2):
        dist.send(x, 2) if rank == 1 else dist.recv(x, 1)
    if turn % 50 == rank:
        time.sleep(0.15)
    if turn % 40 == 0:
        # A call that one rank alone gets wrong, and makes again; groups that come and go.
        fresh = dist.new_group([0, 1, 2, 3])
        if rank == 1:
            try:
                dist.all_reduce("no tensor", group=fresh)
            except Exception:
                pass
        dist.all_reduce(x.clone(), group=fresh)
        dist.broadcast(x.clone(), 0, group=fresh)
        dist.destroy_process_group(fresh)
# The root of many broadcasts is far ahead of who receives them.
if rank == 3:
    time.sleep(1.5)
works = [dist.broadcast(torch.ones(4), 0, async_op=True) for _ in range(500)]
[work.wait() for work in works]
# Two threads, and calls past allhands on some ranks. Each has a group: torch counts a Gloo group's calls with no lock,
# so that two threads in one may get the same number, and wait for ever.
twins = [inside, [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]]
def each_in(group):
    for _ in range(20):
        dist.all_reduce(torch.ones(8), group=group)
threads = [threading.Thread(target=each_in, args=(group,)) for group in twins]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for turn in range(30):
    (torch_dist if rank == turn % size else dist).all_reduce(x.clone())
    (torch_dist if rank == 1 else dist).broadcast(x, 0)
    dist.barrier()
time.sleep(1.5)
dist.barrier()
say(done=True)
dist.destroy_process_group()
# The same processes form another group.
dist.init_process_group("gloo", os.environ["METHOD"], 20, size, rank)
dist.all_reduce(torch.ones(7))
dist.destroy_process_group()
"""


def check_matching(made: Network, turns: int) -> None:
    """Check that a matching program runs to its end on every rank."""
    env = {"METHOD": f"tcp://{made.hosts[0].ipv4}:{PORT}", "TIMEOUT": "60", "TURNS": str(turns)}
    for result in launch(FORM + MATCHING, 4, env, each=made.each(LAYOUT), timeout=300):
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        assert result["done"]


def test_nothing_is_taken_for_a_difference_that_is_none(network: Making) -> None:
    """Ranks ahead and behind, threads, subgroups, refused calls, torch's own calls, and a group after the group."""
    check_matching(network(), 50)
