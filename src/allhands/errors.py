"""Every exception of allhands.

    AllhandsError                   also torch.distributed.DistError (a RuntimeError) once torch is imported
     ├── ArgumentError              an argument is invalid (also ValueError)
     ├── WorldError                 rank or world size of this process is unknown (also ValueError)
     ├── ConnectError               the coordinator cannot be reached
     ├── RollCallError              the roll call failed
     │    ├── RollCallTimeout       ranks are missing
     │    └── RollCallRefused       claims contradict each other
     ├── EngineMissing              the backend is not available
     ├── EngineFailed               torch could not form the group
     ├── ResourceError              a limit of this machine is too low
     ├── GroupEnded                 the group ended because of another process
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
ProcessExitedException, which have slots, so their bases cannot be changed later.

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
    """Placeholder for torch's DistError until torch is imported (see `adopt`)."""


class _StoreRoot(RuntimeError):
    """Placeholder for torch's DistStoreError until torch is imported."""


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
        """The ranks that caused the failure (failed, missing or duplicate), in order."""
        return self.diagnosis.ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of those ranks, where known."""
        return self.diagnosis.hosts

    def __str__(self) -> str:
        # A traceback prints the name of the exception before this text.
        return self.diagnosis.render("").removeprefix(": ")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.diagnosis,))


class ArgumentError(AllhandsError, ValueError):
    """An argument is invalid."""


class WorldError(AllhandsError, ValueError):
    """The rank or world size of this process cannot be determined."""


class ConnectError(AllhandsError):
    """The coordinator cannot be reached, or cannot listen."""


class RollCallError(AllhandsError):
    """The roll call failed."""


class RollCallTimeout(RollCallError):
    """Ranks are missing at the deadline of the roll call."""


class RollCallRefused(RollCallError):
    """The claims of the ranks contradict each other."""


class EngineMissing(AllhandsError):
    """The requested backend or device is not available."""


class EngineFailed(AllhandsError):
    """Torch could not form the group although every rank answered."""


class ResourceError(AllhandsError):
    """A limit of this machine is too low."""


class GroupEnded(AllhandsError):
    """The group ended because of another process."""


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
    # A coordinator of a newer version may send a slug that is unknown here.
    made: AllhandsError = (globals()[entry.error] if entry is not None else AllhandsError)(diagnosis)
    return made


def fail(slug: str, what: str, **parts: Any) -> AllhandsError:
    """Return the exception for a diagnosis with these parts; the caller raises it."""
    return error(Diagnosis(slug, what, **parts))


def adopt(dist_error: type[RuntimeError], store_error: type[RuntimeError]) -> None:
    """Make these exceptions derive from torch's, so that ``except torch.distributed.DistError`` catches them.

    Called once torch is imported. This module must not import it: launcher and coordinator start without torch.
    """
    AllhandsError.__bases__ = (dist_error,)
    StoreTimeout.__bases__ = (AllhandsError, store_error)


for _class in [value for value in globals().values() if isinstance(value, type) and issubclass(value, AllhandsError)]:
    # Tracebacks print "allhands.PeerFailed", the name to catch it by.
    _class.__module__ = __package__
