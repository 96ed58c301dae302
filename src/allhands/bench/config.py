"""What a bench is asked to do, read from its options and checked before anything is started. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from difflib import get_close_matches
from pathlib import Path

import msgspec

from ..errors import AllhandsError, fail
from .operations import OPERATIONS

__all__ = [
    "CONTESTANTS",
    "ENGINES",
    "MODELS",
    "PEERS",
    "CollectiveConfig",
    "DdpConfig",
    "check_memory",
    "collective_config",
    "ddp_config",
    "memory_needed",
    "missing_mpi",
    "parse_peers",
    "parse_sizes",
]

# Whom we can be measured against, in the order in which they are shown.
PEERS = ("gloo", "mpi")

# What of ours can be measured on one host.
ENGINES = ("shm", "gloo", "mpi")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# What a process with torch, Gloo and MPI in it takes before it holds any tensor; measured 250 to 320 MiB.
_PROCESS_BYTES = 320 << 20

_WHO = "allhands bench"


class CollectiveConfig(msgspec.Struct, frozen=True):
    """What the ranks are to measure; sizes in bytes, ``peers`` in the order of `PEERS`."""

    operation: str
    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    peers: tuple[str, ...] = ()
    floor: bool = False
    device: str = "cpu"
    hosts: int = 1
    # Which engine of ours is measured: one of `ENGINES`.
    engine: str = "shm"

    @property
    def needs_mpirun(self) -> bool:
        """Whether MPI's launcher has to start the ranks."""
        return "mpi" in {self.engine, *self.peers}

    def host(self, rank: int) -> int:
        """Return the host that ``rank`` is on: as many ranks on each as can be, in their order."""
        return rank * self.hosts // self.ranks


def collective_config(
    operation: str,
    *,
    ranks: int,
    sizes_text: str,
    against: str,
    rounds: int,
    floor: bool = False,
    plot: str = "",
    device: str = "cpu",
    hosts: int = 1,
    engine: str = "shm",
) -> CollectiveConfig:
    """Return the plan that the options ask for.

    Raises invalid-argument for what makes no sense (more memory than there is included), mpi-missing where MPI is
    asked for and not here.
    """
    what = OPERATIONS[operation]
    # Sizes that are not a whole number for every rank become the next one that is; each is measured once.
    wanted = tuple(dict.fromkeys(what.size(size, ranks) for size in parse_sizes(sizes_text)))
    made = CollectiveConfig(operation, ranks, wanted, rounds, parse_peers(against), floor, device, hosts, engine)
    if hosts > 1:
        _check_hosts(made)
    check_memory(made)
    if device == "cuda":
        _check_gpu(made)
    if made.needs_mpirun:
        _check_mpi()
    if plot:
        _check_plot(plot)
    return made


def parse_sizes(text: str) -> list[int]:
    """Read ``4:64M`` (each four times the one before) or ``4,1K,1M``, in bytes."""
    try:
        given = [_bytes(part) for part in text.split(":" if ":" in text else ",")]
    except (ValueError, KeyError):
        given = []
    if ":" not in text and given:
        return given
    if len(given) != 2 or given[0] > given[1]:
        raise fail(
            "invalid-argument",
            f"--sizes {text!r} is not a range of sizes",
            who=_WHO,
            fix="write 4:64M (from, to), or 4,1K,1M; the least is 4 bytes",
        )
    found = given[:1]
    while found[-1] * 4 <= given[1]:
        found.append(found[-1] * 4)
    return found if found[-1] == given[1] else [*found, given[1]]


def _bytes(text: str) -> int:
    number = text.strip().rstrip("KMGkmg")
    value = int(number) * _UNITS[text.strip()[len(number) :].upper()]
    if value < 4:
        raise ValueError(text)
    return value


def parse_peers(text: str) -> tuple[str, ...]:
    """Read ``gloo,mpi``; ``none`` means nobody."""
    given = [name.strip().lower() for name in text.split(",")]
    for name in given:
        if name not in PEERS and given != ["none"]:
            near = get_close_matches(name, PEERS, n=1)
            raise fail(
                "invalid-argument",
                f"--against {text!r}: there is no peer {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                who=_WHO,
                fix=f"name some of {', '.join(PEERS)}, or none",
            )
    return tuple(name for name in PEERS if name in given)


