"""A backward pass: how far it has come, and what is called at its very end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .storage import Slot

__all__ = ["End", "Pass"]


class End:
    """Calls ``finish`` at the end of a backward pass, through which alone it is held."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        """Be called by the engine."""
        self._finish()


@dataclass(slots=True)
class Pass:
    """One backward pass as far as it has come."""

    counts: list[int]
    left: list[int]
    # What is called at its end. The engine alone holds it: once it is gone without a call, an exception ended the pass.
    end: weakref.ref[End] | None = None
    opened: bool = False
    # Whether the core takes its gradients (see `Reducer._hand_over`).
    handed: bool = False
    # Buckets that have all their gradients and no incomplete one before them, and how many of those are on their way.
    ready: int = 0
    launched: int = 0
    waits: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    # Gradients that lie in their buckets, where the others are reduced where they lie.
    moved: list[Slot] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
