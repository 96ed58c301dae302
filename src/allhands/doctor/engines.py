"""The installed software, the GPUs and the engines that can run here: `allhands engines`, and the stack section.

Reasons and fixes are those that ranks would report. Nothing is imported: versions are read from package metadata,
torch's files and the driver's library.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import msgspec
import psutil

from .._version import __version__
from ..diagnosis import count, join
from ..engines.mpi import library
from .finding import Finding, Section, wrap
from .proc_status import command_line, run_tool
from .request import Request

__all__ = ["Gpu", "GpuUser", "Installed", "Offer", "Probe", "check", "installed", "offers", "probe", "render", "report"]

_STACK = Section("stack")

# The oldest torch that allhands supports; pyproject.toml has the same.
_LEAST_TORCH = (2, 11)

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
    "hierarchical": "CPU tensors between ranks of several hosts, over TCP; needs nothing more",
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
        torch=_version("torch"),
        cuda=built.get("cuda", ""),
        hip=built.get("hip", ""),
        nccl=next((found for name in _NCCL_PACKAGES if (found := _version(name))), ""),
        driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else "",
        mpi=shutil.which("mpirun") or shutil.which("mpirun.openmpi") or "",
        mpi4py=_version("mpi4py"),
        core=util.find_spec("allhands._core") is not None,
    )


def _version(name: str) -> str:
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
    path = (_torch_folder() or Path()) / "lib" / "libtorch_python.so"
    with (
        contextlib.suppress(OSError, ValueError),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as bindings,
    ):
        return {name for name, symbol in _SYMBOLS.items() if bindings.find(symbol) >= 0}
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
    torch, driver = _no_torch(found), _driver_too_old(found)
    own, gpus = f"allhands {__version__}", count(probed.gpus, "GPU")
    nccl_version = f"NCCL {found.nccl}" if found.nccl else f"torch {found.torch}"
    mpirun = f", mpirun at {found.mpi}" if found.mpi else ""
    # For each engine its version, and what it lacks; what it needs first is reported first.
    table = {
        "shm": (own, core or torch or room),
        "gloo": (f"torch {found.torch}", torch or gloo),
        "hierarchical": (own, core or torch),
        "nccl": (f"{gpus}, {nccl_version}", torch or nccl or driver or _no_gpu("nccl", found, probed)),
        "cuda_ipc": (
            f"{gpus}, driver for CUDA {found.driver}",
            torch or driver or _no_gpu("cuda_ipc", found, probed) or _torch_for_cpus(found),
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


def _no_torch(found: Installed) -> dict[str, Any]:
    return _unless(
        found.torch,
        "version-mismatch",
        "torch is not installed in this Python",
        f"{sys.executable} has no package torch",
        "use the Python that the job uses, or install torch there",
        f"{sys.executable} -m pip install torch",
    )


def _driver_too_old(found: Installed) -> dict[str, Any]:
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


def _torch_for_cpus(found: Installed) -> dict[str, Any]:
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


# The doctor's checks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that has memory on a GPU."""

    pid: int
    command: str
    memory: str
    mine: bool

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command[:40]}, {self.memory})"


@dataclass(slots=True)
class Gpu:
    """One GPU."""

    index: str
    uuid: str
    name: str
    memory: str
    users: list[GpuUser] = field(default_factory=list)


def _find_gpus() -> tuple[list[Gpu], str]:
    """Return the GPUs with their users, and the error of nvidia-smi, "" if it has none."""
    rows, problem = _nvidia_smi("--query-gpu=index,uuid,name,memory.total")
    found = {row[1]: Gpu(row[0], row[1], row[2], row[3]) for row in rows if len(row) == 4}
    if found and not problem:
        users, _ = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
        for uuid, pid, memory in (row for row in users if len(row) == 3):
            if uuid in found and pid.isdecimal():
                try:
                    process = psutil.Process(int(pid))
                    command, mine = command_line(process), process.uids().effective == os.getuid()
                except psutil.Error:
                    command, mine = "of another container", False
                found[uuid].users.append(GpuUser(int(pid), command, memory, mine))
    return list(found.values()), problem


def _nvidia_smi(query: str) -> tuple[list[list[str]], str]:
    # It answers in a quarter of a second, or in one second if the driver has to initialise.
    output, problem = run_tool("nvidia-smi", query, "--format=csv,noheader", timeout_s=1.6)
    return [[part.strip() for part in line.split(",")] for line in output.splitlines()], problem


def check(request: Request) -> list[Finding]:
    """Report the installed software, whether torch and the driver fit, and the GPUs with their users."""
    found = installed()
    hardware = any(Path("/dev").glob("nvidia[0-9]*"))
    gpus, problem = _find_gpus()
    about_gpus = _gpus(request, found, gpus, problem, hardware=hardware)
    return [_torch(found), *about_gpus, _engines(found, offers(found, probe(found)))]


