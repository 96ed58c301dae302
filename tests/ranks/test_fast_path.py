"""The C fast path of `allhands.*` functions: used for plain tensors only, with torch's semantics."""

from __future__ import annotations

import pytest

from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

FORM = """
import torch
import torch.distributed as torch_dist
import allhands as dist

torch.set_num_threads(1)
dist.init_process_group("allhands", rank=rank, world_size=size, timeout=20)

# Torch's own methods of the group are not called on the fast path.
long = []
kind = type(dist.group.WORLD)
for name in ("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter", "alltoall",
             "all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base",
             "all_to_all_single", "alltoall_base", "barrier"):
    def spy(self, *args, _name=name, _function=getattr(kind, name), **kw):
        long.append(_name)
        return _function(self, *args, **kw)
    setattr(kind, name, spy)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's output if it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


def test_plain_tensors_take_the_fast_path() -> None:
    """Every collective on plain tensors calls the core directly, with positional or keyword arguments, in any group."""
    results = harness.launch(
        FORM
        + """
sub = dist.new_group([1, 2])   # group ranks are not global ranks
long.clear()
me = float(rank)

def all_of(group, ranks):
    n = len(ranks)
    at = ranks.index(rank)
    one = torch.tensor([me, 1.0])
    dist.all_reduce(one, dist.ReduceOp.SUM, group)
    assert one.tolist() == [sum(ranks), n], one
    for root in ranks:
        one = torch.tensor([me])
        dist.broadcast(one, root, group)
        assert one.item() == root
        one = torch.tensor([me])
        dist.broadcast(one, group_src=ranks.index(root), group=group)
        assert one.item() == root
        one = torch.tensor([me])
        dist.reduce(one, root, dist.ReduceOp.MAX, group=group)
        assert one.item() == (max(ranks) if rank == root else me)
        got = [torch.empty(1) for _ in range(n)] if rank == root else None
        dist.gather(torch.tensor([me]), got, dst=root, group=group)
        assert got is None or [each.item() for each in got] == ranks
        one = torch.empty(1)
        dist.scatter(one, [torch.tensor([float(10 * each)]) for each in ranks] if rank == root else None, root, group)
        assert one.item() == 10 * rank
    got = [torch.empty(2) for _ in range(n)]
    dist.all_gather(got, torch.tensor([me, me]), group=group)
    assert [each.tolist() for each in got] == [[each, each] for each in ranks]
    whole = torch.empty(n, 2)
    dist.all_gather_into_tensor(whole, torch.tensor([me, 0.0]), group=group)
    assert whole[:, 0].tolist() == ranks
    one = torch.empty(1)
    dist.reduce_scatter(one, [torch.tensor([me * each]) for each in ranks], group=group)
    assert one.item() == sum(ranks) * rank
    one = torch.empty(3)
    dist.reduce_scatter_tensor(one, torch.full((3 * n,), me), op=dist.ReduceOp.MIN, group=group)
    assert one.tolist() == [min(ranks)] * 3
    got = [torch.empty(1) for _ in range(n)]
    dist.all_to_all(got, [torch.tensor([me * 100 + each]) for each in ranks], group=group)
    assert [each.item() for each in got] == [100 * each + rank for each in ranks]
    whole = torch.empty(n)
    dist.all_to_all_single(whole, torch.tensor([me * 100 + each for each in ranks]), group=group)
    assert whole.tolist() == [100 * each + rank for each in ranks]
    dist.barrier(group=group)

all_of(None, list(range(size)))
if rank in (1, 2):
    all_of(sub, [1, 2])
