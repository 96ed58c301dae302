"""Complex tensors whose conjugation torch has put off, which its communication functions refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["resolving"]


def resolving(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` such that it takes tensors with the conjugate bit, and writes to them where it writes.

    Only where the caller waits: what comes later could not be written back unseen, and torch says so.
    """

    def call(*args: Any, **kw: Any) -> Any:
        if not any(_lazy(each) for each in (*args, *kw.values())) or kw.get("async_op"):
            return function(*args, **kw)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        result = function(
            *(_resolve(each, pairs) for each in args), **{key: _resolve(each, pairs) for key, each in kw.items()}
        )
        if isinstance(result, torch.distributed.Work):  # async_op was given by its place
            result.wait()
        for given, resolved in pairs:
            given.detach().copy_(resolved)
        return result

    return call


def _lazy(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_conj()
    return isinstance(value, (list, tuple)) and any(_lazy(each) for each in value)


def _resolve(value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return ``value`` with its lazy tensors resolved, and add each with what stands for it to ``pairs``."""
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(each, pairs) for each in value)
    if not isinstance(value, torch.Tensor) or not value.is_conj():
        return value
    resolved = value.detach().resolve_conj()
    # An expanded tensor can be read only, so there is nothing to write back; as a result torch refuses it itself.
    if all(size <= 1 or stride for size, stride in zip(value.shape, value.stride(), strict=True)):
        pairs.append((value, resolved))
    return resolved
