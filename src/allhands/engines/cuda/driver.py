"""The few calls of NVIDIA's driver that torch has no names for: shared memory of a GPU, and waits on a stream.

Through ctypes on the library that every driver installs, in the context that torch has made current in this thread.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

__all__ = [
    "DriverError",
    "Stream",
    "allocate",
    "context",
    "enter",
    "free",
    "handle",
    "map_host",
    "order",
    "shut",
    "take",
    "unmap_host",
]

# <cuda.h>: CU_IPC_HANDLE_SIZE, and flags and operations by their names there.
_HANDLE_BYTES = 64
_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1
_HOST_PORTABLE, _HOST_DEVICEMAP = 1, 2
_WAIT_VALUE_64, _WRITE_VALUE_64 = 4, 5


class DriverError(RuntimeError):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: the fields that a wait and a write have in common, and its full size of 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as problem:
        raise DriverError(str(problem)) from problem


def _do(name: str, *args: Any) -> None:
    function = getattr(_library(), name, None)
    if function is None:
        raise DriverError(f"this driver has no {name}: it is too old")
    code = function(*args)
    if code:
        words = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(words))
        raise DriverError(f"{name}: {(words.value or b'error').decode()} ({code})")


def context() -> int:
    """Return the context that is current in this thread."""
    made = ctypes.c_void_p()
    _do("cuCtxGetCurrent", ctypes.byref(made))
    return int(made.value or 0)


def enter(context: int) -> None:
    """Make ``context`` current in this thread. torch does so only in threads in which it has had something to do."""
    _do("cuCtxSetCurrent", ctypes.c_void_p(context))


def allocate(size: int) -> int:
    """Return the address of ``size`` bytes of the current device, which belong to nobody's pool."""
    made = ctypes.c_uint64()
    _do("cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(size))
    return made.value


def free(address: int) -> None:
    """Give back what `allocate` returned."""
    _do("cuMemFree_v2", ctypes.c_uint64(address))


def handle(address: int) -> bytes:
    """Return what another process can `take` the memory by."""
    made = _Handle()
    _do("cuIpcGetMemHandle", ctypes.byref(made), ctypes.c_uint64(address))
    return bytes(made)


def take(name: bytes) -> int:
    """Return the address at which the memory of another process stands in this one."""
    made = ctypes.c_uint64()
    _do(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(made),
        _Handle.from_buffer_copy(name),
        ctypes.c_uint32(_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
    )
    return made.value


def shut(address: int) -> None:
    """Let go of what `take` returned."""
    _do("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def map_host(address: int, size: int) -> int:
    """Let the GPU reach memory of the host; return the address by which it does."""
    _do(
        "cuMemHostRegister_v2",
        ctypes.c_void_p(address),
        ctypes.c_size_t(size),
        ctypes.c_uint32(_HOST_PORTABLE | _HOST_DEVICEMAP),
    )
    made = ctypes.c_uint64()
    _do("cuMemHostGetDevicePointer_v2", ctypes.byref(made), ctypes.c_void_p(address), ctypes.c_uint32(0))
    return made.value


def unmap_host(address: int) -> None:
    """Take that back."""
    _do("cuMemHostUnregister", ctypes.c_void_p(address))


class Stream:
    """A stream of its own: those that torch hands out come from a pool and may be somebody else's too."""

    def __init__(self) -> None:
        made = ctypes.c_void_p()
        _do("cuStreamCreate", ctypes.byref(made), ctypes.c_uint32(_STREAM_NON_BLOCKING))
        self.number = int(made.value or 0)

    def close(self) -> None:
        """Let it go, once what is in it is done."""
        _do("cuStreamDestroy_v2", ctypes.c_void_p(self.number))


def order(stream: int, *, waits: Sequence[tuple[int, int]] = (), write: tuple[int, int] | None = None) -> None:
    """Let ``stream`` wait until each address of ``waits`` holds its number or more, and then ``write`` a number.

    What stands in the stream before a write is done, and seen by others, before the number is.
    """
    made = [_Operation(_WAIT_VALUE_64, address, value) for address, value in waits]
    if write is not None:
        made.append(_Operation(_WRITE_VALUE_64, *write))
    if made:
        array = (_Operation * len(made))(*made)
        _do("cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint32(len(made)), array, ctypes.c_uint32(0))
