"""The order of precedence of the environments, and `identify`: rank, world size and address of this process."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import msgspec

from .. import settings
from ..diagnosis import join
from ..errors import AllhandsError
from . import (
    azureml,
    batch,
    flux,
    gce,
    indexed,
    jobset,
    launcher,
    lsf,
    mpich,
    mvapich,
    openmpi,
    pbs,
    plain,
    pytorchjob,
    ray,
    sagemaker,
    slurm,
    statefulset,
    torchrun,
    trainer,
    vertex,
)
from .base import Detection, Environment, text
from .precedence import ARGUMENTS, address_argument, apply_arguments, inner
from .world import Address, World

__all__ = ["ENVIRONMENTS", "Finding", "identify", "survey"]

# The first match is used: launchers, schedulers, MPI, clouds, torch's plain variables. PBS and Azure ML precede the MPI
# that they use because they also give the hosts. `batch` only raises.
ENVIRONMENTS: tuple[Environment, ...] = (
    launcher,
    torchrun,
    slurm,
    lsf,
    flux,
    pbs,
    azureml,
    openmpi,
    mvapich,
    mpich,
    ray,
    vertex,
    sagemaker,
    pytorchjob,
    trainer,
    jobset,
    indexed,
    statefulset,
    gce,
    plain,
    batch,
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
        coordinator = address_argument(coordinator)
        source = {**source, "MASTER_ADDR": coordinator.host, "MASTER_PORT": str(coordinator.port)}
    given = {name for name, value in (("rank", rank), ("world_size", world_size)) if value is not None}
    found, ignored = None, ""
    try:
        found = _believed(source, given)
    except AllhandsError as error:
        if len(given) < 2:
            raise
        ignored = error.diagnosis.what  # rank and size are given, so errors of the environment do not matter
    if found is None:
        found = _bare(source, given)
    if ignored:
        found.reasons["environment"] = f"not used: {ignored}"
    apply_arguments(found, rank, world_size, coordinator)
    return _named(found, source).world()


def survey(env: Mapping[str, str] | None = None) -> list[Finding]:
    """Return for every environment, in order of precedence, why it was recognised or not."""
    source = os.environ if env is None else env
    return [_consider(environment, source) for environment in ENVIRONMENTS]


def _consider(environment: Environment, env: Mapping[str, str]) -> Finding:
    try:
        found = environment.detect(env)
        if found is None:
            return Finding(environment.NAME, recognised=False, reason=f"needs {environment.MARK}")
    except AllhandsError as error:
        return Finding(environment.NAME, recognised=True, reason=error.diagnosis.what, error=error)
    try:
        return Finding(environment.NAME, recognised=True, reason=found.reason, world=found.world())
    except AllhandsError as error:
        return Finding(environment.NAME, recognised=True, reason=found.reason, error=error)


def _believed(env: Mapping[str, str], given: Collection[str]) -> Detection | None:
    inside = ""
    for environment in ENVIRONMENTS:
        found = environment.detect(env)
        if found is None:
            continue
        if not found.innermost:
            around = inner(found, env, given)
            if around:
                inside = f"; {environment.NAME} started the launcher of this process"
                continue
        found.reason += inside
        return found
    return None


def _bare(env: Mapping[str, str], given: Collection[str]) -> Detection:
    """Return the values without a recognised environment: at most an address, or a world of one."""
    hints = [f"{name}={text(env, name)}" for name in _HINTS if text(env, name)]
    if not given and not hints:
        found = Detection("alone", _ALONE, env)
        return found.say("rank", 0, _ALONE).say("world_size", 1, _ALONE).meet()
    reason = f"{join(hints)} indicates other processes" if hints else "no environment was recognised"
    found = Detection(ARGUMENTS, reason, env, remedy="set RANK and WORLD_SIZE, or pass rank= and world_size=")
    # An incomplete address is no error here: ranks may meet at a file or a store.
    if text(env, "MASTER_ADDR") and text(env, "MASTER_PORT"):
        found.meet()
    return found


def _named(found: Detection, env: Mapping[str, str]) -> Detection:
    """Replace the environment's job name by ALLHANDS_JOB, if set."""
    read = settings.read(env)
    if read.job and found.source != launcher.NAME:
        found.call(f"{read.job}-{read.attempt}", "ALLHANDS_JOB and ALLHANDS_ATTEMPT")
    return found