def memory_needed(asked: CollectiveConfig) -> int:
    """Return how many bytes of memory ``asked`` takes in all, roughly and rather too many."""
    largest = max(asked.sizes)
    held = OPERATIONS[asked.operation].held(largest, asked.ranks)
    # Gloo and MPI hold up to as much again while they work; the floor copies from one buffer to another.
    each = held + (largest if asked.peers else 0) + (2 * largest if asked.floor else 0)
    return int(asked.ranks * (_PROCESS_BYTES + each))


def check_memory(asked: CollectiveConfig, available: int | None = None) -> None:
    """Raise invalid-argument where ``asked`` needs more than ``available`` bytes (by default: what there is)."""
    free = _available() if available is None else available
    if memory_needed(asked) > free:
        raise fail(
            "invalid-argument",
            f"{asked.operation} of up to {max(asked.sizes):,} bytes on {asked.ranks} ranks needs about "
            f"{memory_needed(asked) / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are available",
            who=_WHO,
            fix="give a smaller upper end in --sizes, or fewer --ranks" + (", or no --floor" if asked.floor else ""),
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
        raise fail(
            "invalid-argument",
            "--against mpi measures tensors of the CPU only",
            who=_WHO,
            why="an MPI takes memory of a GPU only where it was built for that",
            fix="measure CUDA tensors with --against gloo",
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
        raise fail(
            "invalid-argument",
            f"--hosts {asked.hosts}: {wrong}",
            who=_WHO,
            fix="give at least as many --ranks, and neither --floor, --device cuda nor --against mpi",
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
        raise fail(
            "invalid-argument",
            "--plot needs matplotlib, which is not installed",
            who=_WHO,
            fix="pip install matplotlib (or 'allhands[examples]'), or take the figures from --json",
        )
    target = Path(path)
    if target.suffix.lower() not in {".png", ".svg", ".pdf"} or not target.absolute().parent.is_dir():
        raise fail(
            "invalid-argument",
            f"--plot {path!r} is not a file that can be written",
            who=_WHO,
            fix="give a name that ends in .png, .svg or .pdf, in a folder that exists",
        )


# Training ---------------------------------------------------------------------------------------------------

# Small enough for two cores and a minute, large enough that gradients fill several buckets. The last is the transformer
# with 16 tokens in place of 512: as many gradients of the same size come of them, and what computing varies by, which
# is a share of what it takes, hides less of what they take to move.
MODELS = ("mlp", "cnn", "transformer", "transformer-16")

# Who trains, in the order in which they are shown: our class on our backend, torch's on ours, torch's on Gloo; the
# module itself on all ranks at once, with a barrier after each backward pass and nothing else between them, and with
# nothing at all; and on rank 0 alone while the others sleep.
CONTESTANTS = ("allhands", "torch", "gloo", "lockstep", "apart", "single")


class DdpConfig(msgspec.Struct, frozen=True):
    """What the ranks are to train. ``who`` limits the contestants, for the measurement of memory."""

    ranks: int
    models: tuple[str, ...]
    rounds: int
    who: tuple[str, ...] = CONTESTANTS
    # For `RankProcesses`, which also runs a `CollectiveConfig`.
    operation: str = "ddp"
    needs_mpirun: bool = False


def ddp_config(ranks: int, models: str, rounds: int) -> DdpConfig:
    """Return what the options ask for; raises invalid-argument for a model that there is not."""
    names = tuple(name.strip() for name in models.split(","))
    for name in names:
        if name not in MODELS:
            near = get_close_matches(name, MODELS, n=1)
            raise fail(
                "invalid-argument",
                f"--models {models!r}: there is no model {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                who="allhands bench ddp",
                fix=f"name some of {', '.join(MODELS)}",
            )
    return DdpConfig(ranks, names, rounds)
