"""The engines that can run on this machine, and what is missing for the others: `allhands engines`.

The doctor's check of the software uses it too. Reasons and fixes are those that ranks would report. Nothing is
imported: versions are read from package metadata, torch's files and the driver's library.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import msgspec

from .._version import __version__
from ..engines.mpi import library

__all__ = [
    "Installed",
    "Offer",
    "Probe",
    "installed",
    "offers",
    "package_version",
    "probe",
    "render",
    "report",
    "too_old",
]

# Increased if the JSON changes incompatibly: a field is removed or changes its meaning.
_SCHEMA = 1

# The smallest group, with slots of the default size.
_RANKS, _SLOT_BYTES = 2, 1 << 20

# torch's bindings contain these symbols only if torch was built with the backend.
_SYMBOLS = {"gloo": b"_ZN4c10d16ProcessGroupGloo", "nccl": b"_ZN4c10d16ProcessGroupNCCL"}

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")

# The limit of a line, for reading beside the names.
_WIDTH = 100

_MOVES = {
    "shm": "CPU tensors between ranks of one host, through shared memory",
    "gloo": "CPU tensors over TCP, by torch's Gloo",
    "rails": "CPU tensors between ranks of several hosts, over TCP; needs nothing more",
    "nccl": "CUDA tensors, with a GPU for each rank",
    "cuda_ipc": "CUDA tensors of ranks that share one GPU, which NCCL refuses",
    "mpi": "tensors of CPUs and GPUs, by an MPI library through mpi4py",
}


# Installed software -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Installed:
    """Installed versions, "" for what is not installed; ``driver`` is the newest CUDA that the driver can run."""

    torch: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    driver: str = ""
    mpi: str = ""
    mpi4py: str = ""
    core: bool = True


def installed() -> Installed:
    """Read the versions from package metadata, torch's version file, and the driver's library."""
    torch = package_version("torch")
    built = _torch_version_file() if torch else {}
    return Installed(
        torch=torch,
        cuda=built.get("cuda", ""),
        hip=built.get("hip", ""),
        nccl=next((found for name in _NCCL_PACKAGES if (found := package_version(name))), ""),
        driver=_driver(),
        mpi=shutil.which("mpirun") or shutil.which("mpirun.openmpi") or "",
        mpi4py=package_version("mpi4py"),
        core=util.find_spec("allhands._core") is not None,
    )


def package_version(name: str) -> str:
    """Return the installed version of a package, "" if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _torch_folder() -> Path | None:
    """Return the folder of torch, None if it is not installed."""
    spec = util.find_spec("torch")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return next((Path(place) for place in places if (Path(place) / "version.py").exists()), None)


def _torch_version_file() -> dict[str, str]:
    """Parse torch/version.py as text: importing it would import torch."""
    folder = _torch_folder()
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder is not None else ""
    except OSError:
        return {}
    return dict(re.findall(r"^(\w+)\s*(?::[^=]*)?=\s*'([^']*)'", text, flags=re.MULTILINE))


def too_old(found: Installed) -> bool:
    """Return whether the driver cannot run the CUDA that torch is built for."""
    # Within one major version of CUDA, older drivers run newer builds (minor version compatibility).
    return bool(found.cuda and found.driver) and int(found.cuda.partition(".")[0]) > int(found.driver.partition(".")[0])


def _driver() -> str:
    """Return the newest CUDA version that the driver supports, "" if there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


# Probes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """What engines need besides the software, found by trying. ``no_...`` are reasons, "" if there are none."""

    no_memory: str = ""
    gloo: bool = True
    nccl: bool = False
    gpus: int = 0
    visible: str | None = None
    no_mpi: str = ""
    family: str = ""
    mpi: str = ""
    launched: str = ""


def probe(found: Installed) -> Probe:
    """Try what engines need: shared memory, torch's bindings, the driver's GPUs, an MPI library."""
    built = _torch_backends() if found.torch else set()
    no_mpi, family, mpi = _mpi_library()
    return Probe(
        no_memory=_no_memory() if found.core else "",
        gloo="gloo" in built,
        nccl="nccl" in built,
        gpus=_count_gpus(found),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        no_mpi=no_mpi,
        family=family,
        mpi=mpi,
        launched=library.launched(),
    )


def _no_memory() -> str:
    """Allocate the shared memory of the smallest group, and release it."""
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


def _torch_backends() -> set[str]:
    """Return the backends that torch's bindings contain."""
    folder = _torch_folder()
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


