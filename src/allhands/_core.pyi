"""The C core (`csrc/`), built on Linux only: what Python's own library does not offer. It returns no text."""

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

    The caller must also reap them: they stay zombies until they are waited for.
    """

def segment_bytes(ranks: int, slot_bytes: int, helper_threads: int = 0, /) -> int:
    """Return the size of the segment of a group whose ranks have ``helper_threads`` each."""

def segment_format(
    fd: int, ranks: int, slot_bytes: int, nonce: bytes, helper_threads: int = 0, victim_l3: bool = ..., /
) -> None:
    """Make ``fd``, a file of `segment_bytes` zeros, the segment of a group, and allocate all its memory.

    Raises OSError if there is not enough memory, which would otherwise be a SIGBUS in the middle of a copy.
    """

def reducible(dtype: int, reduction: int, /) -> bool:
    """Tell whether a reduction is defined on a dtype."""

def reduce(dtype: int, reduction: int, out: int, sources: tuple[int, ...], size: int, /) -> None:
    """Reduce ``size`` bytes at each of the addresses ``sources``, in that order, into those at ``out``.

    ``out`` may be one of the sources. Releases the GIL. The caller keeps the memory alive.
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
    """Return the size of a flight recorder."""

class FlightRecorder:
    """The flight recorder of this process, in a file of `flight_recorder_bytes` zeros."""

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
        """Record an operation that waits; return the number of its entry."""

    def run(self, number: int, sequence: int, /) -> None:
        """Record that it runs now, as call ``sequence`` of its group."""

    def end(self, number: int, well: bool, /) -> None:
        """Record that it has ended."""

    def set_rank(self, rank: int, world_size: int, /) -> None:
        """Record the rank of this process."""

class Window:
    """Memory that all ranks of a group share, a region of ``stride`` bytes each; its buffer is this rank's region."""

    def __new__(cls, segment: Segment, fd: int, stride: int, /) -> Self: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class TorchFacts:
    """What the fast path knows of torch; see csrc/python/torch_facts.h."""

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
    """A synchronous function of torch.distributed. ``slow_path`` is called for all but plain tensors."""

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
    """The hook on each parameter in the usual case: counts gradients and moves them into their buckets.

    The counts are in lists of the caller, which it may read and write between gradients. ``slow(index)`` is called in
    unusual cases, ``complete()`` when a bucket has all its gradients.
    """

    def __new__(
        cls,
        facts: TorchFacts,
        parameters: tuple[Any, ...],
        slow: Callable[[int], None],
        complete: Callable[[], None],
        /,
    ) -> Self: ...
    def on_gradient(self, index: int, parameter: Any, /) -> None:
        """Count and move the gradient of a parameter: a hook."""

    def begin_pass(
        self,
        end: Callable[[], Any],
        counts: list[int],
        left: list[int],
        used: list[int],
        needed: list[int],
        /,
    ) -> None:
        """Handle the gradients of a backward pass while the weak reference ``end`` is alive."""

    def disable(self) -> None:
        """Pass all gradients to ``slow`` until the next `begin_pass`."""

    def set_places(self, of: tuple[int, ...], views: tuple[Any, ...] | None, likes: tuple[Any, ...], /) -> None:
        """Set the bucket of each parameter, and the view that its gradient is moved to (None: it stays in place).

        Without ``views`` all gradients stay in place until `gather`. ``likes`` are tensors of the shape and dtype that
        each gradient has in its bucket, None for a sparse one.
        """

    def gather(self, order: tuple[int, ...], /) -> list[Any] | None:
        """Return the gradients of parameters by their numbers; None if one of them cannot be reduced in place."""

