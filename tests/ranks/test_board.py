"""The board: what a rank is doing and did last can be read in process, and from outside while it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from allhands.observe import flight_recorder
from ranks import harness

pytestmark = pytest.mark.usefixtures("nursery")

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's own words where it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


def test_every_way_of_calling_leaves_a_note() -> None:
    """The short way, torch's way, async operations and other backends' groups all stand on the board, in order."""
    results = harness.launch(
        FORM
        + """
dist.all_reduce(torch.ones(3, 4), op=dist.ReduceOp.MAX)
torch_dist.broadcast(torch.ones(5, dtype=torch.int64), 1)
work = dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2), async_op=True)
work.wait()
gloo = dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(7, dtype=torch.float64), group=gloo)
pending = dist.all_reduce(torch.ones(7, 2), group=gloo, async_op=True)
pending.wait()
board = dist.board()
assert (board.rank, board.world_size) == (rank, size)
found = [note for note in board.notes if note.operation != "new_group"]
say(calls=[note.call for note in found], states=[note.state for note in found], sites=[note.site for note in found],
    bytes=[note.bytes for note in found], groups=[note.group for note in found],
    sequences=[note.sequence for note in found][:3])
assert all(note.issued_s <= note.started_s <= note.ended_s for note in found)
dist.destroy_process_group()
""",
        2,
    )
    check(results)
    for result in results:
        assert result["calls"] == [
            "all_reduce MAX of float32[3, 4]",
            "broadcast of int64[5] with root 1",
            "all_gather of float32[2]",
            "all_reduce of float64[7]",
            "all_reduce of float32[7, 2]",
        ]
        assert result["states"] == ["done"] * 5
        assert len({site.partition(":")[0] for site in result["sites"]}) == 1
        assert len(set(result["sites"])) == 5
        assert result["bytes"] == [48, 40, 16, 56, 56]
        assert result["sequences"] == [0, 1, 2]
        assert len(set(result["groups"])) == 2


def test_a_stuck_rank_can_be_read_from_outside() -> None:
    """While a rank waits for one that does not come, and even while it is stopped, another process sees where."""
    results = harness.launch(
        FORM
        + """
import os, signal, time
from allhands.observe import flight_recorder as notes

if rank == 0:
    later = dist.all_reduce(torch.ones(3), async_op=True)
    dist.all_gather_into_tensor(torch.empty(8, 3), torch.ones(4, 3))
else:
    target = int(dist.distributed_c10d._get_default_store().get("pid").decode())
    deadline = time.monotonic() + 20
    states = lambda: [note.state for note in notes.read(target).under_way]
    while time.monotonic() < deadline and states() != ["running", "waiting"]:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(target, signal.SIGSTOP)
    seen = notes.read(target)
    os.kill(target, signal.SIGCONT)
    say(rank=seen.rank, calls=[note.call for note in seen.under_way], states=[note.state for note in seen.under_way],
        last=seen.last.operation, old=seen.last.age_s)
    dist.all_reduce(torch.ones(3))
    dist.all_gather_into_tensor(torch.empty(8, 3), torch.ones(4, 3))
dist.destroy_process_group()
""".replace(
            "if rank == 0:\n",
            'if rank == 0:\n    dist.distributed_c10d._get_default_store().set("pid", str(os.getpid()))\n',
        ),
        2,
    )
    check(results)
    seen = results[1]
    assert seen["rank"] == 0
    assert seen["calls"] == ["all_reduce SUM of float32[3]", "all_gather_into_tensor of float32[8, 3]"]
    assert seen["states"] == ["running", "waiting"]
    assert seen["last"] == "all_reduce"
    assert seen["old"] >= 0.2


def test_many_under_way_do_not_hide_what_hangs() -> None:
    """A call that hangs keeps its place on the board, however many others follow it in another group."""
    results = harness.launch(
        FORM
        + """
other = dist.new_group()
held = torch.ones(9)
work = dist.all_reduce(held, group=other, async_op=True) if rank == 0 else None
for _ in range(200):
    dist.all_reduce(torch.ones(2))
say(calls=[note.call for note in dist.board().under_way], notes=len(dist.board().notes))
dist.barrier()
if rank == 1:
    dist.all_reduce(held, group=other)
else:
    work.wait()
dist.destroy_process_group()
""",
        2,
    )
    check(results)
    assert results[0]["calls"] == ["all_reduce SUM of float32[9]"]
    assert results[0]["notes"] == 32


def test_a_forked_child_writes_on_a_board_of_its_own() -> None:
    """What a forked child does never shows up as its parent's doing."""
    results = harness.launch(
        FORM
        + """
import os
dist.all_reduce(torch.ones(3))
before = [note.number for note in dist.board().notes]
child = os.fork()
if child == 0:
    from allhands.observe import flight_recorder as notes
    number = notes.own().begin("all_reduce", "child", "float32", "", (1,), 4, -1, "child.py:1")
    os._exit(0 if [note.group for note in dist.board().notes] == ["child"] else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert [note.number for note in dist.board().notes] == before
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_a_process_without_a_board_is_named() -> None:
    """Asking for the board of a process that has none, or of none, says so."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            with pytest.raises(LookupError, match=f"process {other.pid} has no board"):
                flight_recorder.read(other.pid)
        finally:
            os.kill(other.pid, signal.SIGTERM)
    with pytest.raises(LookupError, match="there is no process"):
        flight_recorder.read(other.pid)
