"""`identify`: rank, world size and address of this process; the order of the environments, and what overrides what."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import msgspec

from .. import settings
from ..diagnosis import join
from ..errors import AllhandsError, fail
from . import gce
from .base import Detection, Environment, integer, me, parse_address, text
from .clouds import detect_azureml, detect_sagemaker, detect_vertex
from .kubernetes import detect_indexed, detect_jobset, detect_pytorchjob, detect_statefulset, detect_trainer
from .launchers import detect_allhands, detect_plain, detect_ray, detect_torchrun
from .mpi import HYDRA, MVAPICH, OPENMPI, detect_hydra, detect_mvapich, detect_openmpi
from .schedulers import detect_batch, detect_flux, detect_lsf, detect_pbs
from .slurm import detect_slurm
from .world import Address, World

__all__ = ["ENVIRONMENTS", "Finding", "identify", "survey"]

# The first match is used: launchers, schedulers, MPI, clouds, torch's plain variables. PBS and Azure ML precede the MPI
# that they use because they also give the hosts. `detect_batch` only raises.
ENVIRONMENTS = (
    Environment("allhands", "ALLHANDS_RANK, ALLHANDS_WORLD_SIZE", detect_allhands),
    Environment("torchrun", "TORCHELASTIC_RUN_ID", detect_torchrun),
    Environment("slurm", "SLURM_STEP_NODELIST and SLURM_PROCID, as srun sets them", detect_slurm),
    Environment("lsf", "LSB_JOBID and JSM_NAMESPACE_RANK", detect_lsf),
    Environment("flux", "FLUX_TASK_RANK", detect_flux),
    Environment("pbs", "PBS_JOBID, PBS_NODEFILE and a rank from MPI", detect_pbs),
    Environment("azureml", f"AZUREML_EXPERIMENT_ID and {OPENMPI} or RANK", detect_azureml),
    Environment("openmpi", OPENMPI, detect_openmpi),
    Environment("mvapich", MVAPICH, detect_mvapich),
    Environment("hydra", HYDRA, detect_hydra),
    Environment(
        "ray", "RAY_JOB_ID or RAY_RAYLET_PID (any Ray worker), with RANK and NODE_RANK (Ray Train)", detect_ray
    ),
    Environment("vertex", "CLOUD_ML_JOB_ID and CLUSTER_SPEC (unset for one replica)", detect_vertex),
    Environment("sagemaker", "SM_HOSTS and SM_CURRENT_HOST", detect_sagemaker),
    Environment("pytorchjob", "PET_NNODES and RANK", detect_pytorchjob),
    Environment("trainer", "PET_MASTER_ADDR without RANK", detect_trainer),
    Environment("jobset", "JOBSET_NAME, REPLICATED_JOB_NAME and JOB_COMPLETION_INDEX without RANK", detect_jobset),
    Environment("indexed", "JOB_COMPLETION_INDEX without RANK", detect_indexed),
    Environment(
        "statefulset",
        "KUBERNETES_SERVICE_HOST, WORLD_SIZE without RANK, and a HOSTNAME that ends in a number",
        detect_statefulset,
    ),
    Environment(
        "compute", "a Google machine whose metadata has allhands-hosts or allhands-rank, without RANK", gce.detect
    ),
    Environment("plain", "RANK and WORLD_SIZE", detect_plain),
    Environment("batch", "an allocation for several processes in which nothing was launched", detect_batch),
)

# Torch's variables that do not give a rank, but show that there are other processes.
_HINTS = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
_ALONE = "nothing in the environment indicates other processes"


class Finding(msgspec.Struct, frozen=True):
    """One environment: whether it was recognised, why, and its world or error."""

    name: str
    recognised: bool
    reason: str
    world: World | None = None
    error: AllhandsError | None = None


def identify(
    env: Mapping[str, str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: Address | str | None = None,
) -> World:
    """Return the world of this process; arguments override the environment (os.environ by default).

    Needs no other rank. Blocks at most half a second, on Compute Engine only.
    Raises `WorldError` or `ArgumentError` if sources disagree, are incomplete or invalid.
    """
    source = os.environ if env is None else env
    if coordinator is not None:
        # Environments then need not find an address, and must not fail without one.
        if isinstance(coordinator, str):
            coordinator = parse_address(coordinator, f"coordinator={coordinator!r}")
        source = {**source, "MASTER_ADDR": coordinator.host, "MASTER_PORT": str(coordinator.port)}
    given = {name for name, value in (("rank", rank), ("world_size", world_size)) if value is not None}
    found, ignored = None, ""
    try:
        found = _detect(source, given)
    except AllhandsError as error:
        if len(given) < 2:
            raise
        ignored = error.diagnosis.what  # rank and size are given, so errors of the environment do not matter
    if found is None:
        found = _bare(source, given)
    if ignored:
        found.reasons["environment"] = f"not used: {ignored}"
    _apply_arguments(found, rank, world_size, coordinator)
    read = settings.read(source)
    if read.job and found.source != "allhands":
        found.set("ALLHANDS_JOB and ALLHANDS_ATTEMPT", job=f"{read.job}-{read.attempt}")
    return found.world()


def survey(env: Mapping[str, str] | None = None) -> list[Finding]:
    """Return for every environment, in order of precedence, why it was recognised or not."""
    source = os.environ if env is None else env
    return [_consider(environment, source) for environment in ENVIRONMENTS]


def _consider(environment: Environment, env: Mapping[str, str]) -> Finding:
    reason = ""
    try:
        found = environment.detect(env)
        if found is None:
            return Finding(environment.name, recognised=False, reason=f"needs {environment.mark}")
        reason = found.reason
        return Finding(environment.name, recognised=True, reason=reason, world=found.world())
    except AllhandsError as error:
        return Finding(environment.name, recognised=True, reason=reason or error.diagnosis.what, error=error)


def _detect(env: Mapping[str, str], given: Collection[str]) -> Detection | None:
    inside = ""
    for environment in ENVIRONMENTS:
        found = environment.detect(env)
        if found is None:
            continue
        if not found.innermost and _is_outer(found, env, given):
            inside = f"; {environment.name} started the launcher of this process"
            continue
        found.reason += inside
        return found
    return None


def _bare(env: Mapping[str, str], given: Collection[str]) -> Detection:
    """Return the values without a recognised environment: at most an address, or a world of one."""
    hints = [f"{name}={text(env, name)}" for name in _HINTS if text(env, name)]
    if not given and not hints:
        found = Detection("alone", _ALONE, env)
        return found.set(_ALONE, rank=0, world_size=1).locate()
    reason = f"{join(hints)} indicates other processes" if hints else "no environment was recognised"
    found = Detection("arguments", reason, env, remedy="set RANK and WORLD_SIZE, or pass rank= and world_size=")
    # An incomplete address is no error here: ranks may meet at a file or a store.
    if text(env, "MASTER_ADDR") and text(env, "MASTER_PORT"):
        found.locate()
    return found


# Two sources that differ, and the arguments of the caller ------------------------------------------------------

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


def _is_outer(found: Detection, env: Mapping[str, str], given: Collection[str]) -> bool:
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


def _apply_arguments(found: Detection, rank: int | None, world_size: int | None, coordinator: Address | None) -> None:
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
        found.source = "arguments"
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
