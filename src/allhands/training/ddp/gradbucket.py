"""A bucket of gradients while it is reduced; communication hooks get it in place of torch's `GradBucket`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["GradBucket"]


class GradBucket:
    """Gradients that are reduced together, one after the other in `buffer`. The methods are those of torch's class."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        *,
        last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._last = last

    def index(self) -> int:
        """Return the number of the bucket; buckets are reduced in the order of their numbers."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor; a sparse gradient as it is."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient, a view of `buffer` in the shape of its parameter."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that the gradients belong to."""
        return self._parameters

    def is_last(self) -> bool:
        """Tell whether no bucket of this backward pass comes after this one."""
        return self._last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in the place of `buffer`."""
        self._buffer = buffer
