"""The operations of engines that compare each call themselves, and then move tensors: all but shared memory.

`ComparedEngine` makes tensors of addresses. Its subclasses compare the call (`_compare`) and move the data, by the
methods after that one.
"""

from __future__ import annotations

import ctypes
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import _core
from .base import Engine, Parts
from .dtypes import COMPLEX, TORCH_DTYPES, operation_code

__all__ = ["ComparedEngine", "Tensors", "as_bytes", "at", "joined", "memory", "sizes_of"]

Tensors = Sequence[torch.Tensor]

_CODES = _core.OPERATIONS


class ComparedEngine(Engine):
    """One rank's end of a group. Tensors of the methods for subclasses are flat; bytes where no reduction is named."""

    _rank: int
    _size: int
    _sequence: int = 0

    def sequence(self) -> int:
        """Return the number of the next call."""
        return self._sequence

    def barrier(self, timeout_ns: int) -> None:
        """Wait for every rank: comparing the call is all it takes."""
        self._compare(_CODES["barrier"], timeout_ns)
        self._end()

    def compare_only(self, operation: int, reduction: int, dtype: int, nbytes: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what a call is
        """Compare a call, which `delegate` completes."""
        self._compare(operation, timeout_ns, nbytes, reduction=reduction, dtype=dtype, root=root)

    def refuse(self, operation: str, reason: str, timeout_ns: int) -> None:
        """Report that this rank cannot make its call; raise CallMismatch unless no rank can."""
        self._compare(operation_code(operation), timeout_ns, refused=reason or "it gave no reason")
        self._end()

    def all_reduce(self, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int) -> None:
        """Reduce in place."""
        data = self._at(address, nbytes)
        self._compare(_CODES["all_reduce"], timeout_ns, nbytes, data, dtype=dtype, reduction=reduction)
        self._reduce(_typed(data, dtype), reduction, None)
        self._end()

    def reduce(self, address: int, nbytes: int, dtype: int, reduction: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Reduce in place on the root."""
        data = self._at(address, nbytes)
        self._compare(_CODES["reduce"], timeout_ns, nbytes, data, dtype=dtype, reduction=reduction, root=root)
        self._reduce(_typed(data, dtype), reduction, root)
        self._end()

    def broadcast(self, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:
        """Copy the root's memory to every rank."""
        data = self._at(address, nbytes)
        self._compare(_CODES["broadcast"], timeout_ns, nbytes, data, dtype=dtype, root=root)
        self._broadcast(data, root)
        self._end()

    def all_gather(self, address: int, nbytes: int, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy every rank's memory to every rank."""
        data, parts = self._at(address, nbytes), self._parts(out)
        given = [data] * self._size
        self._compare(_CODES["all_gather"], timeout_ns, nbytes, data, parts=parts, given=given, came=parts, dtype=dtype)
        self._all_gather(data, parts)
        self._end()

    def gather(self, address: int, nbytes: int, out: Parts | None, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy every rank's memory to the root."""
        data, parts = self._at(address, nbytes), self._parts(out)
        given, came = self._to_root(data, root), parts or [data[:0]] * self._size
        self._compare(
            _CODES["gather"], timeout_ns, nbytes, data, parts=parts, given=given, came=came, dtype=dtype, root=root
        )
        self._gather(given, came, root)
        self._end()

    def scatter(self, given: Parts | None, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy each part of the root's memory to its rank."""
        data, parts = self._at(address, nbytes), self._parts(given)
        gone, came = parts or [data[:0]] * self._size, self._to_root(data, root)
        self._compare(_CODES["scatter"], timeout_ns, nbytes, parts=parts, given=gone, came=came, dtype=dtype, root=root)
        self._scatter(gone, came, root)
        self._end()

    def reduce_scatter(  # noqa: PLR0917  # what the operation takes
        self, given: Parts, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int
    ) -> None:
        """Reduce each part to the rank that it is for."""
        data, parts = self._at(address, nbytes), self._parts(given)
        self._compare(_CODES["reduce_scatter"], timeout_ns, nbytes, dtype=dtype, reduction=reduction)
        self._reduce_scatter([_typed(part, dtype) for part in parts], _typed(data, dtype), reduction)
        self._end()

    def all_to_all(self, given: Parts, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy each part to its rank."""
        parts, came = self._parts(given), self._parts(out)
        both = parts + came
        largest = max(sizes_of(both))
        self._compare(_CODES["all_to_all"], timeout_ns, largest, parts=both, given=parts, came=came, dtype=dtype)
        self._all_to_all(parts, came)
        self._end()

    # For subclasses ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _compare(
        self,
        operation: int,
        timeout_ns: int,
        nbytes: int = 0,
        data: torch.Tensor | None = None,
        *,
        parts: Tensors = (),
        given: Tensors = (),
        came: Tensors = (),
        **fields: Any,
    ) -> None:
        """Begin a call and compare it; raise CallMismatch where the ranks' calls differ.

        Where parts may differ in size, ``given`` and ``came`` are those for and from each rank, and ``parts`` those
        that usually all have ``nbytes``. ``data`` may be sent along with the comparison.
        """

    def _end(self) -> None:
        self.in_call = False

    @abstractmethod
    def _reduce(self, data: torch.Tensor, reduction: int, root: int | None) -> None:
        """Reduce in place on the root, on every rank without one."""

    @abstractmethod
    def _broadcast(self, data: torch.Tensor, root: int) -> None: ...

    @abstractmethod
    def _all_gather(self, data: torch.Tensor, parts: Tensors) -> None: ...

    def _gather(self, given: Tensors, came: Tensors, root: int) -> None:
        """Exchange parts, which are empty except for those to the root."""
        del root
        self._all_to_all(given, came)

    def _scatter(self, given: Tensors, came: Tensors, root: int) -> None:
        """Exchange parts, which are empty except for those from the root."""
        del root
        self._all_to_all(given, came)

    @abstractmethod
    def _reduce_scatter(self, parts: Tensors, mine: torch.Tensor, reduction: int) -> None: ...

    @abstractmethod
    def _all_to_all(self, given: Tensors, came: Tensors) -> None: ...

    def _at(self, address: int, nbytes: int) -> torch.Tensor:
        return at(address, nbytes)

    def _parts(self, parts: Parts | None) -> list[torch.Tensor]:
        return [self._at(*part) for part in zip(parts[::2], parts[1::2], strict=True)] if parts else []

    def _to_root(self, data: torch.Tensor, root: int) -> list[torch.Tensor]:
        return [data if rank == root else data[:0] for rank in range(self._size)]


def _typed(data: torch.Tensor, dtype: int) -> torch.Tensor:
    """Return bytes as elements of the core's ``dtype``; complex numbers as their parts."""
    return data.view(TORCH_DTYPES[dtype & ~COMPLEX])


def sizes_of(parts: Tensors) -> list[int]:
    """Return the bytes of each part."""
    return [part.nbytes for part in parts]


def at(address: int, nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of this process's memory at ``address`` as a tensor."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``, which must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous ``tensor`` as a flat tensor of bytes."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def joined(parts: Tensors, *, back: bool = True) -> Iterator[torch.Tensor]:
    """Yield ``parts``, of bytes, as one tensor: their own memory where adjacent, else a copy (copied ``back``)."""
    sizes = sizes_of(parts)
    filled = [part for part in parts if part.numel()]
    adjacent = all(
        before.data_ptr() + before.numel() == after.data_ptr() for before, after in itertools.pairwise(filled)
    )
    if not filled or adjacent:
        yield at(filled[0].data_ptr(), sum(sizes)) if filled else torch.empty(0, dtype=torch.uint8)
        return
    whole = torch.empty(sum(sizes), dtype=torch.uint8) if back else torch.cat(filled)
    yield whole
    if back:
        for part, piece in zip(parts, torch.split(whole, sizes), strict=True):
            part.copy_(piece)