class Segment:
    """One rank's view of a group's shared memory. One call at a time, with the GIL released.

    Tensors are given as address and bytes, lists as a tuple of both for each rank. Each call returns one of OUTCOMES;
    after a failure `culprit` is the rank that caused it.
    """

    def __new__(cls, fd: int, size: int, rank: int, nonce: bytes, pidfds: tuple[int, ...], /) -> Self: ...
    def barrier(self, timeout_ns: int, /) -> int: ...
    def compare_only(self, kind: int, reduction: int, dtype: int, size: int, root: int, timeout_ns: int, /) -> int:
        """A barrier that compares a call, which another engine then performs."""

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, timeout_ns: int, /) -> int: ...
    def all_reduce_list(self, tensors: tuple[int, ...], dtype: int, reduction: int, timeout_ns: int, /) -> int:
        """Reduce several tensors of one dtype as one. They are `disjoint`, and of the same sizes on every rank."""

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
        """End the group because of ``rank``, and wake all waiting ranks."""

    def set_wait_policy(self, spins: int, yields: int, /) -> None:
        """Set how often a wait polls, then yields the core, before it sleeps."""

    def enable_single_copy(self, pids: tuple[int, ...], /) -> None:
        """Allow reading large tensors from the process of each rank. Called once by all ranks, before a call."""

    def call(self, rank: int, /) -> tuple[int, int, int, int, int, int, int]:
        """Return (sequence, operation, reduction, dtype, bytes, root, list_digest) of a call of ``rank``.

        It is the call with the sequence of this rank's last one. The returned sequence is 2**64 - 1 if ``rank`` has
        not begun it. ``list_digest`` is 0 for one tensor.
        """

    # Calls that wait for the call lock, and whether the fast path is closed.
    queued: int
    fast_path_closed: int
    # Calls that were performed in a window, and by single copy.
    window_calls: int
    single_copy_calls: int
    # Not 0 if this rank found the mismatch that ended the group.
    found_mismatch: int

    def configure_fast_path(
        self, limit_ns: int, name: str, ranks: tuple[int, ...] | None, recorder: FlightRecorder, /
    ) -> None:
        """Open the fast path: timeout, name and global ranks (None: the same) of the group, and the recorder."""

    def sequence(self) -> int:
        """Return the number of the next call."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None: ...
    def leave(self) -> None:
        """Publish that this rank makes no further call."""

    def culprit(self) -> int:
        """Return the rank that caused the last failure."""

class P2P:
    """One rank's messages to and from single ranks, beside its collectives. Any number of threads may call.

    Peers are group ranks; a source of -1 accepts any. An outcome is one number, ``peer << 8 | code``: with code 0 the
    other rank, otherwise the culprit. The caller keeps the memory of a posted message until it is complete.
    """

    def __new__(cls, segment: Segment, /) -> Self:
        """Make the only one of a Segment."""

    def send(self, address: int, size: int, dtype: int, dest: int, tag: int, timeout_ns: int, /) -> int:
        """Send, and wait until the message is in the target's mailbox, or its last byte in a channel."""

    def recv(self, address: int, size: int, dtype: int, source: int, tag: int, timeout_ns: int, /) -> int:
        """Receive and wait for completion."""

    def post_send(
        self, address: int, size: int, dtype: int, dest: int, tag: int, timeout_ns: int, key: int, /
    ) -> int | Request:
        """Post a send; return the outcome if it completes at once. The timeout starts with the first wait."""

    def post_recv(
        self, address: int, size: int, dtype: int, source: int, tag: int, timeout_ns: int, key: int, /
    ) -> int | Request:
        """Post a receive; return the outcome if it completes at once. The timeout starts with the first wait."""

    def wait(self, request: Request, limit_ns: int, /) -> int:
        """Wait for a posted message (negative: without a limit); -1 if it is not complete."""

    def start_timeout(self, request: Request, /) -> None:
        """Start the timeout of a posted message, as a wait without a limit does."""

    def test(self, request: Request, /) -> int:
        """Return the outcome of a posted message, -1 if it is not complete."""

    def progress(self) -> list[int]:
        """Progress posted messages until some complete without a waiting thread; return their keys, [] once stopped."""

    def stop(self) -> None:
        """End `progress` and abort all pending messages of this rank; peers are not notified."""

    def wake_all(self) -> None:
        """Wake all sleeping ranks, which check whether the group has ended."""

    def pending_sends(self) -> int:
        """Return the number of posted sends that are not complete."""

    def mismatch(self) -> tuple[int, int, int, int, int, int, int] | None:
        """Return the first message of the group that did not fit its receive.

        (source, target, tag, dtype and bytes as sent, dtype and bytes as expected)
        """
