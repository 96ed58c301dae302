"""Types, reductions and operations: the numbers that the C core has for them, and reductions in torch by its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.distributed_c10d import ReduceOp

from .. import _core

__all__ = [
    "COMPLEX",
    "CUDA_CALL",
    "DELEGATED",
    "DTYPES",
    "LINEAR",
    "ON_BOOL",
    "OPERATIONS",
    "PREMUL_SUM",
    "REDUCTIONS",
    "REDUCTION_NAMES",
    "TORCH_DTYPES",
    "dtype_code",
    "dtype_of",
    "operation_code",
    "operation_name",
    "reduce_rows",
    "reducible",
    "reduction_code",
]

DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _core.DTYPES.items()}
TORCH_DTYPES = {code: dtype for dtype, code in DTYPES.items()}

# Types that the core compares and copies, but cannot reduce.
_FLOAT8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_NAMES = ("complex32", "complex64", "complex128", *(f"float8_{kind}" for kind in _FLOAT8))
_KNOWN = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]
_MOVED = {dtype: _core.RAW + 1 + index for index, dtype in enumerate(_KNOWN)}

# Added to the number of a real type: a complex tensor with such parts. The core reduces the parts as real numbers.
COMPLEX = _core.COMPLEX

# Each PREMUL_SUM is an object of its own, with its factor, so it is not in the table.
PREMUL_SUM = _core.REDUCTIONS["PREMUL_SUM"]
REDUCTIONS = {getattr(ReduceOp, name): code for name, code in _core.REDUCTIONS.items() if code != PREMUL_SUM}
REDUCTION_NAMES = ("", *_core.REDUCTIONS)

# Reductions that apply to the real and imaginary parts of complex numbers separately.
LINEAR = frozenset({_core.REDUCTIONS["SUM"], _core.REDUCTIONS["AVG"], PREMUL_SUM})

# Whether the core can reduce a type by a reduction, both as its numbers.
reducible = _core.reducible

OPERATIONS = ("", *_core.OPERATIONS)
# Added to an operation: compared by the engine, then performed by Gloo. No operation of the core has such a number.
DELEGATED = 64
# The operation by which ranks agree that a CUDA call follows, once before the first on a device.
CUDA_CALL = 128


def dtype_code(dtype: torch.dtype) -> int:
    """Return the core's number for ``dtype``; types without one are bytes to it."""
    return DTYPES.get(dtype) or _MOVED.get(dtype, _core.RAW)


def dtype_of(code: int) -> torch.dtype | None:
    """Return the type that `dtype_code` gave ``code`` for, None for plain bytes."""
    if code & COMPLEX:
        real = dtype_of(code & ~COMPLEX)
        return real.to_complex() if real is not None else None
    return next((dtype for dtype, known in (DTYPES | _MOVED).items() if known == code), None)


def reduction_code(op: ReduceOp | ReduceOp.RedOpType) -> int:
    """Return the core's number for ``op``, 0 where it has none."""
    for known, code in REDUCTIONS.items():
        if op == known:
            return code
    return PREMUL_SUM if op == ReduceOp.PREMUL_SUM else 0


def operation_code(name: str) -> int:
    """Return the number of an operation, 0 for an unknown one."""
    return _core.OPERATIONS.get(name, 0)


def operation_name(code: int) -> str:
    """Return the name of an operation for messages."""
    if code == CUDA_CALL:
        return "a collective of CUDA tensors"
    if DELEGATED < code < DELEGATED + len(OPERATIONS):
        return f"{OPERATIONS[code - DELEGATED]} through Gloo"
    return OPERATIONS[code] if code < len(OPERATIONS) else f"operation {code}"


# Reductions in rank order on whole tensors, with the rules of the C core (csrc/shm/reduce.c), so that the result has
# the same bits wherever it is computed: 16-bit floats are reduced in 32 bits and rounded once, integers wrap, and on
# bool sums and products are "or" and "and".

# torch implements addition and comparison of these only in part. Sums, products and bit operations have the same result
# in the signed type of that width.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

# PREMUL_SUM: each rank has multiplied its own part already.
_STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# Reductions of bool, by bit operations; others are the same.
ON_BOOL = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


def reduce_rows(rows: Sequence[torch.Tensor], reduction: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the reduction of ``rows``, one per rank and all of one type, which do not change.

    With ``out``, of their type, the result is written there; it may be one of the first two rows.
    """
    dtype, name = rows[0].dtype, REDUCTION_NAMES[reduction]
    if dtype is torch.bool:
        name = ON_BOOL.get(name, name)
    signed = _SIGNED.get(dtype, dtype)
    # As signed numbers the largest unsigned ones compare lowest, unless the top bit is flipped.
    flip = torch.iinfo(signed).min if signed is not dtype and name in {"MIN", "MAX"} else None
    step, wide = _STEPS[name], _WIDE.get(dtype, signed)
    if out is not None and signed is dtype is wide and len(rows) > 1 and name != "AVG":
        step(rows[0], rows[1], out=out)
        for row in rows[2:]:
            step(out, row, out=out)
        return out
    total = _operand(rows[0], signed, wide, flip)
    total = total.clone() if total.data_ptr() == rows[0].data_ptr() else total
    for row in rows[1:]:
        step(total, _operand(row, signed, wide, flip), out=total)
    if name == "AVG":
        total.div_(len(rows))
    if flip is not None:
        total.bitwise_xor_(flip)
    total = total.to(signed).view(dtype)
    return total if out is None else out.copy_(total)


def _operand(row: torch.Tensor, signed: torch.dtype, wide: torch.dtype, flip: int | None) -> torch.Tensor:
    row = row.view(signed).to(wide)
    return row if flip is None else row.bitwise_xor(flip)
