"""Which source is used: arguments override environments, and of two that differ the inner one, if it can be inner."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ..diagnosis import join
from ..errors import AllhandsError, fail
from .base import Detection, integer, me, parse_address
from .world import Address

__all__ = ["ARGUMENTS", "Claim", "address_argument", "apply_arguments", "claims", "inner"]

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


class Claim(msgspec.Struct, frozen=True):
    """The rank and size that one pair of variables gives; None if not set."""

    source: str
    rank: int | None
    size: int | None


def claims(env: Mapping[str, str]) -> list[Claim]:
    """Return the claim of each pair of variables, in order of precedence."""
    made = [Claim(source, integer(env, rank), integer(env, size)) for source, (rank, size) in _VARIABLES.items()]
    return [claim for claim in made if claim.rank is not None or claim.size is not None]


def inner(outer: Detection, env: Mapping[str, str], given: Collection[str] = ()) -> str:
    """Return the source inside ``outer`` that must be used, "" if there is none.

    ``given`` names the values (rank, world_size) that the caller gives; they are not compared.
    Raises `launcher-mismatch` if two sources differ and neither can be inside the other.
    """
    position = outer.source if outer.source in _ORDER else _POSITION_OF.get(outer.source, "hydra")
    start = _ORDER.index(position) + 1
    for claim in claims(env):
        if claim.source not in _ORDER[start:]:
            continue
        differs = [
            name
            for name, theirs, ours in (
                ("rank", claim.rank, outer.rank),
                ("world_size", claim.size, outer.world_size),
            )
            if theirs is not None and ours is not None and theirs != ours and name not in given
        ]
        if not differs:
            continue
        if not _inside(outer, claim, integer(env, "LOCAL_RANK")):
            raise _mismatch(outer, claim, differs)
        return claim.source
    return ""


def _inside(outer: Detection, claim: Claim, local_rank: int | None) -> bool:
    """Whether ``outer`` can be the agent of the launcher that made ``claim`` (rules: see `base`)."""
    if claim.rank is None or claim.size is None:
        return False
    if outer.world_size == 1:
        return claim.size > 1
    if outer.local_world_size != 1 and outer.local_world_size is not None:
        return False
    if claim.source != "plain":
        # MPI's daemons and Flux's brokers: one per node is known, not assumed.
        return outer.local_world_size == 1
    if local_rank is None or outer.world_size is None or claim.size % outer.world_size:
        return False
    per_task = claim.size // outer.world_size
    return per_task > 1 and claim.rank % per_task == local_rank


def _mismatch(outer: Detection, claim: Claim, differs: list[str]) -> AllhandsError:
    names = dict(zip(("rank", "world_size"), _VARIABLES[claim.source], strict=True))
    values = {"rank": claim.rank, "world_size": claim.size}
    pairs = [f"{outer.reasons[name]} against {names[name]}={values[name]}" for name in differs]
    unset = [names[name] for name, value in values.items() if value is not None]
    return fail(
        "launcher-mismatch",
        f"two sources disagree about this process's {join(differs).replace('_', ' ')}: {join(pairs)}",
        who=me(),
        why=f"{outer.reason}; {join(unset)} may be left over from a shell, a script or an image",
        fix=f"if {outer.source} started this process: unset {' '.join(unset)}\notherwise pass rank= and world_size=, "
        "or start it through one launcher only",
    )


ARGUMENTS = "arguments"
_LOCAL = ("local_rank", "local_world_size", "node_rank")


def address_argument(given: Address | str) -> Address:
    """Return the caller's address, which may be "HOST:PORT"."""
    return parse_address(given, f"coordinator={given!r}") if isinstance(given, str) else given


def apply_arguments(
    found: Detection,
    rank: int | None,
    world_size: int | None,
    coordinator: Address | None,
) -> Detection:
    """Override ``found`` by the caller's arguments, and return it."""
    changed = False
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is None:
            continue
        changed |= getattr(found, name) not in (None, _whole(name, value))
        found.say(name, value, f"the argument {name}={value}")
    if changed:
        # The environment's local values count other processes.
        for name in _LOCAL:
            if getattr(found, name) is not None:
                found.say(name, None, f"{found.source} numbers other processes than the arguments")
        if found.coordinator is None:
            found.reasons.pop("coordinator", None)
    if rank is not None and world_size is not None:
        found.source = ARGUMENTS
    if coordinator is not None:
        found.say("coordinator", coordinator, f"the argument coordinator={coordinator}")
        found.agent_store, found.hosted, found.socket = False, False, ""
        found.reasons.pop("socket", None)
    return found


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
