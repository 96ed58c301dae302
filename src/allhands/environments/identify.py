"""The order in which environments are believed, and the answer: who this process is."""

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

# First come first believed: launchers, then schedulers, then MPI, then clouds, then torch's bare variables.
# PBS and Azure ML go before the MPI that they use, since they also know the hosts. `batch` only ever complains.
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

# Torch's variables that say nothing about who this process is, but that others are there.
_HINTS = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
_ALONE = "nothing in the environment tells of other processes"


class Finding(msgspec.Struct, frozen=True):
    """What became of one environment: whether it was recognised, why, and what it says or fails at."""

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
    """Say who this process is; arguments go before the environment (the process's own by default).

    Needs no other rank and does not block, but for half a second at most on Compute Engine.
    Raises `WorldError` or `ArgumentError` where sources disagree, are incomplete or make no sense.
    """
    source = os.environ if env is None else env
    if coordinator is not None:
        # Nothing then needs to look for an address, nor may it fail because there is none.
        coordinator = address_argument(coordinator)
        source = {**source, "MASTER_ADDR": coordinator.host, "MASTER_PORT": str(coordinator.port)}
    given = {name for name, value in (("rank", rank), ("world_size", world_size)) if value is not None}
    found, ignored = None, ""
    try:
        found = _believed(source, given)
    except AllhandsError as error:
        if len(given) < 2:
            raise
        ignored = error.diagnosis.what  # the caller knows who it is, so a muddled environment is no obstacle
    if found is None:
        found = _bare(source, given)
    if ignored:
        found.reasons["environment"] = f"not used: {ignored}"
    apply_arguments(found, rank, world_size, coordinator)
    return _named(found, source).world()


def survey(env: Mapping[str, str] | None = None) -> list[Finding]:
    """Consider every environment, in the order of belief, and say of each why it was recognised or not."""
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
                inside = f"; {environment.NAME} only started what started this process"
                continue
        found.reason += inside
        return found
    return None


def _bare(env: Mapping[str, str], given: Collection[str]) -> Detection:
    """Return what is left where no environment is recognised: an address at most, or a world of one."""
    hints = [f"{name}={text(env, name)}" for name in _HINTS if text(env, name)]
    if not given and not hints:
        found = Detection("alone", _ALONE, env)
        return found.say("rank", 0, _ALONE).say("world_size", 1, _ALONE).meet()
    reason = f"{join(hints)} tells of other processes" if hints else "no environment was recognised"
    found = Detection(ARGUMENTS, reason, env, remedy="set RANK and WORLD_SIZE, or pass rank= and world_size=")
    # Half an address is only wrong where it is needed, and it may not be: a file or a store can bring ranks together.
    if text(env, "MASTER_ADDR") and text(env, "MASTER_PORT"):
        found.meet()
    return found


def _named(found: Detection, env: Mapping[str, str]) -> Detection:
    """Let the user's own ALLHANDS_JOB go before the name that the environment gives."""
    read = settings.read(env)
    if read.job and found.source != launcher.NAME:
        found.call(f"{read.job}-{read.attempt}", "ALLHANDS_JOB and ALLHANDS_ATTEMPT")
    return found
