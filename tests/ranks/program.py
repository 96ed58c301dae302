"""One random program of collectives as a rank runs it: every operation, and a model computed from all ranks' data.

Imported by ranks and tests; a program is plain data, so that it goes to the ranks as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["DTYPES", "GROUPS", "LAYOUTS", "NAMES", "REDUCTIONS", "Op", "perform", "supported"]

NAMES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
# Bytes that are only moved.
RAW = ("float8_e4m3fn",)
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, *RAW, "bool")
LAYOUTS = ("contiguous", "transposed", "strided")

# Members of the groups of three ranks; any two overlap.
GROUPS = ((0, 1, 2), (0, 1), (1, 2), (0, 2), (2,))


class Op(NamedTuple):
    """One operation of one group. ``hold`` operations later it is waited for, where it is asynchronous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    group: int
    root: int
    reduction: str
    later: bool
    hold: int
    seed: int


def supported(dtype: str, reduction: str) -> bool:
    """Tell whether ``dtype`` has ``reduction``."""
    if dtype in RAW:
        return False
    if dtype in COMPLEX:
        return reduction in {"SUM", "AVG"}
    if dtype in FLOATS:
        return reduction not in {"BAND", "BOR", "BXOR"}
    return reduction != "AVG"


# The model ------------------------------------------------------------------------------------------------------


def _values(op: Op, source: int, to: int, count: int) -> Any:
    """Return the data of ``source`` for ``to``; small whole floats, whose sums are exact in any order."""
    made = np.random.default_rng((op.seed, source, to))
    if op.dtype in INTEGERS:
        limits = np.iinfo(op.dtype)
        return made.integers(limits.min, limits.max, count, dtype=op.dtype, endpoint=True)
    if op.dtype == "bool":
        return made.integers(0, 2, count).astype(bool)
    if op.dtype in COMPLEX:
        return (made.integers(0, 4, count) + 1j * made.integers(0, 4, count)).astype(op.dtype)
    return made.integers(0, 4, count).astype("float64" if op.dtype == "float64" else "float32")


FOLDS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def _reduced(op: Op, everyone: list[Any]) -> Any:
    fold = FOLDS[op.reduction]
    if op.dtype == "bool":
        fold = {"SUM": np.logical_or, "PRODUCT": np.logical_and}.get(op.reduction, fold)
    total = everyone[0]
    for other in everyone[1:]:
        total = fold(total, other)
    if op.reduction == "AVG":
        # Real and imaginary parts by themselves: a division by a complex number rounds otherwise.
        parts = total.view(total.real.dtype)
        total = (parts / parts.dtype.type(len(everyone))).view(total.dtype)
    return total


# Tensors --------------------------------------------------------------------------------------------------------


