"""Torch's own groups (`gloo`, `nccl`): what the ranks call through allhands is compared.

Ranks that differ would abort, hang or get garbage in those engines. On one host they see each other's calls in shared
memory, before the call begins; between hosts each tells the coordinator. What is called past allhands, by torch's own
functions, is not seen, but the group counts it: from then on nobody knows which calls belong together, and nothing is
compared any more. A false alarm would be worse than none.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .. import _torch
from ..control.desync import Known, Tally
from ..diagnosis import ranks as named
from ..diagnosis.sides import Judgement
from ..engines import call_ring
from ..engines.fingerprint import HEAD_BYTES, SEQUENCE, Call
from ..engines.shm import engine as shm
from ..engines.shm.fd_passing import Handing
from . import failure
from .session import Session

__all__ = ["Afar", "Overheard", "forget", "overhear"]

_KINDS = {name: kind for kind, name in enumerate(shm.KINDS)}

# Kinds of calls that a rank remembers the words of. A program has as many as it has lines and shapes.
_MOST_KNOWN = 1024


class _Shape(NamedTuple):
    """Where the arguments of a function are: its tensor, its reduction, the root, its list of parts; -1 for none.

    Parts whose sizes may differ from rank to rank are not compared.
    """

    kind: str
    tensor: int = -1
    op: int = -1
    root: int = -1
    names: tuple[str, str] = ("src", "group_src")
    parts: int = -1


_TARGET = ("dst", "group_dst")
_SHAPES = {
    "all_gather": _Shape("all_gather", 1, parts=0),
    "all_gather_into_tensor": _Shape("all_gather", 1),
    "all_gather_single": _Shape("all_gather", 1),
    "all_reduce": _Shape("all_reduce", 0, op=1),
    "all_to_all": _Shape("all_to_all"),
    "all_to_all_single": _Shape("all_to_all"),
    "barrier": _Shape("barrier"),
    "broadcast": _Shape("broadcast", 0, root=1),
    "gather": _Shape("gather", 0, root=2, names=_TARGET),
    "reduce": _Shape("reduce", 0, op=2, root=1, names=_TARGET),
    "reduce_scatter": _Shape("reduce_scatter", 0, op=2, parts=1),
    "reduce_scatter_single": _Shape("reduce_scatter", 0, op=2),
    "reduce_scatter_tensor": _Shape("reduce_scatter", 0, op=2),
    "scatter": _Shape("scatter", 0, root=2),
}
_TENSORS = ("tensor", "input_tensor", "output")
_PARTS = ("tensor_list", "input_list")


class _Ear(Protocol):
    """Where calls are told: on one host `calls.Calls`, else `Afar`."""

    def tell(self, call: Call) -> Judgement | None: ...

    def withdraw(self) -> None: ...


class Afar:
    """Calls of a group whose ranks are on several hosts: the coordinator compares them, a moment later."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._known: dict[tuple[object, ...], Known] = {}

    def tell(self, call: Call) -> None:
        """Tell of a call. Costs a microsecond; whoever differs hears of it as of any end of the group."""
        # Everything but the number, which the tally counts itself.
        key = (call.kind, call.nbytes, call.reduction, call.dtype, call.root, call.uneven, call.shape, call.site)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = Known(_code(call), call.words())
        self.tally.add(known)

    def withdraw(self) -> None:
        """Say that the last call was not made after all."""
        self.tally.give_up()


def _code(call: Call) -> int:
    """Return a number of 64 bits for what must be the same on every rank, the same in every process."""
    head = call.pack()[SEQUENCE.size : HEAD_BYTES]
    return int.from_bytes(hashlib.blake2b(head, digest_size=8).digest())


