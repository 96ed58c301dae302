"""Tensors as an engine takes them: contiguous, on its device, for the duration of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from .. import _torch
from ..engines.base import parts_of
from ..errors import fail

__all__ = ["HOST", "Staged", "dense", "extents", "resolve_conjugates", "shapes", "when_ready"]

HOST = torch.device("cpu")

# How many shapes a mismatch shows.
_MAX_SHAPES = 3


def dense(*tensors: torch.Tensor) -> bool:
    """Return whether all ``tensors`` are strided."""
    return all(tensor.layout is torch.strided for tensor in tensors)


def extents(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the address of each tensor, and how many bytes lie between its first element and the end of its last."""
    found: list[int] = []
    for tensor in tensors:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        found += [tensor.data_ptr(), (last + 1) * tensor.element_size() if tensor.numel() else 0]
    return tuple(found)


def shapes(tensors: Sequence[torch.Tensor]) -> str:
    """Return the shapes of ``tensors`` for a mismatch, at most _MAX_SHAPES of them."""
    more = len(tensors) - _MAX_SHAPES
    return ", ".join(str(list(tensor.shape)) for tensor in tensors[:_MAX_SHAPES]) + f" and {more} more" * (more > 0)


class Staged:
    """Contiguous versions of tensors on ``device``: a tensor itself where it is contiguous there, else a copy.

    With ``back``, copies are copied back at the end. With a ``factor`` each copy is multiplied by it.
    """

    def __init__(
        self, *tensors: torch.Tensor, back: bool = True, factor: complex | None = None, device: torch.device = HOST
    ) -> None:
        self._given = [_torch.plain(tensor) for tensor in tensors]
        self._back = back
        self._tensors = [_stage(tensor, factor, device, back=back) for tensor in self._given]

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses and sizes, as the core takes them."""
        return parts_of(self._tensors)

    @property
    def place(self) -> tuple[int, int]:
        """Address and size of the first of them."""
        return self.tensor.data_ptr(), self.tensor.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """The first of them."""
        return self._tensors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.copy_back()

    def copy_back(self) -> None:
        """Copy each copy to the tensor that it was made of, unless `back` is False."""
        if not self._back:
            return
        for given, tensor in zip(self._given, self._tensors, strict=True):
            if given is not tensor:
                # Detached: the caller's no_grad does not apply in the thread of the call queue.
                given.detach().copy_(tensor)
                if tensor.is_cpu and given.is_cuda:
                    # Until the copy is done: it may be used next on another stream.
                    torch.cuda.current_stream(given.device).synchronize()


def when_ready(run: Callable[[int], None], tensors: Sequence[torch.Tensor]) -> Callable[[int], None]:
    """Return ``run`` preceded by a wait for the work queued on the caller's streams.

    The call may run in another thread, which has streams of its own. The tensors of a call are on the device of
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


def _stage(tensor: torch.Tensor, factor: complex | None, device: torch.device, *, back: bool) -> torch.Tensor:
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
    """Raise where two elements of ``tensor`` share memory: the last one written would be the result."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise fail(
            "invalid-argument",
            f"a result cannot be written to an expanded tensor of shape {tuple(tensor.shape)}",
            who="this process",
            why="several of its elements are the same memory",
            fix="give a tensor of its own: tensor.clone() or torch.empty(tensor.shape)",
        )


# Conjugate views ---------------------------------------------------------------------------------------------------


def resolve_conjugates(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, one of torch's, such that it takes tensors with the conjugate bit, which torch's refuse.

    Only where the caller waits: the result of an asynchronous call could not be copied back, and torch raises.
    """

    def call(*args: Any, **kw: Any) -> Any:
        if not any(_has_conjugates(each) for each in (*args, *kw.values())) or kw.get("async_op"):
            return function(*args, **kw)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        result = function(
            *(_resolve(each, pairs) for each in args), **{key: _resolve(each, pairs) for key, each in kw.items()}
        )
        if isinstance(result, torch.distributed.Work):  # async_op was passed by position
            result.wait()
        for given, resolved in pairs:
            given.detach().copy_(resolved)
        return result

    return call


def _has_conjugates(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_conj()
    return isinstance(value, (list, tuple)) and any(_has_conjugates(each) for each in value)


def _resolve(value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return ``value`` with its conjugate tensors resolved, and append each with its copy to ``pairs``."""
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(each, pairs) for each in value)
    if not isinstance(value, torch.Tensor) or not value.is_conj():
        return value
    resolved = value.detach().resolve_conj()
    # An expanded tensor is read only, so nothing is copied back; torch refuses it as a result.
    if all(size <= 1 or stride for size, stride in zip(value.shape, value.stride(), strict=True)):
        pairs.append((value, resolved))
    return resolved
