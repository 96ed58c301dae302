"""Torch's own groups (`gloo`, `nccl`) on one host: what the ranks call through allhands is compared before it begins.

Ranks that differ would abort, hang or get garbage in those engines. What is called past allhands, by torch's own
functions, is not seen, but the group counts it: from then on nobody knows which calls belong together, and nothing is
compared any more. A false alarm would be worse than none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _torch, mismatch
from .engines import calls, shm
from .engines.fingerprint import Call
from .engines.handing import Handing
from .session import Session

__all__ = ["Overheard", "overhear"]

_KINDS = {name: kind for kind, name in enumerate(shm.KINDS)}


class _Shape(NamedTuple):
    """Where the arguments of a function are: its tensor, its reduction, and the root; -1 for none.

    Parts whose sizes may differ from rank to rank are not compared.
    """

    kind: str
    tensor: int = -1
    op: int = -1
    root: int = -1
    names: tuple[str, str] = ("src", "group_src")


_TARGET = ("dst", "group_dst")
_SHAPES = {
    "all_gather": _Shape("all_gather", 1),
    "all_gather_into_tensor": _Shape("all_gather", 1),
    "all_gather_single": _Shape("all_gather", 1),
    "all_reduce": _Shape("all_reduce", 0, op=1),
    "all_to_all": _Shape("all_to_all"),
    "all_to_all_single": _Shape("all_to_all"),
    "barrier": _Shape("barrier"),
    "broadcast": _Shape("broadcast", 0, root=1),
    "gather": _Shape("gather", 0, root=2, names=_TARGET),
    "reduce": _Shape("reduce", 0, op=2, root=1, names=_TARGET),
    "reduce_scatter": _Shape("reduce_scatter", 0, op=2),
    "reduce_scatter_single": _Shape("reduce_scatter", 0, op=2),
    "reduce_scatter_tensor": _Shape("reduce_scatter", 0, op=2),
    "scatter": _Shape("scatter", 0, root=2),
}
_TENSORS = ("tensor", "input_tensor", "output")


class Overheard:
    """The calls of one group, as this rank makes and hears of them."""

    def __init__(self, group: Any, session: Session, heard: calls.Calls) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.session = session
        self._group = group
        self._heard = heard
        self._told = 0
        # Operations of the group that were made through allhands, as the group counts them.
        self._ours = 0

    def before(self, name: str, args: tuple[Any, ...], kw: dict[str, Any], site: str) -> int:
        """Tell of a call, and return what `after` takes; raise CollectiveMismatch where another rank's is different."""
        count = _torch.sequence(self._group)
        shape = _SHAPES.get(name)
        if shape is not None and count == self._ours:
            call = self._call(shape, args, kw, site)
            self._told += 1
            judgement = self._heard.tell(call)
            if judgement is not None:
                raise mismatch.differ(self, judgement, name, site)
        return count

    def after(self, count: int) -> None:
        """Note what the group has counted for a call that began at ``count``."""
        self._ours += _torch.sequence(self._group) - count

    def _call(self, shape: _Shape, args: tuple[Any, ...], kw: dict[str, Any], site: str) -> Call:
        tensor = _argument(args, kw, shape.tensor, *_TENSORS)
        op = _argument(args, kw, shape.op, "op") if shape.op >= 0 else None
        reduction = 0 if shape.op < 0 else shm.reduction_code(op if op is not None else dist.ReduceOp.SUM)
        known: dict[str, Any] = {}
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            known = {"nbytes": tensor.nbytes, "dtype": shm.dtype_code(tensor.dtype), "shape": str(list(tensor.shape))}
        root = self._root(shape, args, kw)
        return Call(self._told, _KINDS[shape.kind], reduction=reduction, root=root, site=site, **known)

    def _root(self, shape: _Shape, args: tuple[Any, ...], kw: dict[str, Any]) -> int:
        """Return the root as a rank of the job, however it was given; -1 for none."""
        if shape.root < 0:
            return -1
        given = _argument(args, kw, shape.root, shape.names[0])
        if isinstance(given, int):
            return given
        inside = kw.get(shape.names[1])
        return self.ranks[inside] if isinstance(inside, int) and 0 <= inside < len(self.ranks) else 0


def _argument(args: tuple[Any, ...], kw: dict[str, Any], place: int, *names: str) -> Any:
    if place < 0:
        return None
    if len(args) > place:
        return args[place]
    return next((kw[name] for name in names if name in kw), None)


def overhear(session: Session, group: Any) -> None:
    """Begin to compare the calls of ``group`` where it is torch's own and on one host. Each of its ranks calls this."""
    if not session.one_host or getattr(group, "writes_notes", False) or not 1 < group.size() <= shm.MOST_RANKS:
        return
    try:
        _torch.sequence(group)
    except RuntimeError:
        return  # Some kinds of group do not count, on any rank.
    rank, numbers = group.rank(), dist.get_process_group_ranks(group)
    handing = Handing(session.store, rank, len(numbers), session.member.check)
    heard = calls.form(handing, f"calls/{group.group_name}", rank, numbers, session.timeout.total_seconds())
    session.overheard[group] = Overheard(group, session, heard)
