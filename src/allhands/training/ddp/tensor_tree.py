"""The tensors in what goes into a module and comes out of it, in whatever they are nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["moved", "tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(each, device) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(each, device) for each in value)
    if isinstance(value, dict):
        return type(value)((name, moved(each, device)) for name, each in value.items())
    return value
