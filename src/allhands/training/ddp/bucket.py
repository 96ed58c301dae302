"""Buckets: which gradients are reduced together, their memory, and the copies in and out of it.

`BucketMemory` allocates one tensor per dtype and device and returns buckets, which are slices of it: another order of
the buckets needs no other memory.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ... import _torch
from ...errors import ResourceError, fail
from ...groups import registered
from ...groups.process_group import Group

__all__ = ["Bucket", "BucketMemory", "BucketPart", "assign", "move_in"]

# Buckets start on cache lines of their own: ranks write adjacent slices at the same time.
_LINE_BYTES = 64


def assign(
    tensors: Sequence[torch.Tensor], sparse: Sequence[bool], order: Iterable[int], caps_bytes: Sequence[int]
) -> list[list[int]]:
    """Assign ``tensors`` to buckets in ``order``. Returns the indices in each bucket, in the order of reduction.

    A bucket has one dtype and device, or a single sparse tensor. It is closed once it reaches its cap in
    ``caps_bytes``, which has one cap per bucket of a dtype and device; the last cap is that of all further ones.
    Buckets that are still open at the end follow in the order of their last tensor.
    """
    closed: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    for index in order:
        if sparse[index]:
            closed.append([index])
            continue
        kind = _kind(tensors[index])
        # Reinsert at the end: the kind of the last gradient is complete last.
        bucket = open_buckets.pop(kind, [])
        open_buckets[kind] = bucket
        bucket.append(index)
        filled[kind] = filled.get(kind, 0) + tensors[index].nbytes
        number = count.get(kind, 0)
        if filled[kind] >= caps_bytes[min(number, len(caps_bytes) - 1)]:
            closed.append(open_buckets.pop(kind))
            filled[kind] = 0
            count[kind] = number + 1
    return [*closed, *open_buckets.values()]


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


class BucketPart(NamedTuple):
    """One parameter of a bucket, and the view of the bucket for its gradient; None for a sparse gradient."""

    position: int
    parameter: torch.nn.Parameter
    view: Any


class Bucket:
    """Gradients that are reduced together in ``flat``, or one sparse gradient.

    Communication hooks receive it: it has the methods of `torch.distributed.GradBucket`.
    """

    def __init__(self, index: int, parts: list[BucketPart], flat: torch.Tensor | None, *, last: bool) -> None:
        self.parts = parts
        self.flat = flat
        # The order in which gradients are reduced in their own memory: the last ones are most likely to be in a cache.
        self.order = tuple(part.position for part in reversed(parts))
        self._index = index
        self._last = last
        self._buffer: Any = flat

    def index(self) -> int:
        """Return the number of the bucket; buckets are reduced in ascending order."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor, or the sparse gradient."""
        return self._buffer  # type: ignore[no-any-return]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients: views of `buffer` in the shapes of their parameters."""
        return [self._buffer if part.view is None else part.view for part in self.parts]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the gradients."""
        return [part.parameter for part in self.parts]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward pass."""
        return self._last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` for this pass."""
        self._buffer = buffer

    def fill(self, names: Sequence[str], rank: int) -> None:
        """Copy the gradients to `buffer`, zeros for missing ones.

        Raises module-changed, with the name and ``rank``, if the shape or dtype of a gradient changed.
        """
        self._buffer = self.flat
        if self.flat is None:
            parameter = self.parts[0].parameter
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
            self._buffer = gradient if gradient.is_sparse else gradient.to_sparse()
            return
        targets, sources = [], []
        for position, parameter, view in self.parts:
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                if gradient.shape != view.shape or gradient.dtype != view.dtype:
                    raise fail(
                        "module-changed",
                        f"the module was changed after it was wrapped: {names[position]} is another tensor now",
                        who=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
                        why=f"its gradient is {gradient.dtype} {tuple(gradient.shape)} on {gradient.device}; "
                        f"when it was wrapped it was {view.dtype} {tuple(view.shape)} on {view.device}",
                        fix="convert or move the module first, then wrap it",
                        ranks=(rank,),
                    )
                targets.append(view)
                sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        _torch.foreach_copy(targets, sources)

    def copy_out(self, unused: Container[int], *, views: bool) -> None:
        """Set the gradients of parameters to the averages in `buffer`, with ``views`` to views of the bucket.

        Those of ``unused`` parameters and of parameters that are frozen now stay.
        """
        # A hook may have returned another tensor, which is not kept.
        average, self._buffer = self._buffer, self.flat
        if self.flat is not None and average.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(average.view(-1))
        targets, sources = [], []
        for position, parameter, view in self.parts:
            gradient = parameter.grad
            if position in unused or not parameter.requires_grad:
                continue
            if view is None:
                parameter.grad = average
            elif views or gradient is view:
                parameter.grad = view
            elif gradient is None or gradient.is_sparse:
                parameter.grad = view.clone()
            else:
                targets.append(gradient)
                sources.append(view)
        _torch.foreach_copy(targets, sources)

    def flats(self) -> list[torch.Tensor]:
        """Return the views of a dense bucket in `order`, each flattened in the order of its memory."""
        return [part.view.as_strided((part.view.numel(),), (1,)) for part in reversed(self.parts)]

    def zeros(self) -> Bucket:
        """Return a bucket of zeros with the same layout: the contribution of a rank without inputs."""
        found = copy.copy(self)
        if self.flat is None:
            found.set_buffer(torch.zeros_like(self.parts[0].parameter, layout=torch.sparse_coo))
        else:
            found.flat = torch.zeros_like(self.flat)
            found.set_buffer(found.flat)
            views = _split(found.flat, [part.parameter for part in self.parts])
            found.parts = [part._replace(view=view) for part, view in zip(self.parts, views, strict=True)]
        return found


class BucketMemory:
    """Allocates buckets for ``parameters``. All ranks make it with the same parameters and call `arrange` alike."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], sparse: Sequence[bool], group: Any, caps_bytes: Sequence[int]
    ) -> None:
        self._parameters = parameters
        self._sparse = sparse
        self._group = group
        self._caps_bytes = caps_bytes
        self._memory: dict[Any, torch.Tensor] = {}
        self._fallback = False
        self.in_segment = False

    def arrange(self, order: Iterable[int], *, fallback: bool = False) -> list[Bucket]:
        """Return the buckets for gradients that arrive in ``order``. The contents of earlier buckets are lost.

        With ``fallback`` buckets are rarely written: they are ordinary memory, whose pages exist once written.
        """
        if self._fallback and not fallback:
            self._memory.clear()
        self._fallback = fallback
        buckets: list[Bucket] = []
        ends: dict[Any, int] = {}
        assigned = assign(self._parameters, self._sparse, order, self._caps_bytes)
        for number, indices in enumerate(assigned):
            parameters = [self._parameters[index] for index in indices]
            views: list[Any] = [None]
            flat = None
            if not self._sparse[indices[0]]:
                kind = _kind(parameters[0])
                if kind not in self._memory:
                    self._memory[kind] = self._allocate(*kind)
                numel = sum(each.numel() for each in parameters)
                start = ends.get(kind, 0)
                ends[kind] = start + _padded(numel, kind[0])
                flat = self._memory[kind][start : start + numel]
                views = _split(flat, parameters)
            parts = [BucketPart(*part) for part in zip(indices, parameters, views, strict=True)]
            buckets.append(Bucket(number, parts, flat, last=number == len(assigned) - 1))
        return buckets

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the gradients of one kind in any order: each may have a bucket of its own."""
        dense = [each for each, sparse in zip(self._parameters, self._sparse, strict=True) if not sparse]
        numel = sum(_padded(each.numel(), dtype) for each in dense if _kind(each) == (dtype, device))
        if device.type == "cpu" and isinstance(self._group, Group) and not self._fallback:
            # A ResourceError is raised on every rank. Ordinary memory works too, with one copy more.
            with contextlib.suppress(ResourceError):
                memory = registered.empty(numel, dtype=dtype, group=self._group)
                self.in_segment = True
                return memory
        return torch.empty(numel, dtype=dtype, device=device)


def _padded(numel: int, dtype: torch.dtype) -> int:
    """Return ``numel`` rounded up to whole cache lines: ranks write adjacent slices at the same time."""
    line = max(1, _LINE_BYTES // dtype.itemsize)
    return -(-numel // line) * line


def _split(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return adjacent views of ``flat`` with the shapes and, if dense, the strides of ``parameters``.

    Optimizers are fastest if gradients have the strides of their parameters (channels_last).
    """
    pieces = torch.split(flat, [each.numel() for each in parameters])
    like = [torch.empty_like(each, device="meta") for each in parameters]
    return [piece.as_strided(each.shape, each.stride()) for piece, each in zip(pieces, like, strict=True)]


def move_in(part: BucketPart) -> None:
    """Replace a gradient by its view of the bucket as soon as it arrives, so that its own memory is freed."""
    gradient, view = part.parameter.grad, part.view
    if gradient is None or view is None or gradient is view or gradient.requires_grad:
        return
    if (gradient.layout, gradient.dtype, gradient.shape) == (view.layout, view.dtype, view.shape):
        with torch.no_grad():
            view.copy_(gradient)
        part.parameter.grad = view
