"""The flight recorder of a rank can be read in process, and from outside while the rank hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from allhands.observe import flight_recorder
from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's output if it exited with an error."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


def test_every_call_is_recorded() -> None:
    """The fast path, calls through torch, asynchronous calls and other backends' groups are recorded, in order."""
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
found = [entry for entry in board.entries if entry.operation != "new_group"]
say(calls=[entry.call for entry in found], states=[entry.state for entry in found],
    sites=[entry.site for entry in found], bytes=[entry.bytes for entry in found],
    groups=[entry.group for entry in found], sequences=[entry.sequence for entry in found][:3])
assert all(entry.issued_s <= entry.started_s <= entry.ended_s for entry in found)
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


def test_stalled_rank_can_be_read_from_outside() -> None:
    """Another process can read the calls of a rank that waits for a peer, even while that rank is stopped."""
    results = harness.launch(
        FORM
        + """
import os, signal, time
from allhands.observe import flight_recorder

if rank == 0:
    later = dist.all_reduce(torch.ones(3), async_op=True)
    dist.all_gather_into_tensor(torch.empty(8, 3), torch.ones(4, 3))
else:
    target = int(dist.distributed_c10d._get_default_store().get("pid").decode())
    deadline = time.monotonic() + 20
    states = lambda: [entry.state for entry in flight_recorder.read(target).under_way]
    while time.monotonic() < deadline and states() != ["running", "waiting"]:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(target, signal.SIGSTOP)
    seen = flight_recorder.read(target)
    os.kill(target, signal.SIGCONT)
    under_way = seen.under_way
    say(rank=seen.rank, calls=[entry.call for entry in under_way], states=[entry.state for entry in under_way],
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


def test_later_calls_do_not_overwrite_a_stalled_one() -> None:
    """A stalled call keeps its entry, however many calls of another group follow it."""
    results = harness.launch(
        FORM
        + """
other = dist.new_group()
held = torch.ones(9)
work = dist.all_reduce(held, group=other, async_op=True) if rank == 0 else None
for _ in range(200):
    dist.all_reduce(torch.ones(2))
say(calls=[entry.call for entry in dist.board().under_way], entries=len(dist.board().entries))
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
    assert results[0]["entries"] == 32


def test_forked_child_has_its_own_recorder() -> None:
    """Calls of a forked child are not recorded as its parent's."""
    results = harness.launch(
        FORM
        + """
import os
dist.all_reduce(torch.ones(3))
before = [entry.number for entry in dist.board().entries]
child = os.fork()
if child == 0:
    from allhands.observe import flight_recorder
    number = flight_recorder.own().begin("all_reduce", "child", "float32", "", (1,), 4, -1, "child.py:1")
    os._exit(0 if [entry.group for entry in dist.board().entries] == ["child"] else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert [entry.number for entry in dist.board().entries] == before
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_process_without_a_recorder() -> None:
    """Reading a process that has no flight recorder, or does not exist, raises LookupError with the reason."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            with pytest.raises(LookupError, match=f"process {other.pid} has no flight recorder"):
                flight_recorder.read(other.pid)
        finally:
            os.kill(other.pid, signal.SIGTERM)
    with pytest.raises(LookupError, match="there is no process"):
        flight_recorder.read(other.pid)
