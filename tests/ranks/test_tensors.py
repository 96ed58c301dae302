"""Tensors of every type and layout in every collective, compared with a model."""

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

def straight(tensor, op):
    # Without torch's Python, which checks reductions of complex numbers itself; as its C++ code calls.
    options = torch_dist.AllreduceOptions()
    options.reduceOp = op
    dist.group.WORLD.allreduce([tensor], options).wait()
"""

# `view(t)` returns a tensor with the values of `t` in another layout; `fresh` one to write to, full of other values.
VIEWS = """
def transposed(t):
    return t.t().contiguous().t() if t.dim() == 2 else t.clone()

def strided(t):
    room = torch.zeros((*t.shape[:-1], t.shape[-1] * 3), dtype=t.dtype) if t.dim() else None
    if room is None:
        return t.clone()
    room[..., ::3] = t
    return room[..., ::3]

def conjugate(t):
    made = t.conj().resolve_conj().conj()
    assert made.is_conj()
    return made

def negative(t):
    made = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert made.is_neg() and torch.equal(made, t)
    return made

def one_negative(t):
    made = torch._neg_view(-t)
    assert made.is_neg() and made.is_contiguous()
    return made

def leaf(t):
    return torch.nn.Parameter(transposed(t))

def values(kind, shape, seed):
    made = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 5, shape, generator=made).float()
    if kind.is_complex:
        return torch.complex(whole, torch.randint(0, 5, shape, generator=made).float()).to(kind)
    return whole.to(kind)

def same(found, wanted):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (found.shape, wanted.shape)
    wide = torch.complex128 if found.dtype.is_complex else torch.float64
    return torch.equal(found.detach().to(wide), wanted.to(wide))

def total(everyone):
    kind = everyone[0].dtype
    wide = torch.complex128 if kind.is_complex else torch.float64
    whole = sum(each.to(wide) for each in everyone)
    return (whole != 0) if kind is torch.bool else whole.to(kind)
"""

# By torch's functions that accept lazy views, so that these reach the group unchanged.
EVERY_COLLECTIVE = """
def run(kind, shape, view, reduces, seed, lopsided):
    # Two wrongs make a right where what is given and what is written to, here and there, are views alike.
    into = torch.clone if lopsided else view
    view = torch.clone if lopsided and rank else view
    def everyone(step, many=1):
        whole = (shape[0] * many, *shape[1:]) if many > 1 else shape
        return [values(kind, whole, seed + 100 * step + each) for each in range(size)]

    def fresh(shape=shape):
        return into(values(kind, shape, 7))

    label = (kind, shape, view.__name__, into.__name__)
    root = size - 1
    each = everyone(0)
    given = view(each[rank])

    x = fresh() if rank != root else view(each[root])
    dist.broadcast(x, root)
    assert same(x, each[root]), ("broadcast", label)

    out = [fresh() for _ in range(size)]
    dist.all_gather(out, given)
    assert all(map(same, out, each)), ("all_gather", label)

    out = [fresh() for _ in range(size)] if rank == root else None
    torch_dist.gather(given, out, root)
    assert out is None or all(map(same, out, each)), ("gather", label)

    out = fresh()
    dist.scatter(out, [view(t) for t in each] if rank == root else None, root)
    assert same(out, each[rank]), ("scatter", label)

    out = [fresh() for _ in range(size)]
    dist.all_to_all(out, [view(t) for t in each])
    assert all(same(t, each[rank]) for t in out), ("all_to_all", label)

    if reduces:
        x = view(each[rank])
        dist.all_reduce(x)
        assert same(x, total(each)), ("all_reduce", label)
        xs = [view(each[rank]), view(each[rank])]
        dist.all_reduce_coalesced(xs)
        assert all(same(x, total(each)) for x in xs), ("all_reduce_coalesced", label)
        x = view(each[rank])
        torch_dist.reduce(x, root)
        assert same(x, total(each) if rank == root else each[rank]), ("reduce", label)
        out = fresh()
        torch_dist.reduce_scatter(out, [view(t) for t in each])
        assert same(out, total([each[rank]] * size)), ("reduce_scatter", label)
        if shape:
            wide = everyone(1, size)
            out = fresh()
            torch_dist.reduce_scatter_tensor(out, view(wide[rank]))
            want = total(wide)[rank * shape[0]:(rank + 1) * shape[0]]
            assert same(out, want), ("reduce_scatter_tensor", label)
    elif kind.itemsize == 1:
        for call in (lambda: dist.all_reduce(given.clone()), lambda: dist.reduce(given.clone(), 0),
                     lambda: dist.reduce_scatter(fresh(), [given] * size)):
            found = attempt(call)
            assert found["kind"] == "ArgumentError" and str(kind) in found["text"], (label, found)

    if shape:
        out = fresh((shape[0] * size, *shape[1:]))
        dist.all_gather_into_tensor(out, given)
        assert same(out, torch.cat([t.view(torch.uint8) for t in each]).view(kind)
                    if kind.itemsize == 1 else torch.cat(each)), ("all_gather_into_tensor", label)
        wide = everyone(2, size)
        out = fresh((shape[0] * size, *shape[1:]))
        dist.all_to_all_single(out, view(wide[rank]))
        raw = [t.view(torch.uint8) if kind.itemsize == 1 else t for t in wide]
        want = torch.cat([t[rank * shape[0]:(rank + 1) * shape[0]] for t in raw])
        assert same(out, want.view(kind) if kind.itemsize == 1 else want), ("all_to_all_single", label)
    assert same(given, each[rank]), ("an input was changed", label)
