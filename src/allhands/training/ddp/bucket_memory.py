"""The memory in which gradients are reduced: flat buckets, or on our own engine the gradients' own memory.

`BucketMemory` allocates one tensor per dtype and device and returns buckets, which are slices of it: another order of
the buckets needs no other memory. `TensorList` reduces gradients in place; those that cannot be (missing, sparse,
overlapping) are copied to their buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import _core, _torch
from ...errors import ResourceError
from ...groups import registered
from ...groups.process_group import Group
from ...groups.staging import extents
from . import ddp_failures
from .bucket import ItemSize, Region, assign, place

__all__ = [
    "Bucket",
    "BucketMemory",
    "BucketPart",
    "Gathered",
    "TensorList",
    "copy_in",
    "copy_out",
    "move_in",
    "tensor_lists",
    "view_like",
    "zeros",
]

# Smaller gradients are copied when their bucket is complete: one call for many is faster, and they hold little memory.
_MOVE_AT_ONCE_BYTES = 1 << 16


class BucketPart(NamedTuple):
    """One parameter of a bucket, and the view of the bucket for its gradient; None for a sparse gradient."""

    position: int
    parameter: torch.nn.Parameter
    view: torch.Tensor | None


class Bucket(NamedTuple):
    """Gradients that are reduced together: ``flat``, and ``counted``, which has one counter element more."""

    parts: list[BucketPart]
    flat: torch.Tensor | None
    counted: torch.Tensor | None


class BucketMemory:
    """Allocates buckets for ``parameters``. All ranks make it with the same parameters and call `arrange` alike."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], sparse: Sequence[bool], group: Any, caps_bytes: Sequence[int]
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._caps_bytes = caps_bytes
        self._items = [
            ItemSize(each.numel(), each.element_size(), (each.dtype, each.device), is_sparse)
            for each, is_sparse in zip(parameters, sparse, strict=True)
        ]
        self._memory: dict[Any, torch.Tensor] = {}
        self._fallback = False
        self.in_segment = False

    def arrange(self, order: Sequence[int], *, fallback: bool = False) -> list[Bucket]:
        """Return the buckets for gradients that arrive in ``order``. The contents of earlier buckets are lost.

        With ``fallback`` buckets are rarely written: they are ordinary memory, whose pages exist once written.
        """
        if self._fallback and not fallback:
            self._memory.clear()
        self._fallback = fallback
        buckets = assign(self._items, order, self._caps_bytes)
        regions = dict(place(self._items, buckets))
        sizes: dict[Any, int] = {}
        for number, region in regions.items():
            sizes[self._items[buckets[number][0]].kind] = region.start + region.reserved
        for kind, size in sizes.items():
            if kind not in self._memory or self._memory[kind].numel() < size:
                self._memory[kind] = self._allocate(kind, size)
        return [self._bucket(indices, regions.get(number)) for number, indices in enumerate(buckets)]

    def _allocate(self, kind: tuple[torch.dtype, torch.device], numel: int) -> torch.Tensor:
        dtype, device = kind
        # Another order may need more padding: at most one cache line per gradient.
        numel += 16 * len(self._items)
        if device.type == "cpu" and isinstance(self._group, Group) and not self._fallback:
            try:
                memory = registered.empty(numel, dtype=dtype, group=self._group)
            except ResourceError:
                # Raised on every rank. Ordinary memory works too, with one copy more.
                return torch.zeros(numel, dtype=dtype)
            self.in_segment = True
            return memory
        return torch.empty(numel, dtype=dtype, device=device)

    def _bucket(self, indices: Sequence[int], region: Region | None) -> Bucket:
        if region is None:
            return Bucket([BucketPart(index, self._parameters[index], None) for index in indices], None, None)
        memory = self._memory[self._items[indices[0]].kind]
        parts, start = [], region.start
        for index in indices:
            parameter = self._parameters[index]
            parts.append(BucketPart(index, parameter, view_like(memory, start, parameter)))
            start += parameter.numel()
        end = region.start + region.numel
        return Bucket(parts, memory[region.start : end], memory[region.start : end + 1])


