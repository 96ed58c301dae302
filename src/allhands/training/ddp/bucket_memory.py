"""Moving gradients from parameters into buckets, and averages back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _torch
from . import errors
from .storage import Bucket, Slot

__all__ = ["fill", "give", "hand_out", "lay", "settle", "zeros"]

# Gradients below this wait for their bucket: copying many in one call costs less, and their memory is none to speak of.
_LEAST_BYTES = 1 << 16


def settle(slot: Slot) -> None:
    """Move a large gradient, once it is there, to where it will be reduced; let go of its own memory.

    So no more than one of them at a time lies in two places.
    """
    gradient, view = slot.parameter.grad, slot.view
    if gradient is None or view is None or gradient is view or view.nbytes < _LEAST_BYTES:
        return
    if gradient.requires_grad or gradient.is_sparse:
        return
    if gradient.shape == view.shape and gradient.dtype == view.dtype:
        with torch.no_grad():
            view.copy_(gradient)
        slot.parameter.grad = view


def fill(bucket: Bucket, names: Sequence[str], rank: int) -> torch.Tensor:
    """Copy the gradients of ``bucket`` to where they are reduced; return that.

    Raises module-changed, with the name and ``rank``, where one does not fit.
    """
    if bucket.flat is None:
        return _sparse(bucket.slots[0])
    lay(bucket.slots, names, rank)
    return bucket.flat


def lay(slots: Sequence[Slot], names: Sequence[str], rank: int) -> None:
    """Copy gradients to their places in buckets; raises as `fill` does."""
    targets, sources = [], []
    for slot in slots:
        gradient = slot.parameter.grad
        if slot.view is None:
            raise ValueError("a sparse gradient has no place in a bucket")
        if gradient is None:
            slot.view.zero_()
        elif gradient is not slot.view:
            if gradient.shape != slot.view.shape or gradient.dtype != slot.view.dtype:
                raise errors.retyped(rank, names[slot.position], slot.view, gradient)
            targets.append(slot.view)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
    _torch.foreach_copy(targets, sources)


def hand_out(bucket: Bucket, result: torch.Tensor, unused: frozenset[int], *, views: bool) -> None:
    """Give the parameters of ``bucket`` their averages, but for those that are ``unused`` on every rank.

    With ``views`` gradients are from now on parts of the bucket.
    """
    if bucket.flat is None:
        if bucket.slots[0].position not in unused:
            bucket.slots[0].parameter.grad = result
        return
    if result.data_ptr() != bucket.flat.data_ptr():
        bucket.flat.copy_(result.view(-1))
    give([slot for slot in bucket.slots if slot.position not in unused], views=views)


def give(slots: Sequence[Slot], *, views: bool) -> None:
    """Give parameters the averages that lie in their places in buckets; ``views`` as for `hand_out`."""
    targets, sources = [], []
    for slot in slots:
        parameter, view = slot.parameter, slot.view
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


def zeros(bucket: Bucket) -> tuple[torch.Tensor | None, torch.Tensor, list[torch.Tensor]]:
    """Return what a rank without inputs gives in the place of ``bucket``: with its mark, without it, and its parts."""
    if bucket.marked is None:
        buffer = _nothing(bucket.slots[0].parameter)
        return None, buffer, [buffer]
    marked = torch.zeros_like(bucket.marked)
    buffer, at = marked[:-1], 0
    parts: list[torch.Tensor] = []
    for slot in bucket.slots:
        parts.append(buffer[at : at + slot.parameter.numel()].view(slot.parameter.shape))
        at += slot.parameter.numel()
    return marked, buffer, parts


def _nothing(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of nothing."""
    return torch.zeros_like(parameter, layout=torch.sparse_coo)


def _sparse(slot: Slot) -> torch.Tensor:
    gradient = slot.parameter.grad
    if gradient is None:
        return _nothing(slot.parameter)
    return gradient if gradient.is_sparse else gradient.to_sparse()