"""


def check(results: list[harness.Result]) -> None:
    """Fail with a rank's output if it did not end well."""
    for result in results:
        assert result.returncode == 0, f"rank {result.rank}:\n{result.stdout}\n{result.stderr}"


def test_every_type_and_layout_in_every_collective() -> None:
    """Values are right, inputs stay as they were, and float8 is moved but its reductions are refused by name."""
    results = harness.launch(
        FORM
        + VIEWS
        + EVERY_COLLECTIVE
        + """
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
KINDS = (torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.float32, torch.complex64, torch.complex128,
         torch.bfloat16, torch.bool, *BYTES)
done = 0
for kind in KINDS:
    for shape in ((4, 6), (), (0, 6)):
        # torch itself cannot put a step into a float8 tensor.
        views = [torch.clone, transposed] + ([] if kind in BYTES else [strided])
        views += [conjugate] if kind.is_complex else []
        views += [negative, one_negative, leaf] if kind is torch.float32 else []
        for view in views:
            for lopsided in (False, True):
                run(kind, shape, view, kind not in BYTES, 1000 * done, lopsided)
                done += 1
say(done=done)
""",
        2,
        timeout=90,
    )
    check(results)
    assert results[0]["done"] == results[1]["done"] > 100


def test_what_cannot_be_reduced_or_written_is_refused() -> None:
    """Products of complex numbers, results into expanded tensors and wrapped tensors are refused on all ranks.

    The group goes on afterwards. An expanded tensor may be given where it is only read.
    """
    results = harness.launch(
        FORM
        + """
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

few = torch.ones(3).expand(4, 3)
mesh = init_device_mesh("cpu", (size,))
wrapped = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
found = {
    "product": attempt(dist.all_reduce, torch.ones(3, dtype=torch.complex64), dist.ReduceOp.PRODUCT),
    "straight": attempt(straight, torch.ones(3, dtype=torch.complex64), dist.ReduceOp.PRODUCT),
    "all_reduce": attempt(dist.all_reduce, few),
    "all_gather": attempt(dist.all_gather, [few] * size, torch.ones(4, 3)),
    # Each rank names the other as the root, which only reads.
    "broadcast": attempt(dist.broadcast, few, 1 - rank),
    "dtensor": attempt(straight, wrapped, dist.ReduceOp.SUM),
    "half": attempt(dist.all_reduce, torch.ones(3), dist.ReduceOp.BAND),
}
out = [torch.empty(4, 3) for _ in range(size)]
dist.all_gather(out, few * (rank + 1))
assert [t.sum().item() for t in out] == [12.0 * (each + 1) for each in range(size)]
dist.all_gather(out, torch.tensor([[1.0], [2.0], [3.0], [4.0]]).expand(4, 3))
assert out[1].sum().item() == 30
pending = functional.all_reduce(torch.ones(3) * rank, "sum", dist.group.WORLD)
assert type(pending).__name__ == "AsyncCollectiveTensor"
torch_dist.all_reduce(pending)
assert pending.tolist() == [sum(range(size)) * size] * 3
with torch.inference_mode():
    read = torch.ones(2, 3).t()
    dist.all_reduce(read, async_op=True).wait()
assert read.sum().item() == 6 * size
say(found=found)
""",
        2,
    )
    check(results)
    for result in results:
        found = result["found"]
        assert found.pop("dtensor")["text"].startswith("a DTensor has no memory")
        kinds = {name: outcome["kind"] for name, outcome in found.items()}
        assert kinds.pop("product") == "ValueError"  # torch refuses it first
        assert set(kinds.values()) == {"ArgumentError"}, kinds