def _tensor(op: Op, numbers: Any) -> torch.Tensor:
    """Return ``numbers`` as a tensor of the operation's type and layout, with its shape repeated along the first."""
    flat = torch.from_numpy(np.ascontiguousarray(numbers)).to(getattr(torch, op.dtype))
    each = int(np.prod(op.shape))
    if not op.shape and flat.numel() == 1:
        plain = flat.reshape(())
    elif op.shape and each and flat.numel() != each:
        plain = flat.reshape(flat.numel() // each * op.shape[0], *op.shape[1:])
    elif flat.numel() == each:
        plain = flat.reshape(op.shape)
    else:
        plain = flat
    if op.layout == "transposed" and plain.dim() > 1:
        strides = tuple(reversed(_strides(tuple(reversed(plain.shape)))))
        turned = torch.empty_strided(plain.shape, strides, dtype=flat.dtype)
        return turned.copy_(plain)
    if op.layout == "strided" and plain.dim():
        wide = torch.zeros(*plain.shape[:-1], plain.shape[-1] * 2, dtype=flat.dtype)
        return wide[..., ::2].copy_(plain)
    return plain


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(1, length)
    return strides


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in their order, bit for bit (-0.0 is not 0.0)."""
    # A clone: one element counts as contiguous whatever its stride.
    plain = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


class _Issued(NamedTuple):
    work: Any
    got: list[torch.Tensor]
    want: list[torch.Tensor]
    due: int
    number: int


def perform(program: list[Op], library: Any, groups: list[Any], rank: int) -> list[str]:
    """Run ``program`` as ``rank``; return descriptions of the differences from the model."""
    flying: list[_Issued] = []
    wrong: list[str] = []

    def settle(now: int | None) -> None:
        for issued in list(flying):
            if now is not None and issued.due > now:
                continue
            flying.remove(issued)
            if issued.work is not None:
                issued.work.wait()
            for index, (want, got) in enumerate(zip(issued.want, issued.got, strict=True)):
                if _bytes(want) != _bytes(got):
                    first = f"{want.flatten()[:8]}, not {got.flatten()[:8]}"
                    wrong.append(f"operation {issued.number} {program[issued.number]}, tensor {index}: {first}")

    for number, op in enumerate(program):
        members = GROUPS[op.group]
        if rank in members:
            issued = _issue(op, library, groups[op.group], members.index(rank), len(members))
            flying.append(_Issued(*issued, number + op.hold if op.later else number, number))
        settle(number)
    settle(None)
    return wrong


def _issue(op: Op, library: Any, group: Any, rank: int, size: int) -> tuple[Any, list[Any], list[Any]]:
    """Make the call; return its work (None if complete), its outputs, and the expected values."""
    count, root = int(np.prod(op.shape)), op.root % size
    how: dict[str, Any] = {"group": group, "async_op": op.later}
    reduction: dict[str, Any] = {"op": getattr(library.ReduceOp, op.reduction)}
    call = getattr(library, op.name)

    def has(source: int, to: int) -> Any:
        return _values(op, source, to, count)

    def tensor(numbers: Any) -> torch.Tensor:
        return _tensor(op, numbers)

    def empty(number: int = 1) -> torch.Tensor:
        return tensor(np.ones(count * number, "float32"))

    def total(to: int) -> Any:
        return _reduced(op, [has(source, to) for source in range(size)])

    everyone = range(size)
    one = tensor(has(rank, 0))
    match op.name:
        case "all_reduce":
            return call(one, **reduction, **how), [one], [tensor(total(0))]
        case "reduce":
            want = tensor(total(0) if rank == root else has(rank, 0))
            return call(one, group_dst=root, **reduction, **how), [one], [want]
        case "broadcast":
            return call(one, group_src=root, **how), [one], [tensor(has(root, 0))]
        case "all_gather":
            several = [empty() for _ in everyone]
            return call(several, one, **how), several, [tensor(has(each, 0)) for each in everyone]
        case "all_gather_into_tensor":
            whole = empty(size)
            want = tensor(np.concatenate([has(each, 0) for each in everyone]))
            return call(whole, one, **how), [whole], [want]
        case "gather":
            several = [empty() for _ in everyone] if rank == root else []
            work = call(one, several if rank == root else None, group_dst=root, **how)
            return work, several, [tensor(has(each, 0)) for each in everyone] if rank == root else []
        case "scatter":
            taken, several = empty(), [tensor(has(rank, to)) for to in everyone]
            work = call(taken, several if rank == root else None, group_src=root, **how)
            return work, [taken], [tensor(has(root, rank))]
        case "reduce_scatter":
            taken, several = empty(), [tensor(has(rank, to)) for to in everyone]
            return call(taken, several, **reduction, **how), [taken], [tensor(total(rank))]
        case "reduce_scatter_tensor":
            taken, whole = empty(), tensor(np.concatenate([has(rank, to) for to in everyone]))
            return call(taken, whole, **reduction, **how), [taken], [tensor(total(rank))]
        case "all_to_all":
            taken_list, several = [empty() for _ in everyone], [tensor(has(rank, to)) for to in everyone]
            return call(taken_list, several, **how), taken_list, [tensor(has(each, rank)) for each in everyone]
        case "all_to_all_single":
            return _all_to_all_single(op, call, how, rank, size)
    return call(**how), [], []


def _all_to_all_single(
    op: Op, call: Callable[..., Any], how: dict[str, Any], rank: int, size: int
) -> tuple[Any, list[Any], list[Any]]:
    """As `_issue`: rows of two elements, with a different number of rows for each pair of ranks."""
    made = np.random.default_rng(op.seed)
    rows = made.integers(0, 1 + min(4096, max(0, *op.shape, 3)), (size, size)).tolist()
    pair = op._replace(shape=(1, 2))

    def block(source: int, to: int) -> Any:
        return _values(op, source, to, 2 * rows[source][to])

    def tensor(numbers: Any) -> torch.Tensor:
        flat = torch.from_numpy(np.ascontiguousarray(numbers)).to(getattr(torch, op.dtype)).reshape(-1, 2)
        return _tensor(pair, numbers) if flat.shape[0] else flat

    come = [rows[each][rank] for each in range(size)]
    given = tensor(np.concatenate([block(rank, to) for to in range(size)]))
    taken = tensor(np.ones(2 * sum(come), "float32"))
    want = tensor(np.concatenate([block(each, rank) for each in range(size)]))
    return call(taken, given, come, rows[rank], **how), [taken], [want]