def _torch(found: Installed) -> Finding:
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if missing := _no_torch(found):
        return _STACK.red("torch", **missing)
    least = ".".join(map(str, _LEAST_TORCH))
    if tuple(int(part) for part in re.findall(r"\d+", found.torch)[:2]) < _LEAST_TORCH:
        return _STACK.red(
            "torch",
            "version-mismatch",
            f"torch {found.torch} is too old for allhands {__version__}",
            why=f"allhands needs torch {least} or later",
            fix="install a newer torch",
            commands=(f"{sys.executable} -m pip install 'torch>={least}'",),
        )
    built = f", CUDA {found.cuda}" if found.cuda else f", ROCm {found.hip}" if found.hip else ", for CPUs"
    # The version itself may contain it: 2.13.0+cpu.
    shown = found.torch if "+" in found.torch else f"{found.torch}{built}"
    why = f"allhands {__version__}, {python}"
    return _STACK.green("torch", f"torch {shown}", why, torch=found.torch, cuda=found.cuda)


def _gpus(request: Request, found: Installed, gpus: list[Gpu], problem: str, *, hardware: bool) -> Iterator[Finding]:
    visible = request.env.get("CUDA_VISIBLE_DEVICES")

    def missing_gpus(what: str, why: str, fix: str) -> Finding:
        commands = ("unset CUDA_VISIBLE_DEVICES",)
        return _STACK.yellow("gpus", "gpu-missing", what, why=why, fix=fix, commands=commands)

    if not hardware and not gpus:
        if found.cuda and visible:
            what, why = f"CUDA_VISIBLE_DEVICES={visible}, but there is no GPU", "there is no device of NVIDIA's in /dev"
            yield missing_gpus(what, why, "start the container with --gpus all, or unset the variable")
        return
    if not found.driver:
        yield _STACK.red(
            "driver",
            "driver-mismatch",
            "there are GPUs, but no driver library",
            why=f"libcuda.so.1 cannot be loaded{f'; nvidia-smi: {problem}' if problem else ''}",
            fix="install the driver; start a container with --gpus all (the NVIDIA runtime brings the library)",
            commands=("nvidia-smi",),
        )
        return
    names = join(sorted({gpu.name for gpu in gpus}))
    shown = f"{count(len(gpus), 'GPU')} ({names})" if gpus else "GPUs"
    if found.torch and not found.hip and (missing := _torch_for_cpus(found)):
        yield _STACK.yellow("driver", **missing)
    elif missing := _driver_too_old(found):
        yield _STACK.red("driver", **missing)
    else:
        what = f"{shown}, driver for CUDA {found.driver}" + (f", NCCL {found.nccl}" if found.nccl else "")
        why = f"torch is built for CUDA {found.cuda}" if found.cuda else ""
        yield _STACK.green("driver", what, why, driver=found.driver, nccl=found.nccl)
    if visible is not None and not [part for part in visible.split(",") if part.strip() not in {"", "-1"}]:
        what = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
        yield missing_gpus(what, f"the machine has {len(gpus)}", "unset it, or list some")
    ranks = request.local_ranks
    if gpus and ranks is not None and ranks > len(gpus):
        yield _STACK.yellow(
            "gpus",
            "gpu-shared",
            f"{ranks} ranks on {count(len(gpus), 'GPU')}",
            why="NCCL refuses two ranks on one GPU; backend='allhands' and Gloo do not",
            fix="start as many ranks as there are GPUs, or use backend='allhands'",
        )
    busy = [gpu for gpu in gpus if gpu.users]
    if busy:
        mine = any(user.mine for gpu in busy for user in gpu.users)
        yield _STACK.yellow(
            "gpu-users",
            "gpu-busy",
            f"{len(busy)} of {len(gpus)} GPUs {'is' if len(busy) == 1 else 'are'} in use",
            why=join([f"GPU {gpu.index}: {join([str(user) for user in gpu.users[:4]])}" for gpu in busy]),
            fix="wait for them, choose others with CUDA_VISIBLE_DEVICES" + (", or end your own" if mine else ""),
            commands=("nvidia-smi",),
            details={"pids": [user.pid for gpu in busy for user in gpu.users]},
        )


def _engines(found: Installed, offered: list[Offer]) -> Finding:
    if not found.core:
        shm = next(each for each in offered if each.name == "shm")
        return _STACK.red("engines", shm.slug, shm.what, why=shm.why, fix=shm.fix, commands=shm.commands)
    here = [each.name for each in offered if each.available]
    mpi = next(each for each in offered if each.name == "mpi")
    shown = f"engines {join(here)}; {mpi.version if mpi.available else 'no MPI'}"
    missing = {each.name: each.why for each in offered if not each.available}
    return _STACK.green("engines", shown, engines=here, mpi=found.mpi, missing=missing)


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