def test_premultiplied_sums() -> None:
    """Each rank's part is multiplied by its own factor, then summed; nothing that is only read changes."""
    results = harness.launch(
        FORM
        + """
premul = torch_dist._make_nccl_premul_sum
weights = [2.0 + each for each in range(size)]
factor = sum(weights)
for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
    for op in (premul(weights[rank]), premul(torch.tensor([weights[rank]])), premul(torch.tensor(weights[rank]))):
        base = torch.arange(1.0, 7.0).to(kind)
        x = base.clone()
        dist.all_reduce(x, op)
        assert torch.equal(x, base * factor), (kind, x)
        rows = base.clone().view(2, 3).t()
        dist.all_reduce(rows, op, async_op=True).wait()
        assert torch.equal(rows, (base * factor).view(2, 3).t())
        x = base.clone()
        dist.reduce(x, 1, op)
        assert torch.equal(x, base * factor if rank == 1 else base), (kind, x)
        given, out = [base.clone() for _ in range(size)], torch.empty_like(base)
        dist.reduce_scatter(out, given, op)
        assert torch.equal(out, base * factor) and all(torch.equal(t, base) for t in given)
        given, out = base.repeat(size), torch.empty_like(base)
        dist.reduce_scatter_tensor(out, given, op)
        assert torch.equal(out, base * factor) and torch.equal(given, base.repeat(size))
turn = torch.tensor(1j, dtype=torch.complex64)
found = {
    "integers": attempt(dist.all_reduce, torch.ones(3, dtype=torch.int64), premul(2.0)),
    "reduce": attempt(dist.reduce, torch.ones(3, dtype=torch.uint8), 0, premul(2.0)),
    "scatter": attempt(dist.reduce_scatter, torch.ones(3).int(), [torch.ones(3).int()] * size, premul(2.0)),
    "complex": attempt(dist.all_reduce, torch.ones(3), premul(turn)),
}
x = torch.ones(2, dtype=torch.complex64)
straight(x, premul(turn))
assert torch.equal(x, torch.full((2,), size * 1j, dtype=torch.complex64))
mixed = attempt(dist.all_reduce, torch.ones(3), premul(2.0) if rank else dist.ReduceOp.SUM)
say(found=found, mixed=mixed)
""",
        2,
    )
    check(results)
    for result in results:
        assert {name: found["kind"] for name, found in result["found"].items()} == dict.fromkeys(
            result["found"], "ArgumentError"
        )
        assert "PREMUL_SUM is not defined on torch.int64" in result["found"]["integers"]["text"]
        assert result["mixed"]["slug"] == "collective-mismatch"
        assert "PREMUL_SUM" in result["mixed"]["text"]
