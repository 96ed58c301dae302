"""Averaging the gradients of a model that is not wrapped: once, by a call, or in every backward pass, by hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from ... import _torch
from ...groups.collectives import require_group
from . import errors
from .check import same_structure, same_values
from .gradbucket import GradBucket
from .reducer import Reducer
from .reduction import Averager, all_reduce

__all__ = ["GradientSync", "average_gradients", "sync_gradients"]

# Gradients are averaged in pieces of this size: copying them together is the price of few calls, and this much more
# memory is what it may take.
_PIECE_BYTES = 16 << 20


@torch.no_grad()
def average_gradients(model: torch.nn.Module, group: Any = None) -> None:
    """Replace the gradients of ``model`` by their averages over the ranks of ``group``.

    All ranks call this, after backward. A parameter that has a gradient on some ranks only gets one on all, as if the
    others' were zero; one that has none anywhere is left without.
    """
    require_group("average_gradients")
    group = group if group is not None else dist.group.WORLD
    averager = Averager(group)
    parameters = [each for each in model.parameters() if each.requires_grad]
    if averager.size == 1 or not parameters:
        return
    has = torch.tensor([each.grad is not None for each in parameters], dtype=torch.uint8, device=parameters[0].device)
    all_reduce(has, group, dist.ReduceOp.MAX)
    dense: dict[Any, list[torch.Tensor]] = {}
    for parameter, some in zip(parameters, has.tolist(), strict=True):
        if not some:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            gradient = parameter.grad
            parameter.grad = averager.start(GradBucket(0, gradient, [gradient], [], last=True), None, None, wait=True)()
            continue
        dense.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in dense.values():
        for piece in _pieces(gradients):
            _average(piece, averager)


def _pieces(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    piece: list[torch.Tensor] = []
    for gradient in gradients:
        piece.append(gradient)
        if sum(each.nbytes for each in piece) >= _PIECE_BYTES:
            yield piece
            piece = []
    if piece:
        yield piece


def _average(gradients: list[torch.Tensor], averager: Averager) -> None:
    if len(gradients) == 1 and gradients[0].is_contiguous():
        averager.start(GradBucket(0, gradients[0], gradients, [], last=True), None, None, wait=True)()
        return
    flat = torch.cat([each.reshape(-1) for each in gradients])
    averager.start(GradBucket(0, flat, gradients, [], last=True), None, None, wait=True)()
    parts = torch.split(flat, [each.numel() for each in gradients])
    _torch.foreach_copy(gradients, [part.view(each.shape) for part, each in zip(parts, gradients, strict=True)])


class GradientSync:
    """Hooks that average the gradients of an unwrapped model in every backward pass, until `remove`; also a context."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes inside this block to each rank."""
        self._reducer.listen(always=False)
        try:
            yield
        finally:
            self._reducer.listen(always=True)

    def remove(self) -> None:
        """Take the hooks away."""
        self._reducer.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.remove()


def sync_gradients(model: torch.nn.Module, group: Any = None, **options: Any) -> GradientSync:
    """Average the gradients of ``model`` in every backward pass from now on; the model itself is not wrapped.

    All ranks call this, with the same parameters in the same state: parameters-differ names those that are not. Takes
    ``bucket_cap_mb``, ``find_unused_parameters``, ``gradient_as_bucket_view`` and ``static_graph`` as
    DistributedDataParallel does. Buffers are not touched. Keep what is returned, or the hooks go with it.
    """
    from .ddp_arguments import Arguments

    known = {"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"}
    for name in options:
        if name not in known:
            raise errors.refused(f"{name} (in sync_gradients)", f"leave it out; there are {', '.join(sorted(known))}")
    require_group("sync_gradients")
    given = Arguments.of(model, None, None, group, None)
    named = {name: each for name, each in model.named_parameters() if each.requires_grad and name not in given.ignored}
    same_structure(named.items(), options, given.group, given.device)
    same_values(named.items(), given.group, given.device)
    sparse = {
        id(part.weight)
        for part in model.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }
    reducer = Reducer(
        list(named.values()),
        list(named),
        [id(each) in sparse for each in named.values()],
        given.group,
        caps_bytes=Arguments.caps_bytes(options.get("bucket_cap_mb"), None),
        views=bool(options.get("gradient_as_bucket_view")),
        find_unused=bool(options.get("find_unused_parameters")),
        static=bool(options.get("static_graph")),
        always=True,
    )
    return GradientSync(reducer)
