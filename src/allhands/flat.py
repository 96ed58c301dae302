"""Tensors as the shared-memory engine takes them: contiguous, for the length of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from .engines import shm

__all__ = ["Flat", "Flats", "when_ready"]


class Flats:
    """Contiguous stand-ins of tensors; with ``back``, what was written to a stand-in is copied back at the end."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, back: bool = True) -> None:
        self._given = tensors
        self._back = back
        self.tensors = [_at_hand(tensor).contiguous() for tensor in tensors]

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses and sizes, as the core takes them."""
        return shm.parts(self.tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None or not self._back:
            return
        for given, tensor in zip(self._given, self.tensors, strict=True):
            if given is not tensor and given.data_ptr() != tensor.data_ptr():
                given.copy_(tensor)
                _settle(given)


class Flat(Flats):
    """A contiguous stand-in of one tensor."""

    def __init__(self, tensor: torch.Tensor, *, back: bool = True) -> None:
        super().__init__([tensor], back=back)

    @property
    def tensor(self) -> torch.Tensor:
        """The stand-in."""
        return self.tensors[0]

    @property
    def place(self) -> tuple[int, ...]:
        """Its address and size."""
        return self.places


def _at_hand(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in the host's memory."""
    return tensor if tensor.is_cpu else tensor.cpu()


def _settle(tensor: torch.Tensor) -> None:
    """Wait until what was written to ``tensor`` is there: whoever uses it next may do so on another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def when_ready(run: Callable[[], None], tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return ``run`` preceded by a wait for what the GPU is still to do on the caller's streams.

    The call may be done by another thread, which has streams of its own. The tensors of a call are on the device of
    its results or, where this rank has none, on the current one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return run
    devices = {tensor.device for tensor in tensors if tensor.is_cuda} | {
        torch.device("cuda", torch.cuda.current_device())
    }
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def later() -> None:
        for event in events:
            event.synchronize()
        run()

    return later
