"""Tensors as the shared-memory engine takes them: their values in one piece of memory, for the length of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch

from .. import _torch
from ..engines.base import parts_of
from ..errors import fail

__all__ = ["HOST", "Flat", "Flats", "dense", "extents", "when_ready"]

HOST = torch.device("cpu")


def dense(*tensors: torch.Tensor) -> bool:
    """Tell whether ``tensors`` are ordinary ones; those of a GPU go through the memory of the host."""
    return all(tensor.layout is torch.strided for tensor in tensors)


def extents(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the address of each tensor, and how many bytes lie between its first element and the end of its last."""
    found: list[int] = []
    for tensor in tensors:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        found += [tensor.data_ptr(), (last + 1) * tensor.element_size() if tensor.numel() else 0]
    return tuple(found)


class Flats:
    """Contiguous stand-ins of tensors; with ``back``, what was written to a stand-in is copied back at the end.

    With a ``factor`` each stand-in has the tensor's values times it, and the tensor itself stays as it is until then.
    Stand-ins are on ``device``, in the memory of the host unless told otherwise.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        back: bool = True,
        factor: complex | None = None,
        device: torch.device = HOST,
    ) -> None:
        self._given = [_torch.plain(tensor) for tensor in tensors]
        self._back = back
        self.tensors = [_stand_in(tensor, factor, device, back=back) for tensor in self._given]

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses and sizes, as the core takes them."""
        return parts_of(self.tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None or not self._back:
            return
        for given, tensor in zip(self._given, self.tensors, strict=True):
            if given is not tensor:
                # Detached: the caller's no_grad does not reach the thread that does what is not waited for.
                given.detach().copy_(tensor)
                if tensor.is_cpu:
                    _settle(given)


class Flat(Flats):
    """A contiguous stand-in of one tensor."""

    def __init__(
        self, tensor: torch.Tensor, *, back: bool = True, factor: complex | None = None, device: torch.device = HOST
    ) -> None:
        super().__init__([tensor], back=back, factor=factor, device=device)

    @property
    def tensor(self) -> torch.Tensor:
        """The stand-in."""
        return self.tensors[0]

    @property
    def place(self) -> tuple[int, int]:
        """Its address and size."""
        return self.tensor.data_ptr(), self.tensor.nbytes


def _settle(tensor: torch.Tensor) -> None:
    """Wait until what was written to ``tensor`` is there: whoever uses it next may do so on another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def when_ready(run: Callable[[int], None], tensors: Sequence[torch.Tensor]) -> Callable[[int], None]:
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

    def later(timeout_ns: int) -> None:
        for event in events:
            event.synchronize()
        run(timeout_ns)

    return later


def _stand_in(tensor: torch.Tensor, factor: complex | None, device: torch.device, *, back: bool) -> torch.Tensor:
    """Return ``tensor`` itself where it is on ``device`` and its memory holds its values in order, else such a copy."""
    here = tensor.is_cpu if device is HOST else tensor.device == device
    if factor is None and here and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        if tensor.data_ptr() == 0 and tensor.numel():
            raise fail(
                "invalid-argument",
                f"a {type(tensor).__name__} has no memory of its own that could be sent",
                who="this process",
                fix="give the tensor inside it, for example to_local() of a DTensor",
            )
        return tensor
    if back:
        _check_writable(tensor)
    # A conjugate or negative view has the bits of what it is a view of; copying gives it its own.
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor.detach())
    return made if factor is None else made.mul_(factor)


def _check_writable(tensor: torch.Tensor) -> None:
    """Raise where two elements of ``tensor`` share memory: each rank's result would be whichever came last."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise fail(
            "invalid-argument",
            f"a result cannot be written to an expanded tensor of shape {tuple(tensor.shape)}",
            who="this process",
            why="several of its elements are the same memory",
            fix="give a tensor of its own: tensor.clone() or torch.empty(tensor.shape)",
        )
