"""Which engines can run on this machine, and what is missing for those that cannot: `allhands engines`.

The doctor's stack section asks here too. Reasons and fixes are those that ranks would get. torch is not imported: what
it was built with is read from its files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .._version import __version__
from ..engines.mpi import library
from .versions import Installed, installed, too_old, torch_folder

__all__ = ["Ground", "Offer", "look", "offers", "render", "report"]

# Counts changes of the JSON that a program could trip over: names that go or change their meaning, not new ones.
_SCHEMA = 1

# The smallest group, with slots of the default size.
_RANKS, _SLOT_BYTES = 2, 1 << 20

# torch's bindings refer to the classes that it was built with by these symbols, and hold none of those that it was not.
_SYMBOLS = {"gloo": b"_ZN4c10d16ProcessGroupGloo", "nccl": b"_ZN4c10d16ProcessGroupNCCL"}

# Lines longer than this are hard to read beside their names.
_WIDTH = 100


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``slug``, ``what``, ``why``, ``fix`` and ``commands`` are empty where it is available."""

    name: str
    moves: str
    available: bool = True
    version: str = ""
    slug: str = ""
    what: str = ""
    why: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ground:
    """What engines stand on, beside the software: found by trying. ``no_…`` are reasons, "" where there are none."""

    no_memory: str = ""
    gloo: bool = True
    nccl: bool = False
    gpus: int = 0
    visible: str | None = None
    no_mpi: str = ""
    family: str = ""
    mpi: str = ""
    launched: str = ""


def look(found: Installed) -> Ground:
    """Try what engines need: memory without a name, torch's bindings, the driver's GPUs, an MPI library."""
    built = _built_with() if found.torch else set()
    no_mpi, family, mpi = _mpi()
    return Ground(
        no_memory=_no_memory() if found.core else "",
        gloo="gloo" in built,
        nccl="nccl" in built,
        gpus=_gpus(found),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        no_mpi=no_mpi,
        family=family,
        mpi=mpi,
        launched=library.launched(),
    )


