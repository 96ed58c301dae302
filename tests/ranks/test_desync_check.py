"""Calls of torch's own groups on one host that differ raise on every rank; equal ones never do."""

from __future__ import annotations

import pytest

from conformance.engines import check
from conformance.test_failures import MISMATCHES
from ranks import harness, test_shm

pytestmark = pytest.mark.usefixtures("fork_server")

FORM = test_shm.FORM.replace('"allhands"', '"gloo"')


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_raises_on_every_rank(kind: str) -> None:
    """Ranks that call different things on Gloo all get collective-mismatch, with what each called and where."""
    usual, odd = MISMATCHES[kind]
    results = harness.launch(
        FORM
        + f"""
dist.barrier()
found = attempt(lambda: {odd} if rank == 2 else {usual})
if not found["kind"]:
    found = attempt(dist.barrier)
say(found=found)
""",
        3,
    )
    check(results)
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert "script.py:" in result["found"]["text"]
    assert {tuple(result["found"]["ranks"]) for result in results} == {(2,)}


def test_a_mismatch_in_a_subgroup_and_in_what_is_not_waited_for() -> None:
    """A group of new_group, and calls that are in flight: the odd rank is named by its number in the job."""
    results = harness.launch(
        FORM
        + """
sub = dist.new_group([1, 2])
dist.barrier()
if rank:
    def calls():
        works = [dist.all_reduce(torch.ones(4), group=sub, async_op=True) for _ in range(3)]
        works.append(dist.all_reduce(torch.ones(4 + rank), group=sub, async_op=True))
        for work in works:
            work.wait()
    say(found=attempt(calls))
""",
        3,
    )
    for result in results[1:]:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        assert "rank 2 called all_reduce of float32 x 6" in result["found"]["text"]


def test_the_end_of_the_group_ends_a_wait_that_gloo_does_not_wake() -> None:
    """The wait for an asynchronous call ends although all connections stay open, as when Gloo misses their end."""
    results = harness.launch(
        FORM
        + """
import pathlib, time
from allhands.groups import session
dist.barrier()
session.current().connections.close_all = lambda: 0
found = attempt(lambda: dist.all_reduce(torch.ones(6 if rank == 2 else 4), async_op=True).wait())
say(found=found)
# The kernel closes the connections of a process that exits.
folder = pathlib.Path(__file__).parent
(folder / f"done.{rank}").touch()
while len(list(folder.glob("done.*"))) < size:
    time.sleep(0.01)
""",
        3,
    )
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
        # Not at the timeout of the call, 20 s.
        assert result["found"]["seconds"] < 10, result["found"]


def test_a_process_ends_while_the_script_holds_a_group_that_gloo_does_not_wake() -> None:
    """A rank whose calls on a group never end exits all the same: the destructor of Gloo would wait for them."""
    results = harness.launch(
        FORM
        + """
import os, pathlib, select, time
from allhands.groups import session
dist.barrier()
session.current().connections.close_all = lambda: 0
held = dist.new_group([0, 1, 2])
folder = pathlib.Path(__file__).parent
(folder / f"{rank}.pid").write_text(str(os.getpid()))
if rank < 2:
    pending = [dist.all_reduce(torch.ones(4), group=held, async_op=True) for _ in range(3)]
    say(found=attempt(pending[0].wait))
else:
    # The kernel closes the connections of a process that exits, so this one outlives the others.
    while len(list(folder.glob("*.pid"))) < size:
        time.sleep(0.01)
    others = [os.pidfd_open(int((folder / f"{other}.pid").read_text())) for other in range(2)]
    found = attempt(lambda: dist.all_reduce(torch.ones(6), group=held))
    began = time.monotonic()
    for other in others:
        select.select([other], [], [], 30)
    say(found=found, waited=time.monotonic() - began)
""",
        3,
    )
    for result in results:
        assert result["found"]["slug"] == "collective-mismatch", result["found"]
    # Not until the calls time out, after 20 s.
    assert results[2]["waited"] < 10


def test_equal_calls_are_not_reported_as_different() -> None:
    """Messages of some ranks, calls past allhands on some and through it on others, objects, roots by either name."""
    results = harness.launch(
        FORM
        + """
x = torch.ones(4)
for turn in range(100):
    if turn % 3 == 0:
        # Only two of the ranks.
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
    if turn % 5 == 0:
        if rank == 2:
            torch_dist.send(x, 0)
        elif rank == 0:
            torch_dist.recv(x, 2)
    # One rank past allhands, the others through it.
    (torch_dist if rank == turn % size else dist).all_reduce(x.clone())
    (torch_dist if rank == 1 else dist).broadcast(x, 0)
    dist.broadcast(x, **({"src": 1} if rank else {"group_src": 1}))
    dist.all_gather([torch.empty(4) for _ in range(size)], x)
    boxes = [None] * size
    dist.all_gather_object(boxes, turn)
    works = [dist.all_reduce(torch.ones(turn + 1), async_op=True) for _ in range(3)]
    dist.barrier()
    for work in works:
        work.wait()
    dist.reduce(x.clone(), 2, op=dist.ReduceOp.MAX)
    dist.gather(x, [torch.empty(4) for _ in range(size)] if rank == 0 else None)
    sizes = [turn % 4 + each for each in range(size)]
    dist.all_to_all_single(torch.empty(size * sizes[rank]), torch.ones(sum(sizes)), [sizes[rank]] * size, sizes)
say(done=True)
dist.destroy_process_group()
""",
        3,
        timeout=90,
    )
    check(results)
    assert all(result["done"] for result in results)
