"""The flight recorder: the last calls of this process's groups, in shared memory that other processes can read.

A process has one flight recorder: a memfd that stays open. Any process of the same user can find it in
``/proc/PID/fd`` and read it with `read`, even while the recorded process hangs or is stopped. Needs no torch and
imports nothing slow: the launcher creates the recorders of its workers before it starts them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import _core, settings

__all__ = ["Entry", "FlightRecorder", "board", "make", "open_memfds", "own", "parse", "read", "read_owned"]

_NAME = "allhands-recorder"

# If the file could shrink while it is mapped, the next write would raise SIGBUS in the middle of a collective.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# The layout of csrc/recorder/flight_recorder.h, version 1.
_HEAD = struct.Struct("<8sIIqiiQ")
_ENTRY = struct.Struct("<QQQQqqqIIiI6Q24s24s12s12s64s")
_HEAD_BYTES = 4096
_MAGIC, _VERSION = b"allboard", 1
_STATES = ("", "waiting", "running", "done", "failed")

# An entry is written in well under a microsecond. If it still changes after this many reads, the process was stopped
# or killed while it wrote.
_READS = 100


class Entry(NamedTuple):
    """One call. Times are on the monotonic clock of this host; 0.0 means "not yet"."""

    number: int
    group: str
    sequence: int
    operation: str
    reduction: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    root: int
    site: str
    state: str
    main: bool
    issued_s: float
    started_s: float
    ended_s: float

    @property
    def under_way(self) -> bool:
        """Whether the call waits or runs."""
        return self.state in {"waiting", "running"}

    @property
    def age_s(self) -> float:
        """The time since the call entered its state."""
        since = {"waiting": self.issued_s, "running": self.started_s}.get(self.state, self.ended_s)
        return max(0.0, time.monotonic() - since)

    @property
    def call(self) -> str:
        """The call in words: ``all_reduce SUM of float32[3, 4]``."""
        words = [self.operation, self.reduction]
        if self.dtype:
            words += ["of", f"{self.dtype}[{', '.join(map(str, self.shape))}]"]
        if self.root >= 0:
            words += ["with root", str(self.root)]
        return " ".join(word for word in words if word)

    def __str__(self) -> str:
        """Return the call, its source line and its state in one line."""
        return f"{self.call} at {self.site}: {self.state} for {self.age_s:.1f} s"


class FlightRecorder(NamedTuple):
    """A snapshot of one process's flight recorder, oldest entry first. ``rank`` is -1 before a group is formed.

    ``owner`` is the pid of the process that writes it, in that process's own pid namespace: the launcher and forked
    children have the same descriptor open.
    """

    pid: int
    rank: int
    world_size: int
    entries: tuple[Entry, ...]
    owner: int = 0

    @property
    def under_way(self) -> tuple[Entry, ...]:
        """The calls that wait or run."""
        return tuple(entry for entry in self.entries if entry.under_way)

    @property
    def last(self) -> Entry | None:
        """The latest call that runs; otherwise the latest that waits; otherwise the latest of all."""
        running = tuple(entry for entry in self.entries if entry.state == "running")
        found = running or self.under_way or self.entries
        return found[-1] if found else None


def make() -> int:
    """Create the memory of a flight recorder, for this process or a child; return its descriptor."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _core.flight_recorder_bytes())
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _given() -> int | None:
    """Return the descriptor that the launcher created for this process, or None.

    Every child inherits the variable, and in a child the number may be another file: pid and file are checked.
    """
    number, _, pid = settings.read().recorder_fd.partition(":")
    if pid != str(os.getpid()) or not number.isdecimal():
        return None
    descriptor = int(number)
    try:
        ours = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME} ")  # noqa: PTH115
        whole = ours and os.fstat(descriptor).st_size == _core.flight_recorder_bytes()
        return descriptor if whole and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS else None
    except OSError:
        return None


@functools.cache
def _mine() -> tuple[int, _core.FlightRecorder]:
    """Return the flight recorder of this process, and the descriptor by which others find it."""
    given = _given()
    descriptor = make() if given is None else given
    return descriptor, _core.FlightRecorder(descriptor)


# A forked child has its parent's recorder mapped; its own calls belong in a recorder of its own.
os.register_at_fork(after_in_child=_mine.cache_clear)


