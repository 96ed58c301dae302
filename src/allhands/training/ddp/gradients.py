"""Average the gradients of a model that is not wrapped: once, or with hooks in every backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ... import _torch
from ...groups.collectives import require_group
from .bucket import assign
from .ddp import caps_bytes, checked_parameters, invalid_argument
from .model_check import check_same_structure, check_same_values, sparse_parameters
from .reducer import Averager, Reducer, all_reduce

__all__ = ["GradientSync", "average_gradients", "sync_gradients"]

# Gradients are concatenated up to this size: few calls, and a bounded copy.
_CHUNK_BYTES = 16 << 20


@torch.no_grad()
def average_gradients(model: torch.nn.Module, group: Any = None) -> None:
    """Replace the gradients of ``model`` by their averages over the ranks of ``group``.

    All ranks call this, after backward. A parameter that has a gradient on some ranks only gets one on all, as if the
    others' were zero; one that has none on any rank is left without.
    """
    require_group("average_gradients")
    group = group if group is not None else dist.group.WORLD
    averager = Averager(group)
    parameters = [each for each in model.parameters() if each.requires_grad]
    if averager.size == 1 or not parameters:
        return
    has = torch.tensor([each.grad is not None for each in parameters], dtype=torch.uint8, device=parameters[0].device)
    all_reduce(has, dist.ReduceOp.MAX, group)
    parameters = [each for each, any_has in zip(parameters, has.tolist(), strict=True) if any_has]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    sparse = [each.is_sparse for each in gradients]
    for indices in assign(gradients, sparse, range(len(gradients)), [_CHUNK_BYTES]):
        chunk = [gradients[index] for index in indices]
        if sparse[indices[0]]:
            gradients[indices[0]], wait = averager.start_sparse(chunk[0], None)
            wait()
        elif len(chunk) == 1 and chunk[0].is_contiguous():
            averager.start(chunk, None, wait=True)()
        else:
            flat = torch.cat([each.reshape(-1) for each in chunk])
            averager.start([flat], None, wait=True)()
            parts = torch.split(flat, [each.numel() for each in chunk])
            _torch.foreach_copy(chunk, [part.view(each.shape) for part, each in zip(parts, chunk, strict=True)])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


class GradientSync(contextlib.AbstractContextManager["GradientSync"]):
    """Hooks that average the gradients of an unwrapped model in every backward pass, until `remove`; also a context."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes inside this block local to each rank."""
        self._reducer.always = False
        self._reducer.prepare(armed=False)
        try:
            yield
        finally:
            self._reducer.always = True
            self._reducer.prepare(armed=False)

    def remove(self) -> None:
        """Remove the hooks."""
        self._reducer.remove()

    def __exit__(self, *_: object) -> None:
        self.remove()


def sync_gradients(model: torch.nn.Module, group: Any = None, **options: Any) -> GradientSync:
    """Average the gradients of ``model`` in every backward pass from now on, without wrapping it.

    All ranks call this, with the same parameters in the same state; raises parameters-differ otherwise. Takes
    ``bucket_cap_mb``, ``find_unused_parameters``, ``gradient_as_bucket_view`` and ``static_graph`` of
    DistributedDataParallel. Buffers are not synchronized. Keep the result: its hooks are removed with it.
    """
    known = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    for name in options:
        if name not in known:
            raise invalid_argument(
                f"{name} (in sync_gradients) is not supported", "", f"leave it out; there are {', '.join(known)}"
            )
    require_group("sync_gradients")
    group = group if group is not None else dist.group.WORLD
    named = {name: each for name, each in checked_parameters(model).items() if each.requires_grad}
    check_same_structure(named, options, group)
    check_same_values(named, group)
    reducer = Reducer(
        named,
        sparse_parameters(model.modules()),
        group,
        caps_bytes=caps_bytes(options.get("bucket_cap_mb"), None),
        views=bool(options.get("gradient_as_bucket_view")),
        find_unused=bool(options.get("find_unused_parameters")),
        static=bool(options.get("static_graph")),
        always=True,
    )
    return GradientSync(reducer)