def view_like(memory: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of ``memory`` from ``start`` with the shape and, if dense, the strides of ``parameter``.

    Optimizers are fastest if gradients have the strides of their parameters (channels_last).
    """
    if parameter.is_contiguous() or not _is_dense(parameter):
        return memory[start : start + parameter.numel()].view(parameter.shape)
    return memory.as_strided(parameter.shape, parameter.stride(), memory.storage_offset() + start)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` fill their memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def move_in(part: BucketPart) -> None:
    """Replace a large gradient by its view of the bucket as soon as it arrives, so that its own memory is freed."""
    gradient, view = part.parameter.grad, part.view
    if gradient is None or view is None or gradient is view or view.nbytes < _MOVE_AT_ONCE_BYTES:
        return
    if gradient.requires_grad or gradient.is_sparse:
        return
    if gradient.shape == view.shape and gradient.dtype == view.dtype:
        with torch.no_grad():
            view.copy_(gradient)
        part.parameter.grad = view


def copy_in(parts: Sequence[BucketPart], names: Sequence[str], rank: int) -> None:
    """Copy gradients to their buckets, zeros for missing ones.

    Raises module-changed, with the name and ``rank``, if the shape or dtype of a gradient changed.
    """
    targets, sources = [], []
    for part in parts:
        gradient = part.parameter.grad
        if part.view is None:
            raise ValueError("a sparse gradient has no view of a bucket")
        if gradient is None:
            part.view.zero_()
        elif gradient is not part.view:
            if gradient.shape != part.view.shape or gradient.dtype != part.view.dtype:
                raise ddp_failures.parameter_changed(rank, names[part.position], part.view, gradient)
            targets.append(part.view)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
    _torch.foreach_copy(targets, sources)


def copy_out(parts: Sequence[BucketPart], *, views: bool) -> None:
    """Set the gradients of parameters to the averages in their buckets; with ``views`` to views of the buckets."""
    targets, sources = [], []
    for part in parts:
        parameter, view = part.parameter, part.view
        if view is None or not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is view:
            continue
        if views:
            parameter.grad = view
        elif gradient is None or gradient.is_sparse:
            parameter.grad = view.clone()
        else:
            targets.append(gradient)
            sources.append(view)
    _torch.foreach_copy(targets, sources)


def zeros(bucket: Bucket) -> Bucket:
    """Return a bucket of zeros like ``bucket``: the contribution of a rank without inputs."""
    if bucket.counted is None:
        part = bucket.parts[0]
        return bucket._replace(parts=[part._replace(view=torch.zeros_like(part.parameter, layout=torch.sparse_coo))])
    counted = torch.zeros_like(bucket.counted)
    sizes = [part.parameter.numel() for part in bucket.parts]
    flats = torch.split(counted[:-1], sizes)
    parts = [
        part._replace(view=flat.view(part.parameter.shape)) for part, flat in zip(bucket.parts, flats, strict=True)
    ]
    return Bucket(parts, counted[:-1], counted)


class Gathered(NamedTuple):
    """The tensors that one rank contributes to a reduction in place, and the parts that were copied to buckets."""

    tensors: list[torch.Tensor]
    copied: list[BucketPart]


class TensorList(NamedTuple):
    """Gradients of one dtype that are reduced as one, each in its own memory; the last list ends with the counter."""

    parts: list[BucketPart]
    order: tuple[int, ...]
    counter: torch.Tensor | None

    def gather(self, grad_hook: _core.GradHook, names: Sequence[str], rank: int) -> Gathered:
        """Return the tensors to reduce. Raises as `copy_in` does."""
        found: list[torch.Tensor] | None = grad_hook.gather(self.order)
        copied: list[BucketPart] = []
        if found is None:
            in_place = {part.position: each for part in self.parts if (each := _plain_gradient(part)) is not None}
            if in_place and not _core.disjoint(extents([*in_place.values()])):
                in_place = {}
            copied = [part for part in self.parts if part.position not in in_place]
            with torch.no_grad():
                copy_in(copied, names, rank)
            found = [_flatten(in_place.get(part.position, part.view)) for part in self.parts]
        if self.counter is not None:
            found.append(self.counter)
        return Gathered(found, copied)

    def zeros(self) -> list[torch.Tensor]:
        """Return the contribution of a rank without inputs."""
        found = [torch.zeros(part.parameter.numel(), dtype=part.parameter.dtype) for part in self.parts]
        return found if self.counter is None else [*found, torch.zeros_like(self.counter)]


def tensor_lists(buckets: Sequence[Bucket], counter: torch.Tensor | None, *, merge: bool) -> list[TensorList]:
    """Return one list per bucket, or with ``merge`` one per dtype. ``counter`` is in that of the last bucket, the last.

    The gradients that arrived last come first: they are the most likely to be in a cache.
    """
    merged: dict[Any, list[BucketPart]] = {}
    for number, bucket in enumerate(buckets):
        key = bucket.parts[0].parameter.dtype if merge else number
        merged[key] = [*merged.pop(key, []), *bucket.parts]
    lists = [TensorList(parts[::-1], tuple(part.position for part in parts[::-1]), None) for parts in merged.values()]
    lists[-1] = lists[-1]._replace(counter=counter)
    return lists


def _plain_gradient(part: BucketPart) -> torch.Tensor | None:
    """Return the gradient if it can be reduced in place: a plain CPU tensor with the layout of its view."""
    gradient, view = part.parameter.grad, part.view
    if gradient is None or view is None or type(gradient) is not torch.Tensor or not part.parameter.requires_grad:
        return None
    if gradient.layout is not torch.strided or not gradient.is_cpu or gradient.requires_grad:
        return None
    if gradient.is_conj() or gradient.is_neg():
        return None
    same = (gradient.dtype, gradient.shape, gradient.stride()) == (view.dtype, view.shape, view.stride())
    return gradient if same else None


def _flatten(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the elements of a dense ``tensor`` in memory order."""
    if tensor is None:
        raise ValueError("a dense gradient has a view of a bucket")
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
