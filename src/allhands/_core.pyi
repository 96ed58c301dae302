"""The C core (`csrc/`), built on Linux only: what Python's own library does not offer. It writes no sentences."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

def set_parent_death_signal(signal: int, /) -> int:
    """Ask the kernel to send ``signal`` to this process when its parent ends (0: no longer ask).

    Returns 0 or an errno. Two traps. "The parent" is the thread that started this process: it must live as
    long as the parent process does. And a parent that ended before this call is not noticed: compare
    ``os.getppid()`` with the parent's pid afterwards.
    """

def adopt_orphans() -> int:
    """Become the parent of every descendant whose own parent ends, instead of init; return 0 or an errno.

    Whoever adopts must also reap: the adopted stay zombies until they are waited for.
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

MOST_RANKS: int

def board_bytes() -> int:
    """Return how large a board is."""

class Board:
    """The board of this process, in a file of `board_bytes` zeros."""

    def __new__(cls, fd: int, /) -> Self: ...
    def begin(
        self,
        operation: str,
        group: str,
        dtype: str,
        reduction: str,
        shape: tuple[int, ...],
        size: int,
        root: int,
        site: str,
        /,
    ) -> int:
        """Note an operation that waits; return the number of the note."""

    def run(self, number: int, sequence: int, /) -> None:
        """Note that it runs now, as that call of its group."""

    def end(self, number: int, well: bool, /) -> None:
        """Note that it is done."""

    def sign(self, rank: int, world_size: int, /) -> None:
        """Say whose board it is."""

class Window:
    """Memory that all ranks of a group share, a region of ``stride`` bytes for each; its buffer is our own region."""

    def __new__(cls, segment: Segment, fd: int, stride: int, /) -> Self: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Way:
    """What the short way knows of torch; see csrc/way.h."""

    def __new__(
        cls,
        tensors: tuple[type, ...],
        dtypes: dict[Any, int],
        reductions: tuple[Any, ...],
        member: type,
        coalescing: dict[Any, Any],
        call_site: Callable[[], str],
        foreign: tuple[str, ...],
        /,
    ) -> Self: ...

class Quick:
    """A function of torch.distributed for callers who wait anyway, and the ``usual`` one for what is not plain."""

    def __new__(
        cls,
        way: Way,
        usual: Callable[..., Any],
        name: str,
        names: tuple[str, ...],
        roles: tuple[int, ...],
        kind: int,
        whole: bool,
        /,
    ) -> Self: ...
    def __call__(self, *args: Any, **kw: Any) -> Any: ...

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

    # Calls that wait for their turn, and whether the short way is shut.
    queued: int
    shut: int
    # Calls that were done in a window, without staging.
    direct: int

    def introduce(self, limit_ns: int, name: str, ranks: tuple[int, ...] | None, board: Board, /) -> None:
        """Say what the short way has to know: the limit of a call, the group's name and global ranks, the board."""

    def sequence(self) -> int:
        """Return the number of the next call."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None: ...
    def culprit(self) -> int:
        """Return the rank that the last bad end is about."""
