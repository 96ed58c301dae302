"""The options of a bench, checked before anything is started. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from ..errors import AllhandsError, fail
from .operations import OPERATIONS

__all__ = [
    "CollectiveConfig",
    "DdpConfig",
    "RollCallConfig",
    "check_memory",
    "collective_config",
    "ddp_config",
    "memory_needed",
    "missing_mpi",
    "parse_peers",
    "parse_sizes",
]

# The engines to compare with, in the order of the table.
_PEERS = ("gloo", "mpi")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# What a process with torch, Gloo and MPI takes before it holds any tensor; measured 250 to 320 MiB.
_PROCESS_BYTES = 320 << 20

_WHO = "allhands bench"


class CollectiveConfig(msgspec.Struct, frozen=True):
    """What the ranks measure; sizes in bytes, ``peers`` in the order of the table."""

    operation: str
    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    peers: tuple[str, ...] = ()
    floor: bool = False
    device: str = "cpu"
    hosts: int = 1
    # The engine of ours: shm, gloo or mpi.
    engine: str = "shm"

    remedy: ClassVar[str] = (
        "mend what the ranks say above; or measure fewer --ranks, smaller --sizes, or --against fewer peers"
    )

    @property
    def needs_mpirun(self) -> bool:
        """Whether MPI's launcher has to start the ranks."""
        return "mpi" in {self.engine, *self.peers}

    def host(self, rank: int) -> int:
        """Return the host of ``rank``: ranks are distributed evenly, in order."""
        return rank * self.hosts // self.ranks


def collective_config(
    operation: str, *, ranks: int, sizes_text: str, against: str, plot: str | None = None, **options: Any
) -> CollectiveConfig:
    """Return the plan of the options.

    Raises invalid-argument for options that contradict each other or need more memory than there is, mpi-missing where
    MPI is needed and not installed.
    """
    what = OPERATIONS[operation]
    # A size that is not a whole number for every rank becomes the next one that is; each is measured once.
    sizes = tuple(dict.fromkeys(what.size(size, ranks) for size in parse_sizes(sizes_text)))
    made = CollectiveConfig(operation, ranks, sizes, peers=parse_peers(against), **options)
    if made.hosts > 1:
        _check_hosts(made)
    check_memory(made)
    if made.device == "cuda":
        _check_gpu(made)
    if made.needs_mpirun:
        _check_mpi()
    if plot:
        _check_plot(plot)
    return made


def _invalid(what: str, fix: str, why: str = "") -> AllhandsError:
    return fail("invalid-argument", what, who=_WHO, why=why, fix=fix)


def parse_sizes(text: str) -> list[int]:
    """Read ``4:64M`` (each four times the one before) or ``4,1K,1M``, in bytes."""
    try:
        given = [_bytes(part) for part in text.split(":" if ":" in text else ",")]
    except (ValueError, KeyError):
        given = []
    if ":" not in text and given:
        return given
    if len(given) != 2 or given[0] > given[1]:
        raise _invalid(
            f"--sizes {text!r} is not a range of sizes", "write 4:64M (from, to), or 4,1K,1M; the least is 4 bytes"
        )
    size, last = given
    found = []
    while size < last:
        found.append(size)
        size *= 4
    return [*found, last]


def _bytes(text: str) -> int:
    number = text.strip().rstrip("KMGkmg")
    value = int(number) * _UNITS[text.strip()[len(number) :].upper()]
    if value < 4:
        raise ValueError(text)
    return value


def parse_peers(text: str) -> tuple[str, ...]:
    """Read ``gloo,mpi``; ``none`` means no peer."""
    if text.strip().lower() == "none":
        return ()
    given = _names("--against", "peer", text.lower(), _PEERS, ", or none")
    return tuple(name for name in _PEERS if name in given)


def _names(option: str, kind: str, text: str, known: Sequence[str], more: str = "") -> list[str]:
    """Return the comma-separated names of an option; raise invalid-argument for one that is not ``known``."""
    given = [name.strip() for name in text.split(",")]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise _invalid(
                f"{option} {text!r}: there is no {kind} {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                f"name some of {', '.join(known)}{more}",
            )
    return given


def memory_needed(asked: CollectiveConfig) -> int:
    """Return an upper estimate of the memory in bytes that ``asked`` takes in all."""
    largest = max(asked.sizes)
    held = OPERATIONS[asked.operation].held(largest, asked.ranks)
    # Gloo and MPI hold up to as much again while they work; the floor copies from one buffer to another.
    each = held + (largest if asked.peers else 0) + (2 * largest if asked.floor else 0)
    return int(asked.ranks * (_PROCESS_BYTES + each))


def check_memory(asked: CollectiveConfig, available: int | None = None) -> None:
    """Raise invalid-argument where ``asked`` needs more than ``available`` bytes (by default: what is free)."""
    free = _available() if available is None else available
    if memory_needed(asked) > free:
        raise _invalid(
            f"{asked.operation} of up to {max(asked.sizes):,} bytes on {asked.ranks} ranks needs about "
            f"{memory_needed(asked) / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are available",
            "give a smaller upper end in --sizes, or fewer --ranks" + (", or no --floor" if asked.floor else ""),
        )


