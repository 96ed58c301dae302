"""The MPI library of this process: found by what started the process, loaded through mpi4py, initialised by us.

mpi4py's wheels speak to either family of MPI, chosen when they are imported. Nothing here communicates.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import platform
import struct
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ... import _core
from ...errors import AllhandsError, fail

__all__ = [
    "COMMANDS",
    "ask",
    "family",
    "finalise",
    "handle",
    "initialise",
    "lacking",
    "launched",
    "load",
    "missing",
    "port",
    "world_of",
]

# What to type where something is missing, most of it as root.
COMMANDS = (
    "as root `apt-get install openmpi-bin libopenmpi-dev` (or `apt-get install mpich`), then "
    "`pip install 'allhands[mpi]'` (mpi4py and numpy); in a checkout `make mpi` does both"
)

# mpi4py's own variables: whoever sets them has decided.
_ABI, _PATH = "MPI4PY_MPIABI", "MPI4PY_LIBMPI"

# What tells of the mpirun that started this process. Slurm's and others' launchers set one of these too.
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE")
_HYDRA = ("PMI_SIZE", "PMI_RANK", "PMI_FD", "PMI_PORT")

# What mpi4py's wheel asks for, and what Debian calls MPICH's library.
_STANDARD, _DEBIANS = "libmpi.so.12", "libmpich.so.12"

# <elf.h>, which the standard library does not name.
_MACHINES = {"x86_64": 62, "aarch64": 183}
_NEEDED, _SONAME, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT = 1, 14, 4, 5, 6, 10, 11

# MPI_THREAD_MULTIPLE, the same number in both families.
_MULTIPLE = 3

# What the core calls, in the order of `enum ah_mpi_call` in csrc/mpi.h.
_CALLS = (
    "MPI_Isend",
    "MPI_Irecv",
    "MPI_Send_init",
    "MPI_Recv_init",
    "MPI_Startall",
    "MPI_Testall",
    "MPI_Cancel",
    "MPI_Request_free",
    "MPI_Iallgather",
    "MPI_Ibcast",
    "MPI_Error_string",
)

# Bytes of a handle in each family: a pointer, and a number. Another MPI than these two has other types behind them.
_HANDLE_BYTES = {"openmpi": 8, "mpich": 4}

_lock = threading.Lock()


def launched(env: Mapping[str, str] = os.environ) -> str:
    """Return which family's mpirun started this process: openmpi, mpich, or "" for neither."""
    if any(name in env for name in _OPEN_MPI):
        return "openmpi"
    return "mpich" if any(name in env for name in _HYDRA) else ""


