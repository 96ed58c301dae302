"""The C core (`csrc/`), built on Linux only: what Python's own library does not offer. It writes no sentences."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, NewType, Self

Request = NewType("Request", object)

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

def segment_bytes(ranks: int, slot_bytes: int, helper_threads: int = 0, /) -> int:
    """Return how large the segment of a group is whose ranks have ``hands`` each."""

def segment_format(
    fd: int, ranks: int, slot_bytes: int, nonce: bytes, helper_threads: int = 0, victim_l3: bool = ..., /
) -> None:
    """Make ``fd``, a file of `segment_bytes` zeros, the segment of a group, and give it all its memory.

    Raises OSError where there is not enough: found out here, and not by a signal in the middle of a copy.
    """

def reducible(dtype: int, reduction: int, /) -> bool:
    """Tell whether a reduction is defined on a dtype."""

def reduce(dtype: int, reduction: int, out: int, sources: tuple[int, ...], size: int, /) -> None:
    """Reduce ``size`` bytes at each of ``sources``, all of them addresses, in that order into those at ``out``.

    ``out`` may be one of the sources. The interpreter runs on meanwhile. Whoever gives addresses keeps the memory.
    """

def disjoint(tensors: tuple[int, ...], /) -> bool:
    """Tell whether no two of ``tensors``, each given as address and bytes, share memory."""

# Numbers by name, as csrc/shm/codes.h defines them. Dtypes have torch's names.
DTYPES: dict[str, int]
REDUCTIONS: dict[str, int]
OPERATIONS: dict[str, int]
OUTCOMES: dict[str, int]
# The dtype of bytes that are only copied. Larger numbers are compared, and copied as bytes.
RAW: int
# Added to the number of a real dtype: complex numbers with such parts.
COMPLEX: int
MAX_HELPER_THREADS: int
MAX_RANKS: int

def flight_recorder_bytes() -> int:
    """Return how large a board is."""

class FlightRecorder:
    """The board of this process, in a file of `flight_recorder_bytes` zeros."""

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

    def set_rank(self, rank: int, world_size: int, /) -> None:
        """Say whose board it is."""

class Window:
    """Memory that all ranks of a group share, a region of ``stride`` bytes for each; its buffer is our own region."""

    def __new__(cls, segment: Segment, fd: int, stride: int, /) -> Self: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class TorchFacts:
    """What the fast path knows of torch; see csrc/way.h."""

    def __new__(
        cls,
        tensors: tuple[type, ...],
        dtypes: dict[Any, int],
        reductions: tuple[Any, ...],
        member: type,
        coalescing: dict[Any, Any],
        call_site: Callable[[], str],
        foreign: tuple[str, ...],
        capsule: Any,
        world: tuple[dict[str, Any], str, type, str] | None,
        is_neg: Callable[[], bool],
        /,
    ) -> Self: ...

class FastPath:
    """A function of torch.distributed for callers who wait anyway, and the ``slow_path`` one for what is not plain."""

    def __new__(
        cls,
        facts: TorchFacts,
        slow_path: Callable[..., Any],
        name: str,
        names: tuple[str, ...],
        roles: tuple[int, ...],
        kind: int,
        whole: bool,
        /,
    ) -> Self: ...
    def __call__(self, *args: Any, **kw: Any) -> Any: ...

class GradHook:
    """Takes gradients as they come, in the slow_path case: counts them, and moves them to where they are reduced.

    The books are lists of the caller's, which it may read and write between gradients. ``came(index)`` is called for
    whatever is not slow_path, ``complete()`` when a bucket has all its gradients.
    """

    def __new__(
        cls,
        facts: TorchFacts,
        parameters: tuple[Any, ...],
        came: Callable[[int], None],
        complete: Callable[[], None],
        /,
    ) -> Self: ...
    def on_gradient(self, index: int, parameter: Any, /) -> None:
        """Note that the gradient of a parameter is there: a hook."""

    def begin_pass(
        self,
        end: Callable[[], Any],
        counts: list[int],
        left: list[int],
        used: list[int],
        needed: list[int],
        /,
    ) -> None:
        """Take part in a pass while the weak reference ``end`` is alive."""

    def disable(self) -> None:
        """Leave everything to ``came`` until the next `begin`."""

    def set_places(self, of: tuple[int, ...], views: tuple[Any, ...] | None, likes: tuple[Any, ...], /) -> None:
        """Say in which bucket each parameter is, and where its gradient is to lie (None: it stays where it is).

        Without ``views`` all stay, and whether there is a gradient is seen when they are gathered. ``likes`` are
        tensors of the shape and type that each has in its bucket, None for a sparse one; they stay as they are.
        """

    def gather(self, order: tuple[int, ...], /) -> list[Any] | None:
        """Return the gradients of parameters by their numbers; None where one cannot be reduced where it lies."""

class Segment:
    """One rank's view of a group's shared memory. One call at a time; the interpreter runs on meanwhile.

    Tensors are given as address and bytes, lists as a tuple of both for each rank. Each call returns a code: 0 ok,
    1 timeout, 2 dead, 3 aborted, 4 mismatch, 5 broken; `culprit` is then the rank that it is about.
    """

    def __new__(cls, fd: int, size: int, rank: int, nonce: bytes, pidfds: tuple[int, ...], /) -> Self: ...
    def barrier(self, timeout_ns: int, /) -> int: ...
    def compare_only(self, kind: int, reduction: int, dtype: int, size: int, root: int, timeout_ns: int, /) -> int:
        """A barrier that compares a call which is then done by other means."""

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, timeout_ns: int, /) -> int: ...
    def all_reduce_list(self, tensors: tuple[int, ...], dtype: int, reduction: int, timeout_ns: int, /) -> int:
        """Reduce several tensors of one type as one. They are `disjoint`, and of the same sizes on every rank."""

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

    def set_wait_policy(self, spins: int, yields: int, /) -> None:
        """Set how often to look, and then to give the core away, before sleeping."""

    def enable_single_copy(self, pids: tuple[int, ...], /) -> None:
        """Let large tensors be read from the process of each rank. Every rank says this once, before its first call."""

    def call(self, rank: int, /) -> tuple[int, int, int, int, int, int, int]:
        """Return (sequence, operation, reduction, dtype, bytes, root, list_digest) of a rank.

        It is the call that the rank makes where we made our last.

        The sequence is the maximum of 64 bits if the rank has not begun that call. ``list_digest`` is 0 for one tensor.
        """

    # Calls that wait for their turn, and whether the fast path is shut.
    queued: int
    fast_path_closed: int
    # Calls that were done in a window, without staging.
    window_calls: int
    single_copy_calls: int
    found_mismatch: int
    # Not 0 where caches hand over what other ranks write.
    victim_l3: int

    def configure_fast_path(
        self, limit_ns: int, name: str, ranks: tuple[int, ...] | None, board: FlightRecorder, /
    ) -> None:
        """Say what the fast path has to know: the limit of a call, the group's name and global ranks, the board."""

    def sequence(self) -> int:
        """Return the number of the next call."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None: ...
    def leave(self) -> None:
        """Say that this rank makes no further call."""

    def culprit(self) -> int:
        """Return the rank that the last bad end is about."""

class P2P:
    """One rank's messages to and from single ranks, beside its collectives. Any number of threads may call.

    Peers are ranks of the group, a source of -1 is anyone. An outcome is one number, ``peer << 8 | code``: with code 0
    the other rank, with any other the rank that it is about. Whoever posts keeps the memory until the message is over.
    """

    def __new__(cls, segment: Segment, /) -> Self:
        """Only one for each Segment."""

    def send(self, address: int, size: int, dtype: int, dest: int, tag: int, timeout_ns: int, /) -> int:
        """Send and wait until the message is on its way: in the other rank's box, or wholly in blocks."""

    def recv(self, address: int, size: int, dtype: int, source: int, tag: int, timeout_ns: int, /) -> int:
        """Receive and wait until it is there."""

    def post_send(
        self, address: int, size: int, dtype: int, dest: int, tag: int, timeout_ns: int, key: int, /
    ) -> int | Request:
        """Begin to send; return the outcome where it is over at once. The timeout runs from the first wait."""

    def post_recv(
        self, address: int, size: int, dtype: int, source: int, tag: int, timeout_ns: int, key: int, /
    ) -> int | Request:
        """Begin to receive; return the outcome where it is over at once. The timeout runs from the first wait."""

    def wait(self, request: Request, limit_ns: int, /) -> int:
        """Wait for the end of a posted message (negative: without a limit); -1 where it is still under way."""

    def start_timeout(self, request: Request, /) -> None:
        """Let the timeout of a posted message begin now, as a wait without a limit does."""

    def test(self, request: Request, /) -> int:
        """Return the outcome of a posted message, -1 where it is still under way."""

    def progress(self) -> list[int]:
        """Move posted messages on until some are over that nobody waited for; return their keys, none once stopped."""

    def stop(self) -> None:
        """End `serve` and all that this rank has under way; other ranks are not told."""

    def wake_all(self) -> None:
        """Wake everyone who sleeps, to look whether the group is over."""

    def pending_sends(self) -> int:
        """Return how many posted sends are under way."""

    def mismatch(self) -> tuple[int, int, int, int, int, int, int] | None:
        """Return the first message of the group that did not fit its receive.

        (source, target, tag, dtype and bytes as sent, dtype and bytes as expected)
        """