def _available() -> int:
    import psutil

    free = int(psutil.virtual_memory().available)
    # The limit of a container, less what its processes hold; its page cache can be reclaimed.
    folder = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, KeyError, ValueError):  # no cgroup version 2 at its usual place, or no limit
        used = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        limit = int((folder / "memory.max").read_text())
        free = min(free, limit - int(used["anon"]) - int(used.get("shmem", 0)))
    return max(0, free)


def _check_gpu(asked: CollectiveConfig) -> None:
    if not Path("/proc/driver/nvidia/version").exists():
        raise fail(
            "gpu-missing",
            "--device cuda was asked for, but this machine has no driver for a GPU",
            who=_WHO,
            why="there is no /proc/driver/nvidia/version",
            fix="run where nvidia-smi shows a GPU, or measure with --device cpu",
        )
    if "mpi" in asked.peers:
        raise _invalid(
            "--against mpi measures tensors of the CPU only",
            "measure CUDA tensors with --against gloo",
            "an MPI takes memory of a GPU only where it was built for that",
        )


def _check_hosts(asked: CollectiveConfig) -> None:
    wrong = ""
    if asked.hosts > asked.ranks:
        wrong = f"{asked.ranks} ranks cannot be on {asked.hosts} hosts"
    elif asked.needs_mpirun:
        wrong = "mpirun starts its ranks on this host only"
    elif asked.floor:
        wrong = "the floor is that of shared memory"
    elif asked.device != "cpu":
        wrong = "ranks on several hosts share no GPU"
    if wrong:
        raise _invalid(
            f"--hosts {asked.hosts}: {wrong}",
            "give at least as many --ranks, and neither --floor, --device cuda nor --against mpi",
        )


def _check_mpi() -> None:
    missing = [] if shutil.which("mpirun") else ["mpirun"]
    missing += [name for name in ("mpi4py", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_mpi(f"{' and '.join(missing)} cannot be found")


def missing_mpi(why: str) -> AllhandsError:
    """Return the error that says how to get an MPI."""
    return fail(
        "mpi-missing",
        "mpi was asked for, but no MPI can be used here",
        who=_WHO,
        why=why,
        fix="as root `apt-get install openmpi-bin libopenmpi-dev`, then `pip install 'allhands[mpi]'` (mpi4py and "
        "numpy); in a checkout `make mpi` does both; or measure with --against gloo",
    )


def _check_plot(path: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise _invalid(
            "--plot needs matplotlib, which is not installed",
            "pip install matplotlib (or 'allhands[examples]'), or take the figures from --json",
        )
    target = Path(path)
    if target.suffix.lower() not in {".png", ".svg", ".pdf"} or not target.absolute().parent.is_dir():
        raise _invalid(
            f"--plot {path!r} is not a file that can be written",
            "give a name that ends in .png, .svg or .pdf, in a folder that exists",
        )


# Training ---------------------------------------------------------------------------------------------------

# Small enough for two cores and a minute, large enough that gradients fill several buckets. transformer-16 is the
# transformer with 16 tokens in place of 512: gradients of the same number and size, but a shorter step, so that the
# variation of the computation, a share of it, hides less of the communication.
_MODELS = ("mlp", "cnn", "transformer", "transformer-16")


class DdpConfig(msgspec.Struct, frozen=True):
    """What the ranks train.

    ``who`` are the contestants: our class on our backend, torch's on ours, torch's on Gloo; the bare module on all
    ranks at once with a barrier after each backward pass, and without one; and on rank 0 alone while the others sleep.
    """

    ranks: int
    models: tuple[str, ...]
    rounds: int
    who: tuple[str, ...] = ("allhands", "torch", "gloo", "lockstep", "apart", "single")

    operation: ClassVar[str] = "ddp"
    needs_mpirun: ClassVar[bool] = False
    remedy: ClassVar[str] = "mend what the ranks say above; or measure fewer --ranks or --models"


def ddp_config(ranks: int, models: str, rounds: int) -> DdpConfig:
    """Return the plan of the options; raise invalid-argument for an unknown model."""
    return DdpConfig(ranks, tuple(_names("--models", "model", models, _MODELS)), rounds)


# Roll call --------------------------------------------------------------------------------------------------


class RollCallConfig(msgspec.Struct, frozen=True):
    """What to simulate. ``host`` "" means the Unix socket ``unix``; ``end`` is "death" or "leave"."""

    members: int
    coordinator: int
    unix: str
    host: str
    port: int
    token: bytes
    end: str
    timeout_s: float

    operation: ClassVar[str] = "rollcall"
    # One process simulates all members.
    ranks: ClassVar[int] = 1
    needs_mpirun: ClassVar[bool] = False
    remedy: ClassVar[str] = (
        "measure fewer --members, or look at this machine's limits (memory, ulimit -n, net.core.somaxconn)"
    )