@functools.cache
def lacking() -> str:
    """Return in words why no MPI can be used by this process, "" where one can. Initialises nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"the module mpi4py is not installed in {sys.prefix}"
    try:
        _extension()
    except (ImportError, OSError, RuntimeError) as problem:
        return f"mpi4py is here, but finds no MPI library that it can load: {_first(problem)}"
    return ""


def missing(why: str, who: str, fix: str = COMMANDS, **more: Any) -> AllhandsError:
    """Return mpi-missing."""
    return fail("mpi-missing", "mpi was asked for, but no MPI can be used here", who=who, why=why, fix=fix, **more)


@functools.cache
def _extension() -> tuple[str, ctypes.CDLL]:
    """Find mpi4py's extension for the MPI of this process and map it with its library; return where, and a handle."""
    with _chosen():
        spec = importlib.util.find_spec("mpi4py.MPI")
        if spec is None or not spec.origin:
            raise ImportError("mpi4py has no extension module for this MPI")
        try:
            handle = ctypes.CDLL(spec.origin, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
        except OSError as problem:
            if _STANDARD not in str(problem):
                raise
            _stand_in()
            handle = ctypes.CDLL(spec.origin, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
    return spec.origin, handle


def load() -> Any:
    """Return mpi4py's module MPI. It initialises nothing, and nothing at exit: both are ours to decide."""
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        _extension()
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    return importlib.import_module("mpi4py.MPI")


def initialise() -> bool:
    """Initialise MPI, in as long as that takes; return whether it was us who did it. Other threads run on meanwhile."""
    with _lock:
        handle = _extension()[1]
        if ask(handle, "MPI_Initialized"):
            return False
        given = ctypes.c_int()
        if status := handle.MPI_Init_thread(None, None, _MULTIPLE, ctypes.byref(given)):
            raise RuntimeError(f"MPI_Init_thread failed with error {status}")
        return True


def finalise() -> None:
    """End MPI: waits for all ranks. Other threads run on meanwhile."""
    _extension()[1].MPI_Finalize()


def family() -> str:
    """Return which family the library of this process belongs to: openmpi or mpich."""
    return "openmpi" if hasattr(_extension()[1], "ompi_mpi_comm_self") else "mpich"


def port(module: Any, *, alone: bool) -> _core.Port:
    """Return the library as the core calls it: one call at a time where it wants to be ``alone`` with each."""
    kind = family()
    found = module._sizeof(module.Request)  # noqa: SLF001  # mpi4py offers it by no other name
    if found != _HANDLE_BYTES[kind]:
        raise missing(
            f"{world_of(module)} has handles of {found} bytes, as neither Open MPI nor MPICH has",
            f"this process (pid {os.getpid()})",
            "use Open MPI or MPICH; MPI4PY_MPIABI=openmpi or =mpich chooses the library",
        )
    library = _extension()[1]
    addresses = tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _CALLS)
    return _core.Port(kind, addresses, handle(module, module.REQUEST_NULL), alone)


def handle(module: Any, of: Any) -> int:
    """Return the number by which the library knows one of mpi4py's objects."""
    return int(module._handleof(of))  # noqa: SLF001  # mpi4py offers it by no other name


def ask(handle: ctypes.CDLL | None, question: str) -> bool:
    """Ask `MPI_Initialized` or `MPI_Finalized`."""
    answer = ctypes.c_int()
    getattr(handle or _extension()[1], question)(ctypes.byref(answer))
    return bool(answer.value)


def world_of(module: Any) -> str:
    """Return the name and version of the MPI library, for people."""
    return (
        str(module.Get_library_version()).split("\0", maxsplit=1)[0].split(",", maxsplit=1)[0].splitlines()[0].strip()
    )


class _chosen:  # noqa: N801  # used as `with _chosen():`
    """Let mpi4py take the family whose mpirun started this process, for the length of a block.

    Where nothing says which, it takes what it finds, and MPICH if it finds nothing but that is here.
    """

    def __enter__(self) -> None:
        self._set = False
        if os.environ.get(_ABI) or os.environ.get(_PATH):
            return
        family = launched() or ("" if _loads("libmpi.so") or _loads("libmpi.so.40") else "mpich" * _loads(_DEBIANS))
        if family:
            os.environ[_ABI], self._set = family, True

    def __exit__(self, *_: object) -> None:
        if self._set:
            del os.environ[_ABI]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError:
        return False
    return True


def _stand_in() -> None:
    """Map a library without contents that is called as the wheel wants it and leads to the one that is here.

    The linker compares the name that a library gives itself, so neither a link nor loading it first would do.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None or not _loads(_DEBIANS):
        raise OSError(f"{_STANDARD}: cannot open shared object file, and there is no {_DEBIANS} either")
    descriptor = os.memfd_create(_STANDARD, os.MFD_CLOEXEC)
    try:
        os.write(descriptor, _elf(machine, _STANDARD, _DEBIANS))
        ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=os.RTLD_LAZY | os.RTLD_LOCAL)
    finally:
        os.close(descriptor)


def _elf(machine: int, name: str, needed: str) -> bytes:
    """Return a 64-bit shared object that has a name, needs another, and holds nothing."""
    texts = b"\0" + name.encode() + b"\0" + needed.encode() + b"\0"
    header, segment, segments = 64, 56, 2
    dynamic = header + segment * segments
    symbols = dynamic + 16 * 8
    table = symbols + 24
    strings = table + 16
    end = strings + len(texts)
    entries = (
        (_NEEDED, 2 + len(name)),
        (_SONAME, 1),
        (_HASH, table),
        (_STRTAB, strings),
        (_SYMTAB, symbols),
        (_STRSZ, len(texts)),
        (_SYMENT, 24),
        (0, 0),
    )
    return b"".join(
        (
            b"\x7fELF\x02\x01\x01".ljust(16, b"\0"),
            struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, header, 0, 0, header, segment, segments, 64, 0, 0),
            struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, end, end, 0x1000),
            struct.pack("<IIQQQQQQ", 2, 6, dynamic, dynamic, dynamic, 16 * 8, 16 * 8, 8),
            *(struct.pack("<QQ", *entry) for entry in entries),
            bytes(24),  # the one symbol that every table begins with
            struct.pack("<IIII", 1, 1, 0, 0),
            texts,
        )
    )


def _first(problem: BaseException) -> str:
    """Return what ``problem`` says, on one line."""
    return "; ".join(str(problem).splitlines()[:3]) or type(problem).__name__
