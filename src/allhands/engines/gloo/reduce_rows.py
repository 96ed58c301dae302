"""Reductions in rank order on whole tensors, for those who hold everyone's data: the same bits wherever it is done.

The rules are those of the C core (`csrc/reduce.c`): 16-bit floats are reduced in 32 bits and rounded once, integers
wrap, and on bool sums and products are "or" and "and".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..shm.engine import REDUCTION_NAMES

__all__ = ["fold"]

# torch adds and compares these only in part. Sums, products and bits are the same in the signed type of that width.
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
_ON_BOOL = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


def fold(rows: Sequence[torch.Tensor], reduction: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows, one for each rank and all of one type, reduced; none of them is changed.

    With ``out``, of their type, the result is written there; it may be one of the first two rows.
    """
    kind, name = rows[0].dtype, REDUCTION_NAMES[reduction]
    if kind is torch.bool:
        name = _ON_BOOL.get(name, name)
    work = _SIGNED.get(kind, kind)
    # In the signed type the largest numbers come out lowest, unless the top bit is turned over.
    turn = torch.iinfo(work).min if work is not kind and name in {"MIN", "MAX"} else None
    step, wide = _STEPS[name], _WIDE.get(kind, work)
    if out is not None and work is kind is wide and len(rows) > 1 and name != "AVG":
        step(rows[0], rows[1], out=out)
        for row in rows[2:]:
            step(out, row, out=out)
        return out
    total = _as(rows[0], work, wide, turn)
    total = total.clone() if total.data_ptr() == rows[0].data_ptr() else total
    for row in rows[1:]:
        step(total, _as(row, work, wide, turn), out=total)
    if name == "AVG":
        total.div_(len(rows))
    if turn is not None:
        total.bitwise_xor_(turn)
    total = total.to(work).view(kind)
    return total if out is None else out.copy_(total)


def _as(row: torch.Tensor, work: torch.dtype, wide: torch.dtype, turn: int | None) -> torch.Tensor:
    row = row.view(work).to(wide)
    return row if turn is None else row.bitwise_xor(turn)
