"""What an engine is: the operations on tensors' memory, their deadline, how they are aborted and how they fail.

An engine moves and reduces memory for the ranks of one group. It does not know the job, the coordinator or torch's
process groups, and it composes no message for users: it raises an `EngineFailure`, which `groups.failure` turns into a
diagnosis.

Memory is passed as ``address, nbytes``; a list with one part per rank as ``(address, nbytes, address, nbytes, ...)``.
Addresses instead of tensors keep autograd, views and tensor subclasses out of the engines: the caller stages a tensor
that is not contiguous (`groups.staging`) and keeps the memory alive. Types, reductions and operations are the C core's
numbers (`engines.dtypes`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from .. import _core
    from ..diagnosis.majority import Judgement
    from .shm.fd_passing import FdPassing

__all__ = [
    "CallMismatch",
    "Capabilities",
    "Engine",
    "EngineAborted",
    "EngineFailure",
    "EngineTimeout",
    "MessageMismatch",
    "Parts",
    "PeerDead",
    "PeerLeft",
    "TransportFailure",
    "parts_of",
]

Parts = tuple[int, ...]


class EngineFailure(Exception):
    """A call did not complete. ``culprit`` is the group rank that caused it, None where the engine cannot know."""

    def __init__(self, detail: str = "", culprit: int | None = None) -> None:
        super().__init__(detail or f"{type(self).__name__}, group rank {culprit}")
        self.culprit = culprit


class EngineTimeout(EngineFailure):
    """The deadline passed while waiting for the culprit."""


class PeerDead(EngineFailure):
    """The culprit's process ended (observed)."""


class PeerLeft(EngineFailure):
    """The culprit closed its end of the group without making this call."""


class EngineAborted(EngineFailure):
    """`Engine.abort` ended the call, on this rank or on the culprit."""


class TransportFailure(EngineFailure):
    """A connection or a library below the engine failed; ``str()`` is its message."""


class MessageMismatch(NamedTuple):
    """A message that did not fit the receive that it was matched with."""

    source: int
    target: int
    tag: int
    sent_dtype: int
    sent_nbytes: int
    expected_dtype: int
    expected_nbytes: int


class CallMismatch(EngineFailure):
    """Ranks made different calls.

    ``judgement`` names the differing ranks, the same on every rank; None where the engine leaves that to the caller
    (shm). ``message`` is set where a message did not fit its receive. ``found_here`` is False where another rank found
    the difference.
    """

    def __init__(
        self,
        judgement: Judgement | None = None,
        culprit: int | None = None,
        *,
        message: MessageMismatch | None = None,
        found_here: bool = True,
    ) -> None:
        super().__init__("; ".join(judgement.lines) if judgement is not None else "", culprit)
        self.judgement = judgement
        self.message = message
        self.found_here = found_here


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond the collectives."""

    # send and recv, through `Engine.p2p`; without it messages go through Gloo.
    p2p: bool = False
    # Memory that all ranks of the group map (`Engine.window`).
    shared_tensors: bool = False
    # `Engine.all_reduce_list`.
    tensor_lists: bool = False
    # All ranks are on one host and can share memory (`Engine.fd_passing`), which CUDA engines need.
    one_host: bool = False


class Engine(ABC):
    """One rank's end of a group. One call at a time, made in the same order on every rank.

    Each operation blocks for at most ``timeout_ns`` and raises an `EngineFailure` where it does not complete. After
    that the ranks may be out of step: `in_call` stays true, and the group must end.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    # What the C fast path calls without coming by here, with the lock that all calls hold; None: no fast path.
    fast_path: _core.Segment | None = None

    # Messages between two ranks, and the way to share further memory; None where the engine has none.
    p2p: _core.P2P | None = None
    fd_passing: FdPassing | None = None

    # What a mismatch shows of this rank's call, for engines that send it along: the line of the script, the shapes.
    site: str = ""
    shape: str = ""

    # Whether a call began and did not complete.
    in_call: bool = False

    @abstractmethod
    def sequence(self) -> int:
        """Return the number of the next call."""

    @abstractmethod
    def barrier(self, timeout_ns: int) -> None:
        """Wait for every rank."""

    @abstractmethod
    def all_reduce(self, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int) -> None:
        """Reduce in place; every rank gets the same bits."""

    def all_reduce_list(self, parts: Parts, dtype: int, reduction: int, timeout_ns: int) -> None:
        """Reduce several tensors of one type, which do not overlap, as one."""
        for address, nbytes in zip(parts[::2], parts[1::2], strict=True):
            self.all_reduce(address, nbytes, dtype, reduction, timeout_ns)

    @abstractmethod
    def reduce(self, address: int, nbytes: int, dtype: int, reduction: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Reduce in place on ``root``; the memory of other ranks does not change."""

    @abstractmethod
    def broadcast(self, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:
        """Copy the root's memory to every rank."""

    @abstractmethod
    def all_gather(self, address: int, nbytes: int, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy every rank's memory to every rank's ``out``. Parts may differ in size."""

    @abstractmethod
    def gather(self, address: int, nbytes: int, out: Parts | None, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy every rank's memory to the root's ``out``, None elsewhere. Parts may differ in size."""

    @abstractmethod
    def scatter(self, given: Parts | None, address: int, nbytes: int, dtype: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what the operation takes
        """Copy each part of the root's ``given``, None elsewhere, to its rank. Parts may differ in size."""

    @abstractmethod
    def reduce_scatter(  # noqa: PLR0917  # what the operation takes
        self, given: Parts, address: int, nbytes: int, dtype: int, reduction: int, timeout_ns: int
    ) -> None:
        """Reduce each part of ``given``, all of one size, to the memory of the rank that it is for."""

    @abstractmethod
    def all_to_all(self, given: Parts, out: Parts, dtype: int, timeout_ns: int) -> None:
        """Copy each part of ``given`` to its rank's ``out``. Parts may differ in size."""

    @abstractmethod
    def compare_only(self, operation: int, reduction: int, dtype: int, nbytes: int, root: int, timeout_ns: int) -> None:  # noqa: PLR0917  # what a call is
        """Compare a call with those of the other ranks; `delegate` then performs it."""

    def delegate(self, issue: Callable[..., Any], *args: Any) -> None:
        """Perform the call that was compared by a torch operation that returns a Work, and complete it."""
        issue(*args).wait()

    def refuse(self, operation: str, reason: str, timeout_ns: int) -> None:
        """Report to the other ranks that this one cannot make its call, so that they do not wait for it.

        Raises CallMismatch unless no rank can make it. An engine without such a report lets them wait.
        """
        del operation, reason, timeout_ns

    def failure(self, code: int, culprit: int) -> EngineFailure:
        """Return the failure for an outcome of the C core: of its fast path or of a message."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """Return the ranks that have not begun this rank's current call, as far as the engine knows."""
        return []

    def window(self, nbytes: int, timeout_s: float) -> _core.Window:
        """Create memory that all ranks map, ``nbytes`` for each. Every rank of the group calls this."""
        raise NotImplementedError

    @abstractmethod
    def abort(self, rank: int) -> None:
        """End every call under way on this rank, because of ``rank``, and refuse further ones. From any thread."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Make no further call, wait for peers at most ``within_s``, and free what the engine holds."""


def parts_of(tensors: Sequence[Any]) -> Parts:
    """Return the addresses and sizes of contiguous tensors."""
    return tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor.nbytes))