def own() -> _core.FlightRecorder:
    """Return this process's flight recorder, for writing."""
    return _mine()[1]


def board(pid: int | None = None) -> FlightRecorder:
    """Return a snapshot of the flight recorder of this process, or of the process ``pid`` of this host.

    Raises LookupError if that process has none, PermissionError if it belongs to another user.
    """
    if pid is not None:
        return read(pid)
    return parse(os.getpid(), _mine()[0])


def read(pid: int) -> FlightRecorder:
    """Return a snapshot of the flight recorder of the process ``pid``, which may hang or be stopped.

    Raises LookupError if it has none, PermissionError if it belongs to another user.
    """
    for path in open_memfds(pid, _NAME):
        with contextlib.suppress(FileNotFoundError):  # Closed meanwhile: the process ended.
            return _parse_at(pid, path)
    raise LookupError(f"process {pid} has no flight recorder: it uses no allhands group")


def read_owned(pid: int, inner_pid: int | None = None) -> FlightRecorder | None:
    """Return the flight recorder that the process ``pid`` itself writes, or None if it has none or access is denied.

    ``inner_pid`` is the pid that it has in its own pid namespace.
    """
    with contextlib.suppress(LookupError, OSError):
        for path in open_memfds(pid, _NAME):
            with contextlib.suppress(LookupError, OSError):  # Not written yet, or closed meanwhile.
                found = _parse_at(pid, path)
                if found.owner == (pid if inner_pid is None else inner_pid):
                    return found
    return None


def _parse_at(pid: int, path: str) -> FlightRecorder:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return parse(pid, file.fileno())


def open_memfds(pid: int, name: str) -> list[str]:
    """Return the paths of the memfds called ``name`` that the process has open.

    Raises LookupError if there is no such process, PermissionError if it belongs to another user.
    """
    found = []
    try:
        with os.scandir(f"/proc/{pid}/fd") as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # Closed meanwhile.
                    if os.readlink(file.path).startswith(f"/memfd:{name} "):  # noqa: PTH115
                        found.append(file.path)
    except (FileNotFoundError, PermissionError) as problem:
        # Access is denied to another user's process, and to one that ended meanwhile.
        if isinstance(problem, PermissionError) and os.path.exists(f"/proc/{pid}"):  # noqa: PTH110
            raise
        raise LookupError(f"there is no process {pid}") from None
    return found


def parse(pid: int, descriptor: int) -> FlightRecorder:
    """Return the content of the flight recorder in ``descriptor``, which belongs to ``pid``, dead or alive.

    Raises LookupError if the process has written none.
    """
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        magic, version, count, owner, rank, world_size, _ = _HEAD.unpack_from(memory)
        if magic != _MAGIC or version != _VERSION:
            raise LookupError(f"the flight recorder of process {pid} is of another version of allhands")
        found = sorted(_entries(memory, count), key=lambda entry: entry.number)
    return FlightRecorder(pid, rank, world_size, tuple(found), owner)


def _entries(memory: mmap.mmap, count: int) -> Iterator[Entry]:
    for index in range(count):
        at = _HEAD_BYTES + index * _ENTRY.size
        for _ in range(_READS):
            fields = _ENTRY.unpack_from(memory, at)
            (again,) = struct.unpack_from("<Q", memory, at)
            if fields[0] == again and again % 2 == 0:
                break
        if fields[7]:
            yield _entry(fields)


def _entry(fields: tuple[Any, ...]) -> Entry:
    _, number, sequence, size, issued, started, ended, state, main, root, dims, *rest = fields
    shape, texts = rest[:6], [text.rstrip(b"\0").decode(errors="replace") for text in rest[6:]]
    operation, group, dtype, reduction, site = texts
    return Entry(
        number=number,
        group=group,
        sequence=sequence,
        operation=operation,
        reduction=reduction,
        dtype=dtype,
        shape=tuple(shape[:dims]),
        bytes=size,
        root=root,
        site=site,
        state=_STATES[state] if state < len(_STATES) else "",
        main=bool(main),
        issued_s=issued / 1e9,
        started_s=started / 1e9,
        ended_s=ended / 1e9,
    )
