"""Which software is installed: from package metadata, torch's files and the driver's library. Nothing is imported."""

from __future__ import annotations

import ctypes
import re
import shutil
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

__all__ = ["Installed", "installed", "too_old", "torch_folder"]


@dataclass(frozen=True, slots=True)
class Installed:
    """What is there. "" for what is not; ``driver`` is the newest CUDA that the driver can run."""

    torch: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    driver: str = ""
    mpi: str = ""
    mpi4py: str = ""
    core: bool = True


def installed() -> Installed:
    """Find out from package metadata, from torch's own version file, and from the driver's library."""
    torch = _version("torch")
    built = _torch_built_with() if torch else {}
    nccl = next(
        (found for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11") if (found := _version(name))),
        "",
    )
    return Installed(
        torch=torch,
        cuda=built.get("cuda", ""),
        hip=built.get("hip", ""),
        nccl=nccl,
        driver=_driver(),
        mpi=shutil.which("mpirun") or shutil.which("mpirun.openmpi") or "",
        mpi4py=_version("mpi4py"),
        core=util.find_spec("allhands._core") is not None,
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _torch_built_with() -> dict[str, str]:
    """Read torch/version.py as text: importing it would import torch."""
    folder = torch_folder()
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder is not None else ""
    except OSError:
        return {}
    return dict(re.findall(r"^(\w+)\s*(?::[^=]*)?=\s*'([^']*)'", text, flags=re.MULTILINE))


def torch_folder() -> Path | None:
    """Return where torch is installed, None where it is not."""
    spec = util.find_spec("torch")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    return next((Path(place) for place in places if (Path(place) / "version.py").exists()), None)


def too_old(found: Installed) -> bool:
    """Tell whether the driver cannot run the CUDA that torch is built for."""
    # Within one major version of CUDA, older drivers run newer builds (minor version compatibility).
    return bool(found.cuda and found.driver) and int(found.cuda.partition(".")[0]) > int(found.driver.partition(".")[0])


def _driver() -> str:
    """Return the newest CUDA version that the driver supports, "" where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
