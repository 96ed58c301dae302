"""Every exception of allhands.

    AllhandsError                   also torch.distributed.DistError (a RuntimeError) once torch is imported
     ├── ArgumentError              an argument makes no sense (also ValueError)
     ├── WorldError                 who this process is cannot be said (also ValueError)
     ├── ConnectError               the coordinator cannot be reached
     ├── RollCallError              not every rank answered as it should
     │    ├── RollCallTimeout       someone never came
     │    └── RollCallRefused       someone's claim cannot be true or does not fit
     ├── EngineMissing              what should move the tensors is not here
     ├── EngineFailed               torch could not form the group
     ├── ResourceError              a limit of this machine is too low
     ├── GroupEnded                 the group is over because of someone else
     │    ├── PeerFailed            a rank raised
     │    ├── PeerLost              a rank is gone
     │    └── CoordinatorLost       the coordinator is gone
     ├── CollectiveMismatch         ranks made different calls
     ├── CollectiveTimeout          a collective did not finish in time
     │    └── PeerSilent            because a rank does not answer
     ├── SpawnFailed                a rank of `allhands.spawn` failed
     ├── TrainingError              a model cannot be trained as it is
     ├── StoreTimeout               a key did not appear in time (also torch.distributed.DistStoreError)
     └── GroupStateError            there is no such group (also ValueError, as torch raises)
          ├── NotInitialised
          ├── AlreadyInitialised
          └── AlreadyDestroyed

Its subclasses SpawnRaised, SpawnExited are in `launch.spawn.errors`: they are also torch's ProcessRaisedException and
ProcessExitedException, which have slots and so cannot be adopted later.

Each carries a `Diagnosis`: `.slug`, `.ranks`, `.hosts` are for programs, `str()` is for people.
"""

from __future__ import annotations

from typing import Any

from .diagnosis import CATALOGUE, Diagnosis

__all__ = [
    "AllhandsError",
    "AlreadyDestroyed",
    "AlreadyInitialised",
    "ArgumentError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConnectError",
    "CoordinatorLost",
    "EngineFailed",
    "EngineMissing",
    "GroupEnded",
    "GroupStateError",
    "NotInitialised",
    "PeerFailed",
    "PeerLost",
    "PeerSilent",
    "ResourceError",
    "RollCallError",
    "RollCallRefused",
    "RollCallTimeout",
    "SpawnFailed",
    "StoreTimeout",
    "TrainingError",
    "WorldError",
    "adopt",
    "error",
    "fail",
]


class _Root(RuntimeError):
    """Stands where torch's DistError goes until torch is imported (see `adopt`)."""


class _StoreRoot(RuntimeError):
    """Stands where torch's DistStoreError goes until torch is imported."""


class AllhandsError(_Root):
    """Any failure that allhands can explain."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis)
        self.diagnosis = diagnosis

    @property
    def slug(self) -> str:
        """The stable name of this kind of failure; `allhands explain SLUG` prints its page."""
        return self.diagnosis.slug

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are to blame, missing or double, in order."""
        return self.diagnosis.ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of those ranks, where known."""
        return self.diagnosis.hosts

    def __str__(self) -> str:
        # The name of the exception stands before this text in a traceback, so only the rest is given.
        return self.diagnosis.render("").removeprefix(": ")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.diagnosis,))


class ArgumentError(AllhandsError, ValueError):
    """An argument makes no sense."""


class WorldError(AllhandsError, ValueError):
    """It cannot be said who this process is in the job."""


class ConnectError(AllhandsError):
    """The coordinator cannot be reached, or cannot listen."""


class RollCallError(AllhandsError):
    """Not every rank answered the roll call as it should."""


class RollCallTimeout(RollCallError):
    """Some ranks never came."""


class RollCallRefused(RollCallError):
    """The claims of the ranks do not fit together."""


class EngineMissing(AllhandsError):
    """What should move the tensors is not available here."""


class EngineFailed(AllhandsError):
    """Torch could not form the group although every rank answered."""


class ResourceError(AllhandsError):
    """A limit of this machine is too low."""


class GroupEnded(AllhandsError):
    """The group is over because of someone else."""


class PeerFailed(GroupEnded):
    """Another rank raised an exception; its traceback is in `diagnosis.traceback`."""


class PeerLost(GroupEnded):
    """Another rank's process or connection is gone."""


class CoordinatorLost(GroupEnded):
    """The coordinator's process or connection is gone."""


class CollectiveTimeout(AllhandsError):
    """A collective did not finish in time."""


class PeerSilent(CollectiveTimeout):
    """A collective did not finish in time because a rank does not answer."""


class CollectiveMismatch(AllhandsError):
    """Ranks of one group made different calls."""


class SpawnFailed(AllhandsError):
    """A rank of `allhands.spawn` failed; `.error_index` and the rest are torch's names for which one and how."""


class TrainingError(AllhandsError):
    """A model cannot be trained as it is: ranks differ in it, or gradients are missing."""


class StoreTimeout(AllhandsError, _StoreRoot):
    """A key did not appear in the store in time."""


class GroupStateError(AllhandsError, ValueError):
    """There is no such process group."""


class NotInitialised(GroupStateError):
    """No process group was formed."""


class AlreadyInitialised(GroupStateError):
    """A process group was formed already."""


class AlreadyDestroyed(GroupStateError):
    """The process group was destroyed."""


def error(diagnosis: Diagnosis) -> AllhandsError:
    """Return the exception that carries ``diagnosis``, of the class its slug has in the catalogue."""
    entry = CATALOGUE.get(diagnosis.slug)
    # A newer coordinator may know more kinds than we do; its words are still worth having.
    made: AllhandsError = (globals()[entry.error] if entry is not None else AllhandsError)(diagnosis)
    return made


def fail(slug: str, what: str, **parts: Any) -> AllhandsError:
    """Make a diagnosis of its parts and return the exception that carries it, to be raised by the caller."""
    return error(Diagnosis(slug, what, **parts))


def adopt(dist_error: type[RuntimeError], store_error: type[RuntimeError]) -> None:
    """Make these exceptions derive from torch's, so that ``except torch.distributed.DistError`` catches them.

    Called once torch is imported. The tree itself must not import torch, because the launcher and the
    coordinator raise from it and their start-up time is a feature.
    """
    AllhandsError.__bases__ = (dist_error,)
    StoreTimeout.__bases__ = (AllhandsError, store_error)


for _class in [value for value in globals().values() if isinstance(value, type) and issubclass(value, AllhandsError)]:
    # Tracebacks then say "allhands.PeerFailed", which is also the name to catch it by.
    _class.__module__ = __package__
