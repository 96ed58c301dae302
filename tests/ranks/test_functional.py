"""Functional, differentiable, object and coalesced collectives on our backend, compared with Gloo."""

from __future__ import annotations

import pytest

from ranks.against_gloo import compare
from ranks.compiled import differences

pytestmark = pytest.mark.usefixtures("fork_server")

TRIALS = """import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.distributed_c10d import _coalescing_manager

def weighed(y, x):
    # The result, and the gradient of its weighted sum.
    (y * (torch.arange(y.numel()).view(y.shape) + 1 + rank)).sum().backward()
    return y, x.grad

def try_functional():
    x, group = torch.randn(4, 3) + rank, torch_dist.group.WORLD
    return [
        *[functional.all_reduce(x, op, group) for op in ("sum", "avg", "max", "min", "product")],
        functional.all_gather_tensor(x, 0, group), functional.all_gather_tensor(x, 1, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group), functional.broadcast(x, 1, group),
        functional.all_to_all_single(x, None, None, group),
        functional.all_to_all_single(x[:3], [1 + rank] * 2, [1, 2], group),
        functional.all_reduce_coalesced([x, x * 2], "sum", group),
        functional.all_gather_into_tensor_coalesced([x, x * 2], group),
        functional.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
        functional.wait_tensor(functional.all_reduce(x, "sum", group)),
    ]

def try_operators_that_come_from_compiled_code():
    x, name, ops = torch.ones(3) * rank, torch_dist.group.WORLD.group_name, torch.ops._c10d_functional
    summed = ops.wait_tensor(ops.all_reduce_(x, "sum", name))
    gathered = ops.all_gather_into_tensor_out(torch.ones(3) * rank, size, name, out=torch.empty(3 * size))
    old = torch.ones(3) * rank
    _, work = torch.ops.c10d.broadcast_([old], torch_dist.group.WORLD.boxed(), 1, 0, False, -1)
    torch_dist.Work.unbox(work).wait()
    return summed, ops.wait_tensor(gathered), old

def try_functional_with_gradients():
    group, found = torch_dist.group.WORLD, []
    for call in (
        lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
        lambda x: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], group),
    ):
        x = (torch.randn(4, 3) + rank).requires_grad_()
        found += weighed(call(x), x)
    return found

def try_differentiable():
    found = []
    for call in (
        differentiable.all_reduce,
        lambda x: torch.stack(differentiable.all_gather(x)),
        lambda x: torch.stack(differentiable.all_to_all([torch.empty(2, 3) for _ in "01"], list(x.chunk(size)))),
        lambda x: differentiable.all_to_all_single(torch.empty(4, 3), x),
        lambda x: differentiable.broadcast(x, 0),
        lambda x: differentiable.reduce_scatter(torch.empty(2, 3), list(x.chunk(size))),
        # Only the root has a result: Gloo leaves partial sums on the other ranks.
        lambda x: differentiable.reduce(x, 0) * (rank == 0),
        lambda x: torch.stack(differentiable.gather(x, 0)),
        lambda x: differentiable.scatter(list(x.chunk(size)), 0),
    ):
        x = (torch.randn(4, 3) + rank).requires_grad_()
        found += weighed(call(x), x)
    return found

def try_objects():
    box = {"rank": rank, "data": list(range(rank * 1000)), "tensor": torch.ones(3) * rank}
    found = []
    for library in (torch_dist, dist):
        everyone, some, one = [None] * size, [None] * size if rank == 0 else None, [None]
        told, got = [box, 3], [None, None]
        library.all_gather_object(everyone, box)
        library.gather_object(box, some, 0)
        library.broadcast_object_list(told, 1)
        library.scatter_object_list(one, [box, "x" * 5000] if rank == 0 else None, 0)
        if rank == 0:
            library.send_object_list([box, 7], 1)
        else:
            library.recv_object_list(got, 0)
        found += [everyone, some, one, told, got]
    return found

def try_coalesced():
    x, y = torch.randn(5) + rank, torch.randn(7) * rank
    torch_dist.all_reduce_coalesced([x, y])
    lists = [[torch.empty(5), torch.empty(7)] for _ in range(size)]
    torch_dist.all_gather_coalesced(lists, [x + rank, y])
    several = [torch.randn(3) + rank for _ in range(4)]
    with _coalescing_manager():
        torch_dist.all_reduce(several[0])
        torch_dist.all_reduce(several[1])
    with _coalescing_manager(async_ops=True) as pending:
        torch_dist.all_reduce(several[2])
        torch_dist.all_reduce(several[3])
    pending.wait()
    wide, parts = [torch.empty(3 * size) for _ in several], [torch.empty(3) for _ in several]
    with _coalescing_manager():
        for out, given in zip(wide, several):
            torch_dist.all_gather_into_tensor(out, given)
    with _coalescing_manager():
        for out, given in zip(parts, wide):
            torch_dist.reduce_scatter_tensor(out, given)
    return x, y, lists, several, wide, parts

def try_what_follows_may_wait_for_what_comes_after():
    x, y = torch.ones(3) * rank, torch.ones(4) + rank
    def follow(future):
        again = torch_dist.all_reduce(y, async_op=True).get_future().wait()
        return future.value()[0].sum() + again[0].sum()
    return torch_dist.all_reduce(x, async_op=True).get_future().then(follow).wait(), x, y

def try_futures_are_done_once_waited_for():
    done = []
    for step in range(100):
        x = torch.ones(2) * (step + rank)
        work = torch_dist.all_reduce(x, async_op=True)
        work.wait()
        future = work.get_future()
        done += [future.done(), future.value()[0].clone(), x]
    return done

def try_barriers():
    torch_dist.barrier()
    work = torch_dist.barrier(async_op=True)
    work.wait()
    # Devices are for NCCL.
    said = attempt(torch_dist.barrier, device_ids=[0])
    return said["kind"], said.get("text", ""), work.is_completed()
"""


def test_other_functions_for_a_collective_agree_with_gloo() -> None:
    """What torch offers over the plain collectives: the same values, gradients and objects, bit for bit."""
    found = compare(TRIALS, 2)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 9


def test_compiled_code_gives_what_gloo_gives() -> None:
    """Under torch.compile, collectives are part of one graph by torch's names and by ours, and DDP trains the same."""
    found = differences("aot_eager", 120)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 3
