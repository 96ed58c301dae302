"""The board: what each rank is doing and did last, in shared memory, readable from outside while ranks hang.

A process has one board, a memfd that stays open, so that whoever may look into ``/proc/PID/fd`` can read it with
`read`, however stuck the process is. Nothing here needs torch. (The module is not called ``board`` because that is
what ``allhands.board()`` is.) Imports nothing that is slow: the launcher makes boards before it starts workers.
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

__all__ = ["Board", "Note", "board", "make", "own", "owned", "parse", "read"]

_NAME = "allhands-board"

# A board that could shrink under the process that has it mapped would be a SIGBUS in the middle of a collective.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# The layout of csrc/board.h, version 1.
_HEAD = struct.Struct("<8sIIqiiQ")
_NOTE = struct.Struct("<QQQQqqqIIiI6Q24s24s12s12s64s")
_HEAD_BYTES = 4096
_MAGIC, _VERSION = b"allboard", 1
_STATES = ("", "waiting", "running", "done", "failed")

# A note is written in well under a microsecond; one that is still being written after this many looks belongs to a
# process that was stopped or killed in the middle of it.
_LOOKS = 100


class Note(NamedTuple):
    """One operation. Times are on this host's monotonic clock; 0.0 for "not yet"."""

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
        """Whether it waits or runs."""
        return self.state in {"waiting", "running"}

    @property
    def age_s(self) -> float:
        """How long it has been in its state."""
        since = {"waiting": self.issued_s, "running": self.started_s}.get(self.state, self.ended_s)
        return max(0.0, time.monotonic() - since)

    @property
    def call(self) -> str:
        """What was called, for a reader: ``all_reduce SUM of float32[3, 4]``."""
        words = [self.operation, self.reduction]
        if self.dtype:
            words += ["of", f"{self.dtype}[{', '.join(map(str, self.shape))}]"]
        if self.root >= 0:
            words += ["with root", str(self.root)]
        return " ".join(word for word in words if word)

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.call} at {self.site}: {self.state} for {self.age_s:.1f} s"


class Board(NamedTuple):
    """What a process had on its board at one moment, the oldest first. A rank of -1 is one that has no group yet.

    ``owner`` is the process that writes there, as it calls itself: a launcher and a forked child have it open too.
    """

    pid: int
    rank: int
    world_size: int
    notes: tuple[Note, ...]
    owner: int = 0

    @property
    def under_way(self) -> tuple[Note, ...]:
        """What waits or runs."""
        return tuple(note for note in self.notes if note.under_way)

    @property
    def last(self) -> Note | None:
        """What it does, else what it did last."""
        running = tuple(note for note in self.notes if note.state == "running")
        found = running or self.under_way or self.notes
        return found[-1] if found else None


class _Own:
    """This process's board, and the descriptor by which others find it."""

    def __init__(self) -> None:
        given = _given()
        self.descriptor = make() if given is None else given
        self.core = _core.Board(self.descriptor)


def make() -> int:
    """Make the memory of a board, for this process or for one that it starts; return its descriptor."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _core.board_bytes())
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _given() -> int | None:
    """Return the descriptor that the launcher made for exactly this process, None where there is none.

    The variable is inherited by everything that this process starts, and the number may be some other file there.
    """
    number, _, pid = settings.read().board_fd.partition(":")
    if pid != str(os.getpid()) or not number.isdecimal():
        return None
    descriptor = int(number)
    try:
        ours = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME} ")  # noqa: PTH115
        whole = ours and os.fstat(descriptor).st_size == _core.board_bytes()
        return descriptor if whole and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS else None
    except OSError:
        return None


@functools.cache
def _mine() -> _Own:
    return _Own()


# A child that was forked has its parent's board mapped; what it writes belongs on one of its own.
os.register_at_fork(after_in_child=_mine.cache_clear)


def own() -> _core.Board:
    """Return this process's board, to write on."""
    return _mine().core


def board(pid: int | None = None) -> Board:
    """Return what this process, or the process ``pid`` of this host, has on its board.

    Raises LookupError where that process has none, PermissionError where it is another user's.
    """
    if pid is not None:
        return read(pid)
    own()
    return parse(os.getpid(), _mine().descriptor)


def read(pid: int) -> Board:
    """Return what the process ``pid`` has on its board, without its help: it may hang or be stopped."""
    for entry in _find(pid):
        with contextlib.suppress(FileNotFoundError):  # Closed meanwhile: it has ended.
            return _parse_at(pid, entry)
    raise LookupError(f"process {pid} has no board: it uses no allhands group")


def owned(pid: int, called: int | None = None) -> Board | None:
    """Return the board that the process ``pid`` itself writes on, None where it has none or this user may not look.

    ``called`` is the number that it has in its own pid namespace.
    """
    try:
        for entry in _find(pid):
            try:
                found = _parse_at(pid, entry)
            except (LookupError, OSError):
                continue  # Not written yet, or closed meanwhile.
            if found.owner == (pid if called is None else called):
                return found
    except (LookupError, OSError):
        return None
    return None


def _parse_at(pid: int, entry: str) -> Board:
    descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return parse(pid, descriptor)
    finally:
        os.close(descriptor)


def _find(pid: int) -> list[str]:
    """Return where the boards are that the process has open."""
    found = []
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    if os.readlink(entry.path).startswith(f"/memfd:{_NAME} "):  # noqa: PTH115
                        found.append(entry.path)
                except FileNotFoundError:
                    continue  # Closed meanwhile.
    except FileNotFoundError:
        raise LookupError(f"there is no process {pid}") from None
    except PermissionError:
        # Another user's; or it ended meanwhile, of which the kernel says the same.
        if os.path.exists(f"/proc/{pid}"):  # noqa: PTH110
            raise
        raise LookupError(f"there is no process {pid}") from None
    return found


def parse(pid: int, descriptor: int) -> Board:
    """Return what is on the board in ``descriptor``, that of the process ``pid``, which may be dead.

    Raises LookupError where the process has written none.
    """
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        magic, version, notes, owner, rank, world_size, _ = _HEAD.unpack_from(memory)
        if magic != _MAGIC or version != _VERSION:
            raise LookupError(f"the board of process {pid} is of another version of allhands")
        found = sorted(_notes(memory, notes), key=lambda note: note.number)
    return Board(pid, rank, world_size, tuple(found), owner)


def _notes(memory: mmap.mmap, count: int) -> Iterator[Note]:
    for index in range(count):
        at = _HEAD_BYTES + index * _NOTE.size
        for _ in range(_LOOKS):
            fields = _NOTE.unpack_from(memory, at)
            (again,) = struct.unpack_from("<Q", memory, at)
            if fields[0] == again and again % 2 == 0:
                break
        if fields[7]:
            yield _note(fields)


def _note(fields: tuple[Any, ...]) -> Note:
    _, number, sequence, size, issued, started, ended, state, main, root, dims, *rest = fields
    shape, texts = rest[:6], [text.rstrip(b"\0").decode(errors="replace") for text in rest[6:]]
    operation, group, dtype, reduction, site = texts
    return Note(
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
