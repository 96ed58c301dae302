"""The software: torch, CUDA, the driver, NCCL, MPI, and whether they fit. Nothing of it is imported."""

from __future__ import annotations

import re
import shutil
import sys

from .._version import __version__
from ..diagnosis import join
from . import engines
from .finding import Finding, green, red, yellow
from .gpus import Card, cards, device_files
from .request import Case
from .versions import Installed, installed, too_old

__all__ = ["check"]

_SECTION = "stack"

# What allhands is made for; pyproject.toml has the same.
_LEAST_TORCH = (2, 11)


def check(case: Case) -> list[Finding]:
    """Say what is installed, whether torch and driver fit, which GPUs are there and who uses them."""
    found = installed()
    hardware = device_files()
    seen, trouble = cards() if hardware or shutil.which("nvidia-smi") else ([], "")
    results = [_torch(found)]
    results += _gpus(case, found, seen, trouble, hardware=hardware)
    results.append(_engines(found, engines.offers(found, engines.look(found))))
    return results


def _torch(found: Installed) -> Finding:
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if not found.torch:
        return red(
            _SECTION,
            "torch",
            "version-mismatch",
            "torch is not installed in this Python",
            why=f"{sys.executable} ({python}) has no package torch",
            fix="use the Python that the job uses, or install torch there",
            commands=(f"{sys.executable} -m pip install torch",),
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", found.torch)[:2])
    if numbers < _LEAST_TORCH:
        return red(
            _SECTION,
            "torch",
            "version-mismatch",
            f"torch {found.torch} is too old for allhands {__version__}",
            why=f"allhands needs torch {'.'.join(map(str, _LEAST_TORCH))} or later",
            fix="install a newer torch",
            commands=(f"{sys.executable} -m pip install 'torch>={'.'.join(map(str, _LEAST_TORCH))}'",),
        )
    built = f", CUDA {found.cuda}" if found.cuda else f", ROCm {found.hip}" if found.hip else ", for CPUs"
    # The version itself often says it: 2.13.0+cpu.
    shown = found.torch if "+" in found.torch else f"{found.torch}{built}"
    return green(
        _SECTION, "torch", f"torch {shown}", f"allhands {__version__}, {python}", torch=found.torch, cuda=found.cuda
    )


def _gpus(case: Case, found: Installed, seen: list[Card], trouble: str, *, hardware: bool) -> list[Finding]:
    visible = case.env.get("CUDA_VISIBLE_DEVICES")
    if not hardware and not seen:
        if found.cuda and visible:
            return [
                yellow(
                    _SECTION,
                    "gpus",
                    "gpu-missing",
                    f"CUDA_VISIBLE_DEVICES={visible}, but there is no GPU",
                    why="there is no device of NVIDIA's in /dev",
                    fix="start the container with --gpus all, or unset the variable",
                    commands=("unset CUDA_VISIBLE_DEVICES",),
                )
            ]
        return []
    if not found.driver:
        return [
            red(
                _SECTION,
                "driver",
                "driver-mismatch",
                "there are GPUs, but no driver library",
                why=f"libcuda.so.1 cannot be loaded{f'; nvidia-smi: {trouble}' if trouble else ''}",
                fix="install the driver; start a container with --gpus all (the NVIDIA runtime brings the library)",
                commands=("nvidia-smi",),
            )
        ]
    results = [_fit(found, seen)]
    if visible is not None and not [part for part in visible.split(",") if part.strip() not in {"", "-1"}]:
        results.append(
            yellow(
                _SECTION,
                "gpus",
                "gpu-missing",
                f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU",
                why=f"the machine has {len(seen)}",
                fix="unset it, or name some",
                commands=("unset CUDA_VISIBLE_DEVICES",),
            )
        )
    ranks = case.local_ranks
    if seen and ranks is not None and ranks > len(seen):
        results.append(
            yellow(
                _SECTION,
                "gpus",
                "gpu-shared",
                f"{ranks} ranks on {len(seen)} GPU{'s' if len(seen) > 1 else ''}",
                why="NCCL refuses two ranks on one GPU; backend='allhands' and Gloo do not",
                fix="start as many ranks as there are GPUs, or use backend='allhands'",
            )
        )
    busy = [card for card in seen if card.users]
    if busy:
        shown = join([f"GPU {card.index}: {join([str(user) for user in card.users[:4]])}" for card in busy])
        mine = any(user.mine for card in busy for user in card.users)
        results.append(
            yellow(
                _SECTION,
                "gpu-users",
                "gpu-busy",
                f"{len(busy)} of {len(seen)} GPUs {'is' if len(busy) == 1 else 'are'} in use",
                why=shown,
                fix="wait for them, choose others with CUDA_VISIBLE_DEVICES" + (", or end your own" if mine else ""),
                commands=("nvidia-smi",),
                details={"pids": [user.pid for card in busy for user in card.users]},
            )
        )
    return results


def _fit(found: Installed, seen: list[Card]) -> Finding:
    names = join(sorted({card.name for card in seen}))
    shown = f"{len(seen)} GPU{'s' if len(seen) != 1 else ''} ({names})" if seen else "GPUs"
    if found.torch and not found.cuda and not found.hip:
        return yellow(
            _SECTION,
            "driver",
            "driver-mismatch",
            f"{shown}, but torch {found.torch} is built for CPUs only",
            why="torch/version.py names no CUDA",
            fix="install a CUDA build of torch to use them",
            commands=("pip install torch",),
        )
    if too_old(found):
        return red(
            _SECTION,
            "driver",
            "driver-mismatch",
            f"the driver runs CUDA up to {found.driver}, torch {found.torch} is built for CUDA {found.cuda}",
            why="cuDriverGetVersion and torch/version.py say so (observed)",
            fix="install a newer driver, or a torch that is built for an older CUDA",
            commands=("nvidia-smi",),
        )
    nccl = f", NCCL {found.nccl}" if found.nccl else ""
    return green(
        _SECTION,
        "driver",
        f"{shown}, driver for CUDA {found.driver}{nccl}",
        f"torch is built for CUDA {found.cuda}" if found.cuda else "",
        driver=found.driver,
        nccl=found.nccl,
    )


def _engines(found: Installed, offered: list[engines.Offer]) -> Finding:
    if not found.core:
        shm = next(each for each in offered if each.name == "shm")
        return red(_SECTION, "engines", shm.slug, shm.what, why=shm.why, fix=shm.fix, commands=shm.commands)
    here = [each.name for each in offered if each.available]
    mpi = next(each for each in offered if each.name == "mpi")
    shown = f"engines {join(here)}; {mpi.version if mpi.available else 'no MPI'}"
    missing = {each.name: each.why for each in offered if not each.available}
    return green(_SECTION, "engines", shown, engines=here, mpi=found.mpi, missing=missing)
