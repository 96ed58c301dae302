"""The calls of NVIDIA's driver that torch does not offer: memory of a GPU shared by processes, and waits on a stream.

Through ctypes on the library that every driver installs, in the context that torch made current in this thread.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = [
    "DriverError",
    "allocate",
    "batch_memory_ops",
    "close_handle",
    "context",
    "create_stream",
    "destroy_stream",
    "enter",
    "export_handle",
    "free",
    "map_host",
    "open_handle",
    "unmap_host",
]

# From <cuda.h>: CU_IPC_HANDLE_SIZE, flags and operations.
_HANDLE_BYTES = 64
_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1
_HOST_PORTABLE, _HOST_DEVICEMAP = 1, 2
_WAIT_VALUE_64, _WRITE_VALUE_64 = 4, 5


class DriverError(RuntimeError):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


_Kind = TypeVar("_Kind", ctypes.c_void_p, ctypes.c_uint64, _Handle)


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: the fields that waits and writes share, padded to its 48 bytes."""

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
        text = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'error').decode()} ({code})")


def _made(kind: type[_Kind], name: str, *args: Any) -> _Kind:
    """Call a function that writes its result, of type ``kind``, to its first argument."""
    made = kind()
    _do(name, ctypes.byref(made), *args)
    return made


def context() -> int:
    """Return the context that is current in this thread."""
    return int(_made(ctypes.c_void_p, "cuCtxGetCurrent").value or 0)


def enter(context: int) -> None:
    """Make ``context`` current in this thread. torch does that only in threads that have used it."""
    _do("cuCtxSetCurrent", ctypes.c_void_p(context))


def allocate(size: int) -> int:
    """Allocate ``size`` bytes of the current device outside torch's caching allocator; return their address."""
    return _made(ctypes.c_uint64, "cuMemAlloc_v2", ctypes.c_size_t(size)).value


def free(address: int) -> None:
    """Free memory of `allocate`."""
    _do("cuMemFree_v2", ctypes.c_uint64(address))


def export_handle(address: int) -> bytes:
    """Return the handle by which another process opens the memory."""
    return bytes(_made(_Handle, "cuIpcGetMemHandle", ctypes.c_uint64(address)))


def open_handle(handle: bytes) -> int:
    """Map memory of another process; return its address here."""
    flags = ctypes.c_uint32(_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return _made(ctypes.c_uint64, "cuIpcOpenMemHandle_v2", _Handle.from_buffer_copy(handle), flags).value


def close_handle(address: int) -> None:
    """Unmap memory of `open_handle`."""
    _do("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def map_host(address: int, size: int) -> int:
    """Register memory of the host with the GPU; return its address there."""
    place = ctypes.c_void_p(address)
    _do("cuMemHostRegister_v2", place, ctypes.c_size_t(size), ctypes.c_uint32(_HOST_PORTABLE | _HOST_DEVICEMAP))
    return _made(ctypes.c_uint64, "cuMemHostGetDevicePointer_v2", place, ctypes.c_uint32(0)).value


def unmap_host(address: int) -> None:
    """Undo `map_host`."""
    _do("cuMemHostUnregister", ctypes.c_void_p(address))


def create_stream() -> int:
    """Create a stream of its own: torch's streams come from a pool and may have several users."""
    return int(_made(ctypes.c_void_p, "cuStreamCreate", ctypes.c_uint32(_STREAM_NON_BLOCKING)).value or 0)


def destroy_stream(stream: int) -> None:
    """Destroy a stream of `create_stream`, once its work is done."""
    _do("cuStreamDestroy_v2", ctypes.c_void_p(stream))


def batch_memory_ops(
    stream: int, *, waits: Sequence[tuple[int, int]] = (), write: tuple[int, int] | None = None
) -> None:
    """Make ``stream`` wait until each address of ``waits`` holds its value or more, and then ``write`` a value.

    Work in the stream before the write is complete, and visible to other processes, before the value is.
    """
    made = [_Operation(_WAIT_VALUE_64, address, value) for address, value in waits]
    if write is not None:
        made.append(_Operation(_WRITE_VALUE_64, *write))
    if made:
        array = (_Operation * len(made))(*made)
        _do("cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), ctypes.c_uint32(len(made)), array, ctypes.c_uint32(0))