def _no_memory() -> str:
    """Make the shared memory of the smallest group, and let it go."""
    from .. import _core

    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memfd_create"
    try:
        descriptor = os.memfd_create("allhands-trial", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as problem:
        return f"the kernel refused memfd_create: {problem.strerror}"
    try:
        os.posix_fallocate(descriptor, 0, _core.segment_bytes(_RANKS, _SLOT_BYTES))
    except OSError as problem:
        return f"the kernel refused the pages: {problem.strerror}"
    finally:
        os.close(descriptor)
    return ""


def _built_with() -> set[str]:
    """Return which of torch's own backends its bindings have."""
    folder = torch_folder()
    if folder is None:
        return set()
    try:
        with (
            (folder / "lib" / "libtorch_python.so").open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as bindings,
        ):
            return {name for name, symbol in _SYMBOLS.items() if bindings.find(symbol) >= 0}
    except (OSError, ValueError):
        return set()


def _gpus(found: Installed) -> int:
    """Return how many GPUs this process may use, by the driver's own count: CUDA_VISIBLE_DEVICES has its say."""
    if found.hip:
        return int(Path("/dev/kfd").exists())  # AMD's driver; that there is one is all that is asked.
    if not found.driver:
        return 0
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    except (OSError, AttributeError):
        return 0


def _mpi() -> tuple[str, str, str]:
    """Return why there is no MPI, or "" with the family and the library's own name and version."""
    if why := library.load_failure():
        return why, "", ""
    try:
        name = library.library_name()
    except (ImportError, OSError, RuntimeError) as problem:
        return f"mpi4py is installed, but cannot be imported: {problem}", "", ""
    return "", "openmpi" if name.startswith("Open MPI") else "mpich", name


# What follows from it -----------------------------------------------------------------------------------------


def offers(found: Installed, ground: Ground) -> list[Offer]:
    """Say of each engine whether it can run, and what is missing where it cannot. Pure."""
    return [
        _shm(found, ground),
        _gloo(found, ground),
        _rails(found),
        _nccl(found, ground),
        _cuda_ipc(found, ground),
        _mpi_offer(found, ground),
    ]


def _missing(name: str, moves: str, slug: str, **parts: Any) -> Offer:
    return Offer(name=name, moves=moves, available=False, slug=slug, **parts)


def _without_torch(name: str, moves: str) -> Offer:
    return _missing(
        name,
        moves,
        "version-mismatch",
        what="torch is not installed in this Python",
        why=f"{sys.executable} has no package torch",
        fix="use the Python that the job uses, or install torch there",
        commands=(f"{sys.executable} -m pip install torch",),
    )


def _without_core(name: str, moves: str) -> Offer:
    return _missing(
        name,
        moves,
        "engine-failed",
        what="the C core of allhands is not built",
        why="there is no module allhands._core beside the package",
        fix="install allhands again, or build it in place",
        commands=("python setup.py build_ext --inplace",),
    )


def _shm(found: Installed, ground: Ground) -> Offer:
    moves = "CPU tensors between ranks of one host, through shared memory"
    if not found.core:
        return _without_core("shm", moves)
    if not found.torch:
        return _without_torch("shm", moves)
    if ground.no_memory:
        return _missing(
            "shm",
            moves,
            "shm-too-small",
            what="there is no room for the shared memory of the smallest group",
            why=ground.no_memory,
            fix="free memory, or raise the memory limit of the container or cgroup",
        )
    return Offer(name="shm", moves=moves, version=f"allhands {__version__}")


def _gloo(found: Installed, ground: Ground) -> Offer:
    moves = "CPU tensors over TCP, by torch's Gloo"
    if not found.torch:
        return _without_torch("gloo", moves)
    if not ground.gloo:
        return _missing(
            "gloo",
            moves,
            "backend-unknown",
            what="gloo was asked for, but this torch was built without it",
            why=f"torch {found.torch} has no gloo in it",
            fix="install torch's own wheel, or build it with USE_GLOO=1",
            commands=(f"{sys.executable} -m pip install --force-reinstall torch",),
        )
    return Offer(name="gloo", moves=moves, version=f"torch {found.torch}")


def _rails(found: Installed) -> Offer:
    moves = "CPU tensors between ranks of several hosts, over TCP; needs nothing more"
    if not found.core:
        return _without_core("rails", moves)
    return (
        Offer(name="rails", moves=moves, version=f"allhands {__version__}")
        if found.torch
        else _without_torch("rails", moves)
    )


def _nccl(found: Installed, ground: Ground) -> Offer:
    moves = "CUDA tensors, with a GPU for each rank"
    if not found.torch:
        return _without_torch("nccl", moves)
    if not ground.nccl:
        return _missing(
            "nccl",
            moves,
            "nccl-missing",
            what="nccl was asked for, but this torch was built without NCCL",
            why=f"torch {found.torch} has no NCCL in it (CPU and macOS builds do not)",
            fix="install a CUDA build of torch, or use backend='gloo'",
            commands=(f"{sys.executable} -m pip install --force-reinstall torch",),
        )
    return _on_gpus("nccl", moves, found, ground, f"NCCL {found.nccl}" if found.nccl else f"torch {found.torch}")


def _cuda_ipc(found: Installed, ground: Ground) -> Offer:
    moves = "CUDA tensors of ranks that share one GPU, which NCCL refuses"
    if not found.torch:
        return _without_torch("cuda_ipc", moves)
    offer = _on_gpus("cuda_ipc", moves, found, ground, f"driver for CUDA {found.driver}")
    if not offer.available or found.cuda:
        return offer
    return _missing(
        "cuda_ipc",
        moves,
        "driver-mismatch",
        what=f"there are GPUs, but torch {found.torch} is not built for CUDA",
        why="torch/version.py names no CUDA",
        fix="install a CUDA build of torch to use them",
        commands=(f"{sys.executable} -m pip install --force-reinstall torch",),
    )


def _on_gpus(name: str, moves: str, found: Installed, ground: Ground, version: str) -> Offer:
    if too_old(found):
        return _missing(
            name,
            moves,
            "driver-mismatch",
            what=f"the driver runs CUDA up to {found.driver}, torch {found.torch} is built for CUDA {found.cuda}",
            why="cuDriverGetVersion and torch/version.py say so (observed)",
            fix="install a newer driver, or a torch that is built for an older CUDA",
            commands=("nvidia-smi",),
        )
    if not ground.gpus:
        nothing = "the driver counts no GPU" if found.driver else "there is no driver: libcuda.so.1 cannot be loaded"
        return _missing(
            name,
            moves,
            "gpu-missing",
            what=f"{name} was asked for, but this process sees no GPU",
            why=f"CUDA_VISIBLE_DEVICES={ground.visible}" if ground.visible is not None else nothing,
            fix="run where nvidia-smi shows a GPU (in a container: --gpus all), or use backend='gloo'",
            commands=("nvidia-smi -L",),
        )
    return Offer(name=name, moves=moves, version=f"{ground.gpus} GPU{'s' * (ground.gpus > 1)}, {version}")


def _mpi_offer(found: Installed, ground: Ground) -> Offer:
    moves = "tensors of CPUs and GPUs, by an MPI library through mpi4py"
    if not found.torch:
        return _without_torch("mpi", moves)
    why, fix = ground.no_mpi, library.INSTALL
    if not why and not found.mpi and not ground.launched:
        why = f"the library of {ground.mpi} is installed, but no mpirun, which has to start the ranks"
    if why:
        what = "mpi was asked for, but no MPI can be used here"
        return _missing("mpi", moves, "mpi-missing", what=what, why=why, fix=fix)
    mpirun = f", mpirun at {found.mpi}" if found.mpi else ""
    return Offer(name="mpi", moves=moves, version=f"{ground.mpi} with mpi4py {found.mpi4py}{mpirun}")


# For programs and people --------------------------------------------------------------------------------------


def report() -> dict[str, Any]:
    """Return what `allhands engines --json` prints."""
    found = installed()
    ground = look(found)
    return {
        "schema": _SCHEMA,
        "allhands": __version__,
        "torch": found.torch,
        "cuda": found.cuda,
        "gpus": ground.gpus,
        "mpi": {"family": ground.family, "library": ground.mpi, "mpi4py": found.mpi4py, "mpirun": found.mpi},
        "engines": [msgspec.to_builtins(each) for each in offers(found, ground)],
    }


def render(report: dict[str, Any]) -> str:
    """Put a report into lines: each engine with what it moves, and what is missing where it cannot run."""
    width = max(len(each["name"]) for each in report["engines"])
    columns = min(_WIDTH, max(shutil.get_terminal_size((_WIDTH, 24)).columns, 60))
    lines: list[str] = []
    for each in report["engines"]:
        lines.append(f"{each['name']:{width}}  {'yes' if each['available'] else 'no '}  {each['moves']}")
        rows = [("with", each["version"])] if each["available"] else _why(each)
        for key, text in rows:
            start = f"{'':{width}}       {key:5} "
            lines += textwrap.wrap(
                text,
                columns,
                initial_indent=start,
                subsequent_indent=" " * len(start),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def _why(each: dict[str, Any]) -> list[tuple[str, str]]:
    commands = [("type", command) for command in each["commands"]]
    return [("why", each["why"]), ("fix", each["fix"]), *commands, ("more", f"allhands explain {each['slug']}")]
