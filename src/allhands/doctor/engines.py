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
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import msgspec

from .._version import __version__
from ..engines.mpi import library
from .finding import wrap

__all__ = [
    "Installed",
    "Offer",
    "Probe",
    "driver_too_old",
    "installed",
    "no_torch",
    "offers",
    "package_version",
    "probe",
    "render",
    "report",
    "torch_for_cpus",
]

# Increased if the JSON changes incompatibly: a field is removed or changes its meaning.
_SCHEMA = 1

_REINSTALL = f"{sys.executable} -m pip install --force-reinstall torch"

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
    folder, built = _torch_folder(), {}
    if folder is not None:
        # As text: importing it would import torch.
        text = (folder / "version.py").read_text(encoding="utf-8")
        built = dict(re.findall(r"^(\w+)\s*(?::[^=]*)?=\s*'([^']*)'", text, flags=re.MULTILINE))
    driver = _ask_driver("cuDriverGetVersion")
    return Installed(
        torch=package_version("torch"),
        cuda=built.get("cuda", ""),
        hip=built.get("hip", ""),
        nccl=next((found for name in _NCCL_PACKAGES if (found := package_version(name))), ""),
        driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else "",
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


def _ask_driver(function: str) -> int:
    """Return the number that ``function`` of the driver's library yields; 0 if it fails or there is no driver."""
    number = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        return 0 if getattr(driver, function)(ctypes.byref(number)) else number.value
    except (OSError, AttributeError):
        return 0


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
    no_mpi, mpi = library.load_failure(), ""
    if not no_mpi:
        try:
            mpi = library.library_name()
        except (ImportError, OSError, RuntimeError) as problem:
            no_mpi = f"mpi4py is installed, but cannot be imported: {problem}"
    return Probe(
        no_memory=_no_memory() if found.core else "",
        gloo="gloo" in built,
        nccl="nccl" in built,
        # Of AMD's driver only the presence is checked.
        gpus=int(Path("/dev/kfd").exists()) if found.hip else _ask_driver("cuDeviceGetCount"),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        no_mpi=no_mpi,
        family=("openmpi" if mpi.startswith("Open MPI") else "mpich") if mpi else "",
        mpi=mpi,
        launched=library.launched(),
    )


def _no_memory() -> str:
    """Allocate the shared memory of the smallest group, and release it; return why that fails, or ""."""
    from .. import _core

    try:
        with os.fdopen(os.memfd_create("allhands-trial", os.MFD_CLOEXEC), "wb") as memory:
            os.posix_fallocate(memory.fileno(), 0, _core.segment_bytes(_RANKS, _SLOT_BYTES))
    except OSError as problem:
        return f"the kernel refused the pages: {problem.strerror}"
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
    core = _unless(
        found.core,
        "engine-failed",
        "the C core of allhands is not built",
        "there is no module allhands._core beside the package",
        "install allhands again, or build it in place",
        "python setup.py build_ext --inplace",
    )
    room = _unless(
        not probed.no_memory,
        "shm-too-small",
        "there is no room for the shared memory of the smallest group",
        probed.no_memory,
        "free memory, or raise the memory limit of the container or cgroup",
    )
    gloo = _unless(
        probed.gloo,
        "backend-unknown",
        "gloo was asked for, but this torch was built without it",
        f"torch {found.torch} has no gloo in it",
        "install torch's own wheel, or build it with USE_GLOO=1",
        _REINSTALL,
    )
    nccl = _unless(
        probed.nccl,
        "nccl-missing",
        "nccl was asked for, but this torch was built without NCCL",
        f"torch {found.torch} has no NCCL in it (CPU and macOS builds do not)",
        "install a CUDA build of torch, or use backend='gloo'",
        _REINSTALL,
    )
    no_mpi = probed.no_mpi
    if not no_mpi and not found.mpi and not probed.launched:
        no_mpi = f"the library of {probed.mpi} is installed, but no mpirun, which has to start the ranks"
    mpi = _unless(not no_mpi, "mpi-missing", "mpi was asked for, but no MPI can be used here", no_mpi, library.INSTALL)
    torch, driver = no_torch(found), driver_too_old(found)
    own, gpus = f"allhands {__version__}", f"{probed.gpus} GPU{'s' * (probed.gpus > 1)}"
    nccl_version = f"NCCL {found.nccl}" if found.nccl else f"torch {found.torch}"
    mpirun = f", mpirun at {found.mpi}" if found.mpi else ""
    # For each engine its version, and what it lacks; what it needs first is reported first.
    table = {
        "shm": (own, core or torch or room),
        "gloo": (f"torch {found.torch}", torch or gloo),
        "rails": (own, core or torch),
        "nccl": (f"{gpus}, {nccl_version}", torch or nccl or driver or _no_gpu("nccl", found, probed)),
        "cuda_ipc": (
            f"{gpus}, driver for CUDA {found.driver}",
            torch or driver or _no_gpu("cuda_ipc", found, probed) or torch_for_cpus(found),
        ),
        "mpi": (f"{probed.mpi} with mpi4py {found.mpi4py}{mpirun}", torch or mpi),
    }
    return [
        Offer(name=name, moves=_MOVES[name], available=not lacks, **(lacks or {"version": version}))
        for name, (version, lacks) in table.items()
    ]


def _unless(available: object, slug: str, what: str, why: str, fix: str, *commands: str) -> dict[str, Any]:
    """Return the parts of a finding about something that is missing, {} if it is ``available``."""
    return {} if available else {"slug": slug, "what": what, "why": why, "fix": fix, "commands": commands}


def no_torch(found: Installed) -> dict[str, Any]:
    """Return what is missing if torch is not installed."""
    return _unless(
        found.torch,
        "version-mismatch",
        "torch is not installed in this Python",
        f"{sys.executable} has no package torch",
        "use the Python that the job uses, or install torch there",
        f"{sys.executable} -m pip install torch",
    )


def driver_too_old(found: Installed) -> dict[str, Any]:
    """Return what is missing if the driver cannot run the CUDA that torch is built for."""
    needed, runs = (int(version.partition(".")[0] or 0) for version in (found.cuda, found.driver))
    return _unless(
        # Within one major version of CUDA, older drivers run newer builds (minor version compatibility).
        not runs or needed <= runs,
        "driver-mismatch",
        f"the driver runs CUDA up to {found.driver}, torch {found.torch} is built for CUDA {found.cuda}",
        "from cuDriverGetVersion and torch/version.py (observed)",
        "install a newer driver, or a torch that is built for an older CUDA",
        "nvidia-smi",
    )


def torch_for_cpus(found: Installed) -> dict[str, Any]:
    """Return what is missing to use GPUs if torch is not built for CUDA."""
    return _unless(
        found.cuda,
        "driver-mismatch",
        f"there are GPUs, but torch {found.torch} is not built for CUDA",
        "torch/version.py names no CUDA",
        "install a CUDA build of torch to use them",
        _REINSTALL,
    )


def _no_gpu(name: str, found: Installed, probed: Probe) -> dict[str, Any]:
    nothing = "the driver counts no GPU" if found.driver else "there is no driver: libcuda.so.1 cannot be loaded"
    return _unless(
        probed.gpus,
        "gpu-missing",
        f"{name} was asked for, but this process sees no GPU",
        f"CUDA_VISIBLE_DEVICES={probed.visible}" if probed.visible is not None else nothing,
        "run where nvidia-smi shows a GPU (in a container: --gpus all), or use backend='gloo'",
        "nvidia-smi -L",
    )


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
        rows = [("with", each["version"])]
        if not each["available"]:
            rows = [("why", each["why"]), ("fix", each["fix"]), *(("type", command) for command in each["commands"])]
            rows.append(("more", f"allhands explain {each['slug']}"))
        for label, text in rows:
            shown += wrap(f"{'':{width}}       {label:5} ", text, columns)
    return "\n".join(shown)
