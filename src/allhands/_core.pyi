"""The C core (`csrc/`), built on Linux only: what Python's own library does not offer. It writes no sentences."""

from typing import Self

def set_parent_death_signal(signal: int, /) -> int:
    """Ask the kernel to send ``signal`` to this process when its parent ends (0: no longer ask).

    Returns 0 or an errno. Two traps. "The parent" is the thread that started this process: it must live as
    long as the parent process does. And a parent that ended before this call is not noticed: compare
    ``os.getppid()`` with the parent's pid afterwards.
    """

def peer_credentials(fd: int, /) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the process at the other end of the connected Unix socket ``fd``.

    They are those of the moment when it connected (or listened, or called socketpair), vouched for by the
    kernel. A pid of 0 means that the peer is in a pid namespace that cannot be seen from here. Raises OSError.
    """

def segment_bytes(ranks: int, slot_bytes: int, /) -> int:
    """Return how large the segment of a group is."""

def segment_format(fd: int, ranks: int, slot_bytes: int, nonce: bytes, /) -> None:
    """Make ``fd``, a file of `segment_bytes` zeros, the segment of a group, and give it all its memory.

    Raises OSError where there is not enough: found out here, and not by a signal in the middle of a copy.
    """

def reducible(dtype: int, reduction: int, /) -> bool:
    """Tell whether a reduction is defined on a dtype."""

class Segment:
    """One rank's view of a group's shared memory. One call at a time; the interpreter runs on meanwhile.

    Tensors are given as address and bytes, lists as a tuple of both for each rank. Each call returns a code: 0 ok,
    1 timeout, 2 dead, 3 aborted, 4 mismatch, 5 broken; `culprit` is then the rank that it is about.
    """

    def __new__(cls, fd: int, size: int, rank: int, nonce: bytes, pidfds: tuple[int, ...], /) -> Self: ...
    def barrier(self, timeout_ns: int, /) -> int: ...
    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, timeout_ns: int, /) -> int: ...
    def reduce(self, address: int, size: int, dtype: int, reduction: int, root: int, timeout_ns: int, /) -> int: ...
    def broadcast(self, address: int, size: int, dtype: int, root: int, timeout_ns: int, /) -> int: ...
    def all_gather(self, address: int, size: int, out: tuple[int, ...], dtype: int, timeout_ns: int, /) -> int: ...
    def gather(
        self, address: int, size: int, out: tuple[int, ...] | None, dtype: int, root: int, timeout_ns: int, /
    ) -> int: ...
    def scatter(
        self, given: tuple[int, ...] | None, address: int, size: int, dtype: int, root: int, timeout_ns: int, /
    ) -> int: ...
    def reduce_scatter(
        self, given: tuple[int, ...], address: int, size: int, dtype: int, reduction: int, timeout_ns: int, /
    ) -> int: ...
    def all_to_all(self, given: tuple[int, ...], out: tuple[int, ...], dtype: int, timeout_ns: int, /) -> int: ...
    def end(self, rank: int, /) -> None:
        """The group is over because of ``rank``: whoever waits in it wakes."""

    def patience(self, spins: int, yields: int, /) -> None:
        """Set how often to look, and then to give the core away, before sleeping."""

    def call(self, rank: int, /) -> tuple[int, int, int, int, int, int]:
        """Return (sequence, kind, reduction, dtype, bytes, root) of what ``rank`` calls beside our last call.

        The sequence is the largest number there is where it has not come to that call yet.
        """

    def depart(self) -> None:
        """Say that this rank makes no further call."""

    def culprit(self) -> int:
        """Return the rank that the last bad end is about."""
