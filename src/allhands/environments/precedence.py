"""Which source is used: arguments override environments, and of two that differ the inner one, if it can be inner."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..diagnosis import join
from ..errors import AllhandsError, fail
from .base import Detection, integer, me
from .world import Address

__all__ = ["ARGUMENTS", "apply_arguments", "is_outer"]

# source -> the variables of its rank and size; only sources that can be inside another one.
_VARIABLES: dict[str, tuple[str, str]] = {
    "lsf": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE"),
    "plain": ("RANK", "WORLD_SIZE"),
}
_ORDER = ("slurm", *_VARIABLES)
# The position of other environments in that order: MPI may contradict those that use it; in a cloud only RANK can.
_POSITION_OF = {"pbs": "flux", "azureml": "flux"}


def is_outer(found: Detection, env: Mapping[str, str], given: Collection[str]) -> bool:
    """Return whether ``found`` started the launcher of this process, so that a source inside it must be used.

    ``given`` names the values (rank, world_size) that the caller gives; they are not compared.
    Raises `launcher-mismatch` if two sources differ and neither can be inside the other.
    """
    position = found.source if found.source in _ORDER else _POSITION_OF.get(found.source, "hydra")
    inside = _ORDER[_ORDER.index(position) + 1 :]
    for source, names in _VARIABLES.items():
        rank, size = (integer(env, name) for name in names)
        pairs = [("rank", names[0], rank, found.rank), ("world_size", names[1], size, found.world_size)]
        differs = [
            (value, f"{found.reasons[value]} against {name}={theirs}")
            for value, name, theirs, ours in pairs
            if source in inside and None not in (theirs, ours) and theirs != ours and value not in given
        ]
        if differs and not _can_contain(found, source, rank, size, integer(env, "LOCAL_RANK")):
            unset = [name for _, name, theirs, _ in pairs if theirs is not None]
            raise _mismatch(found, differs, unset)
        if differs:
            return True
    return False


def _can_contain(outer: Detection, source: str, rank: int | None, size: int | None, local_rank: int | None) -> bool:
    """Return whether ``outer`` can be the agent of the launcher that gave ``rank`` and ``size`` (rules: see `base`)."""
    if rank is None or size is None:
        return False
    if outer.world_size == 1:
        return size > 1
    if outer.local_world_size != 1 and outer.local_world_size is not None:
        return False
    if source != "plain":
        # MPI's daemons and Flux's brokers: one per node is known, not assumed.
        return outer.local_world_size == 1
    if local_rank is None or outer.world_size is None or size % outer.world_size:
        return False
    per_task = size // outer.world_size
    return per_task > 1 and rank % per_task == local_rank


def _mismatch(outer: Detection, differs: list[tuple[str, str]], unset: list[str]) -> AllhandsError:
    values = join([value for value, _ in differs]).replace("_", " ")
    return fail(
        "launcher-mismatch",
        f"two sources disagree about this process's {values}: {join([pair for _, pair in differs])}",
        who=me(),
        why=f"{outer.reason}; {join(unset)} may be left over from a shell, a script or an image",
        fix=f"if {outer.source} started this process: unset {' '.join(unset)}\notherwise pass rank= and world_size=, "
        "or start it through one launcher only",
    )


ARGUMENTS = "arguments"


def apply_arguments(found: Detection, rank: int | None, world_size: int | None, coordinator: Address | None) -> None:
    """Override ``found`` by the caller's arguments."""
    changed = False
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is None:
            continue
        changed |= getattr(found, name) not in (None, _whole(name, value))
        found.set(f"the argument {name}={value}", **{name: value})
    if changed:
        # The environment's local values count other processes.
        for name in ("local_rank", "local_world_size", "node_rank"):
            if getattr(found, name) is not None:
                found.set(f"{found.source} numbers other processes than the arguments", **{name: None})
        if found.coordinator is None:
            found.reasons.pop("coordinator", None)
    if rank is not None and world_size is not None:
        found.source = ARGUMENTS
    if coordinator is not None:
        found.set(f"the argument coordinator={coordinator}", coordinator=coordinator)
        found.agent_store, found.hosted, found.socket = False, False, ""
        found.reasons.pop("socket", None)


def _whole(name: str, value: object) -> int:
    # bool is a subclass of int, but rank=True is a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise fail(
            "invalid-argument",
            f"{name}={value!r} is not a whole number",
            who=me(),
            fix=f"give {name} as an int",
        )
    return value
