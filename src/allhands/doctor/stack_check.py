"""Checks of the software and the GPUs: torch, CUDA, the driver, NCCL, MPI, and whether they fit. Imports none of it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .._version import __version__
from ..diagnosis import count, join
from .engines import Installed, Offer, driver_too_old, installed, no_torch, offers, probe, torch_for_cpus
from .finding import Finding, Section
from .proc_status import command_line, run_tool
from .request import Request

__all__ = ["Gpu", "GpuUser", "check"]

_STACK = Section("stack")

# The oldest torch that allhands supports; pyproject.toml has the same.
_LEAST_TORCH = (2, 11)


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
    if missing := no_torch(found):
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
    if not hardware and not gpus:
        if found.cuda and visible:
            yield _STACK.yellow(
                "gpus",
                "gpu-missing",
                f"CUDA_VISIBLE_DEVICES={visible}, but there is no GPU",
                why="there is no device of NVIDIA's in /dev",
                fix="start the container with --gpus all, or unset the variable",
                commands=("unset CUDA_VISIBLE_DEVICES",),
            )
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
    if found.torch and not found.hip and (missing := torch_for_cpus(found)):
        yield _STACK.yellow("driver", **missing)
    elif missing := driver_too_old(found):
        yield _STACK.red("driver", **missing)
    else:
        what = f"{shown}, driver for CUDA {found.driver}" + (f", NCCL {found.nccl}" if found.nccl else "")
        why = f"torch is built for CUDA {found.cuda}" if found.cuda else ""
        yield _STACK.green("driver", what, why, driver=found.driver, nccl=found.nccl)
    if visible is not None and not [part for part in visible.split(",") if part.strip() not in {"", "-1"}]:
        yield _STACK.yellow(
            "gpus",
            "gpu-missing",
            f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU",
            why=f"the machine has {len(gpus)}",
            fix="unset it, or list some",
            commands=("unset CUDA_VISIBLE_DEVICES",),
        )
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