say(long=long)
dist.destroy_process_group()
""",
        3,
    )
    check(results)
    assert [result["long"] for result in results] == [[], [], []]


def test_other_tensors_take_the_slow_path() -> None:
    """Tensors and arguments that need the slow path give the same results, or torch's own errors."""
    results = harness.launch(
        FORM
        + """
def usual(function, *names):
    long.clear()
    value = function()
    assert long == list(names), (long, names)
    return value

strided = torch.arange(8.0).view(4, 2)[:, 0]
usual(lambda: dist.all_reduce(strided), "allreduce")
assert strided.tolist() == [0, 4, 8, 12]
turned = torch.tensor([1 + 2j]).conj().imag      # one number with a sign to flip
usual(lambda: dist.all_reduce(turned), "allreduce")
assert turned.item() == -4.0, turned
wave = torch.tensor([1j, 2.0])
usual(lambda: dist.all_reduce(wave), "allreduce")
assert wave.tolist() == [2j, 4.0]

class Marked(torch.Tensor):
    pass

usual(lambda: dist.all_reduce(torch.ones(2).as_subclass(Marked)), "allreduce")
parameter = torch.nn.Parameter(torch.ones(2))
usual(lambda: dist.all_reduce(parameter))
assert parameter.tolist() == [2.0, 2.0]
work = usual(lambda: dist.all_reduce(torch.ones(2), async_op=True), "allreduce")
work.wait()
while dist.group.WORLD.segment.queued:   # the thread of the line is a moment behind
    pass
uneven = [torch.empty(3 + each) for each in range(size)]
usual(lambda: dist.all_gather(uneven, torch.ones(3 + rank)))
assert [each.tolist() for each in uneven] == [[1.0] * 3, [1.0] * 4]
for wrong in (lambda: dist.broadcast(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 7),
              lambda: dist.all_reduce("no tensor"), lambda: dist.all_reduce(), lambda: dist.all_reduce(1, 2, 3, 4, 5),
              lambda: dist.all_reduce(torch.ones(2), operation=None),
              lambda: dist.broadcast(torch.ones(2), 0, group_src=0)):
    try:
        wrong()
    except (TypeError, ValueError, RuntimeError):
        continue
    raise AssertionError("a mistake went through")
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_a_sign_is_looked_at_each_time() -> None:
    """A tensor that was plain and is a negated view of the same memory now, or the reverse, keeps its values."""
    results = harness.launch(
        FORM
        + """
def signs(tensor, plain, negated):
    for content, sign in ((plain, 1), (negated, -1), (plain, 1), (plain, 1), (negated, -1)):
        at = tensor.data_ptr()
        tensor.data = content
        assert tensor.data_ptr() == at and tensor.is_neg() is (sign < 0)
        long.clear()
        plain.fill_(1)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * sign] and plain.tolist() == [2.0], (tensor, sign)
        assert long == (["allreduce"] if sign < 0 else []), long
        plain.fill_(1)
        got = [torch.empty(1) for _ in range(size)]
        dist.all_gather(got, tensor)
        assert [each.item() for each in got] == [sign] * size, (got, sign)

for number in (torch.zeros(1, dtype=torch.complex64), torch.zeros(1, 2, dtype=torch.complex64)[:, 1]):
    signs(number.imag, number.imag, number.conj().imag)
    signs(torch.nn.Parameter(number.imag), number.imag, number.conj().imag)

# swap_tensors exchanges tensors after a call, because the call keeps no reference that forbids it.
one, other = torch.ones(1), torch.tensor([1j]).conj().imag
dist.all_reduce(one)
torch.utils.swap_tensors(one, other)
dist.all_reduce(one)
assert one.tolist() == [-2.0] and other.tolist() == [2.0], (one, other)
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_order_is_kept_with_operations_in_flight() -> None:
    """A call on the fast path runs after all earlier asynchronous calls of the same thread."""
    results = harness.launch(
        FORM
        + """
for step in range(50):
    tensor = torch.ones(20_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    dist.all_reduce(tensor)
    assert tensor[0].item() == size ** 4, (step, tensor[0])
    assert all(work.is_completed() for work in works)
dist.destroy_process_group()
""",
        2,
    )
    check(results)


def test_it_looks_like_torchs_function() -> None:
    """Name, documentation, signature and pickling are those of a function."""
    results = harness.launch(
        """
import inspect, pickle
import torch.distributed as theirs
import allhands as dist
from allhands.groups import collectives

for name in collectives.FAST_PATH:
    ours, torchs = getattr(dist, name, None), getattr(theirs, name, None)
    if torchs is None:
        continue
    assert inspect.signature(ours) == inspect.signature(torchs), name
    assert ours.__name__ == name and ours.__doc__ == torchs.__doc__
try:
    dist.all_reduce(None)
except dist.NotInitialised:
    pass
else:
    raise AssertionError
""",
        1,
    )
    check(results)