class Overheard:
    """The calls of one group, as this rank makes and hears of them."""

    def __init__(self, group: Any, session: Session, ears: dict[str, _Ear], counters: list[Callable[[], int]]) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.session = session
        # By type of device; "" where all go the same way.
        self.ears = ears
        self._counters = counters
        # Gloo refuses parts of different sizes; others send them one by one.
        self._even = dist.get_backend(group) == dist.Backend.GLOO
        self._lost = False
        self._told = 0
        # Operations of the group that were made through allhands, as the group counts them.
        self._ours = 0
        self._lock = threading.Lock()
        self._inside: set[int] = set()

    def before(self, name: str, args: tuple[Any, ...], kw: dict[str, Any], site: str) -> tuple[int, bool]:
        """Tell of a call, and return what `after` takes; raise CollectiveMismatch where another rank's is different."""
        thread = threading.get_ident()
        with self._lock:
            count = self._count()
            if count != self._ours or self._inside - {thread}:
                # Past allhands, or two threads at a time, whose order nobody knows.
                self._lost = True
            self._inside.add(thread)
            if self._lost or (shape := _SHAPES.get(name)) is None:
                return count, False
            tensor = _argument(args, kw, shape.tensor, *_TENSORS)
            ear = self._ear(tensor)
            if ear is None:
                return count, False
            call = self._call(shape, tensor, args, kw, site)
            self._told += 1
            judgement = ear.tell(call)
        if judgement is not None:
            raise failure.differ(self, judgement, name, site)
        return count, True

    def after(self, began: tuple[int, bool], *, well: bool) -> None:
        """Note what the group has counted for a call since `before` returned ``began``, and whether it went well."""
        count, told = began
        with self._lock:
            self._inside.discard(threading.get_ident())
            more = self._count() - count
            self._ours += more
            if not told or self._lost or more == 1:
                return
            # Something past allhands came between; or the call was refused before it began.
            self._lost = more > 1 or not well
            if more == 0 and not well:
                for ear in self.ears.values():
                    ear.withdraw()

    def _count(self) -> int:
        return sum(count() for count in self._counters)

    def _ear(self, tensor: Any) -> _Ear | None:
        """Return where a call with this tensor is told, None for one that goes nobody knows which way."""
        if "" in self.ears:
            return self.ears[""]
        return self.ears.get(tensor.device.type) if isinstance(tensor, torch.Tensor) else None

    def _call(self, shape: _Shape, tensor: Any, args: tuple[Any, ...], kw: dict[str, Any], site: str) -> Call:
        op = _argument(args, kw, shape.op, "op") if shape.op >= 0 else None
        reduction = 0 if shape.op < 0 else shm.reduction_code(op if op is not None else dist.ReduceOp.SUM)
        known: dict[str, Any] = {}
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            known = {
                "nbytes": tensor.nbytes,
                "dtype": shm.dtype_code(tensor.dtype),
                "shape": str(list(tensor.shape)),
            }
            if not self._even and shape.parts >= 0 and _uneven(_argument(args, kw, shape.parts, *_PARTS)):
                known |= {"nbytes": 0, "uneven": True}
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


def _uneven(parts: Any) -> bool:
    """Tell whether ``parts`` are tensors of different sizes."""
    return (
        isinstance(parts, list | tuple) and len({part.numel() for part in parts if isinstance(part, torch.Tensor)}) > 1
    )


def overhear(session: Session, group: Any) -> None:
    """Begin to compare the calls of ``group`` where it is torch's own. Each of its ranks calls this."""
    if getattr(group, "writes_notes", False) or group.size() < 2:
        return
    try:
        counters = _torch.counters(group)
    except RuntimeError:
        return  # Some kinds of group do not count, on any rank.
    numbers = dist.get_process_group_ranks(group)
    ears: dict[str, _Ear]
    if not session.one_host:
        open_tally = session.member.teller.open
        name = f"{group.group_name} ({named(numbers)})"
        # Devices have engines of their own, and nobody promises an order between them.
        kinds = _torch.device_types(group) if len(counters) > 1 else [""]
        session.told_late = True
        session.watch_gloo()
        ears = {kind: Afar(open_tally(f"{name} {kind}".strip(), len(numbers))) for kind in kinds}
    elif len(numbers) <= shm.MOST_RANKS:
        handing = Handing(session.store, group.rank(), len(numbers), session.member.check)
        key, timeout_s = f"calls/{group.group_name}", session.timeout.total_seconds()
        ears = {"": call_ring.form(handing, key, group.rank(), numbers, timeout_s)}
    else:
        return
    session.overheard[group] = Overheard(group, session, ears, counters)


def forget(session: Session, group: Any) -> None:
    """``group`` is destroyed: nothing more is called in it."""
    heard = session.overheard.pop(group, None)
    for ear in heard.ears.values() if heard is not None else ():
        if isinstance(ear, Afar):
            session.member.teller.close(ear.tally)