def _count_gpus(found: Installed) -> int:
    """Return the number of GPUs that the driver shows this process; it obeys CUDA_VISIBLE_DEVICES."""
    if found.hip:
        return int(Path("/dev/kfd").exists())  # AMD's driver; only its presence is checked.
    if not found.driver:
        return 0
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    except (OSError, AttributeError):
        return 0


def _mpi_library() -> tuple[str, str, str]:
    """Return the reason why there is no MPI, or "" with the library's family, and its name and version."""
    if why := library.load_failure():
        return why, "", ""
    try:
        name = library.library_name()
    except (ImportError, OSError, RuntimeError) as problem:
        return f"mpi4py is installed, but cannot be imported: {problem}", "", ""
    return "", "openmpi" if name.startswith("Open MPI") else "mpich", name


# Offers -------------------------------------------------------------------------------------------------------


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``slug``, ``what``, ``why``, ``fix`` and ``commands`` are empty if it is available."""

    name: str
    moves: str
    available: bool = True
    version: str = ""
    slug: str = ""
    what: str = ""
    why: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()


def offers(found: Installed, probed: Probe) -> list[Offer]:
    """Return for each engine whether it can run, and what is missing if it cannot. Pure."""
    checks: dict[str, Callable[[], str | dict[str, Any]]] = {
        "shm": lambda: _shm(probed),
        "gloo": lambda: _gloo(found, probed),
        "rails": lambda: f"allhands {__version__}",
        "nccl": lambda: _nccl(found, probed),
        "cuda_ipc": lambda: _cuda_ipc(found, probed),
        "mpi": lambda: _mpi(found, probed),
    }
    return [_offer(name, _without_base(name, found) or check()) for name, check in checks.items()]


def _offer(name: str, result: str | dict[str, Any]) -> Offer:
    """Return the offer of a version, or of the parts that say what is missing."""
    if isinstance(result, str):
        return Offer(name=name, moves=_MOVES[name], version=result)
    return Offer(name=name, moves=_MOVES[name], available=False, **result)


def _missing(slug: str, what: str, why: str, fix: str, *commands: str) -> dict[str, Any]:
    return {"slug": slug, "what": what, "why": why, "fix": fix, "commands": commands}


def _without_base(name: str, found: Installed) -> dict[str, Any] | None:
    """Return what is missing if there is no torch, or no C core for an engine that needs it."""
    if name in {"shm", "rails"} and not found.core:
        return _missing(
            "engine-failed",
            "the C core of allhands is not built",
            "there is no module allhands._core beside the package",
            "install allhands again, or build it in place",
            "python setup.py build_ext --inplace",
        )
    if found.torch:
        return None
    return _missing(
        "version-mismatch",
        "torch is not installed in this Python",
        f"{sys.executable} has no package torch",
        "use the Python that the job uses, or install torch there",
        f"{sys.executable} -m pip install torch",
    )


def _shm(probed: Probe) -> str | dict[str, Any]:
    if not probed.no_memory:
        return f"allhands {__version__}"
    return _missing(
        "shm-too-small",
        "there is no room for the shared memory of the smallest group",
        probed.no_memory,
        "free memory, or raise the memory limit of the container or cgroup",
    )


def _gloo(found: Installed, probed: Probe) -> str | dict[str, Any]:
    if probed.gloo:
        return f"torch {found.torch}"
    return _missing(
        "backend-unknown",
        "gloo was asked for, but this torch was built without it",
        f"torch {found.torch} has no gloo in it",
        "install torch's own wheel, or build it with USE_GLOO=1",
        f"{sys.executable} -m pip install --force-reinstall torch",
    )


def _nccl(found: Installed, probed: Probe) -> str | dict[str, Any]:
    if probed.nccl:
        return _on_gpus("nccl", found, probed, f"NCCL {found.nccl}" if found.nccl else f"torch {found.torch}")
    return _missing(
        "nccl-missing",
        "nccl was asked for, but this torch was built without NCCL",
        f"torch {found.torch} has no NCCL in it (CPU and macOS builds do not)",
        "install a CUDA build of torch, or use backend='gloo'",
        f"{sys.executable} -m pip install --force-reinstall torch",
    )


def _cuda_ipc(found: Installed, probed: Probe) -> str | dict[str, Any]:
    result = _on_gpus("cuda_ipc", found, probed, f"driver for CUDA {found.driver}")
    if found.cuda or not isinstance(result, str):
        return result
    return _missing(
        "driver-mismatch",
        f"there are GPUs, but torch {found.torch} is not built for CUDA",
        "torch/version.py names no CUDA",
        "install a CUDA build of torch to use them",
        f"{sys.executable} -m pip install --force-reinstall torch",
    )


def _on_gpus(name: str, found: Installed, probed: Probe, version: str) -> str | dict[str, Any]:
    if too_old(found):
        return _missing(
            "driver-mismatch",
            f"the driver runs CUDA up to {found.driver}, torch {found.torch} is built for CUDA {found.cuda}",
            "from cuDriverGetVersion and torch/version.py (observed)",
            "install a newer driver, or a torch that is built for an older CUDA",
            "nvidia-smi",
        )
    if not probed.gpus:
        nothing = "the driver counts no GPU" if found.driver else "there is no driver: libcuda.so.1 cannot be loaded"
        return _missing(
            "gpu-missing",
            f"{name} was asked for, but this process sees no GPU",
            f"CUDA_VISIBLE_DEVICES={probed.visible}" if probed.visible is not None else nothing,
            "run where nvidia-smi shows a GPU (in a container: --gpus all), or use backend='gloo'",
            "nvidia-smi -L",
        )
    return f"{probed.gpus} GPU{'s' * (probed.gpus > 1)}, {version}"


def _mpi(found: Installed, probed: Probe) -> str | dict[str, Any]:
    why = probed.no_mpi
    if not why and not found.mpi and not probed.launched:
        why = f"the library of {probed.mpi} is installed, but no mpirun, which has to start the ranks"
    if why:
        return _missing("mpi-missing", "mpi was asked for, but no MPI can be used here", why, library.INSTALL)
    mpirun = f", mpirun at {found.mpi}" if found.mpi else ""
    return f"{probed.mpi} with mpi4py {found.mpi4py}{mpirun}"


# Report -------------------------------------------------------------------------------------------------------


def report() -> dict[str, Any]:
    """Return the output of `allhands engines --json`."""
    found = installed()
    probed = probe(found)
    return {
        "schema": _SCHEMA,
        "allhands": __version__,
        "torch": found.torch,
        "cuda": found.cuda,
        "gpus": probed.gpus,
        "mpi": {"family": probed.family, "library": probed.mpi, "mpi4py": found.mpi4py, "mpirun": found.mpi},
        "engines": [msgspec.to_builtins(each) for each in offers(found, probed)],
    }


def render(report: dict[str, Any]) -> str:
    """Return a report as lines: each engine with the tensors that it moves, and what is missing if it cannot run."""
    width = max(len(each["name"]) for each in report["engines"])
    columns = min(_WIDTH, max(shutil.get_terminal_size((_WIDTH, 24)).columns, 60))
    shown: list[str] = []
    for each in report["engines"]:
        shown.append(f"{each['name']:{width}}  {'yes' if each['available'] else 'no '}  {each['moves']}")
        for key, text in _rows(each):
            shown += textwrap.wrap(
                text,
                columns,
                initial_indent=f"{'':{width}}       {key:5} ",
                subsequent_indent=" " * (width + 13),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(shown)


def _rows(each: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if each["available"]:
        yield "with", each["version"]
        return
    yield "why", each["why"]
    yield "fix", each["fix"]
    yield from (("type", command) for command in each["commands"])
    yield "more", f"allhands explain {each['slug']}"
