"""Where the ranks of a job meet: what rank 0 leaves behind for the others to find its coordinator.

A meeting is at an address that everyone was given (TCP), at a name that everyone can derive (one host), or
behind a `Board`, a place that everyone can read and write: a file, or any torch store.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Protocol

import msgspec

from ..errors import AllhandsError, fail
from .identity import host_key, process_start, this_process

__all__ = ["Board", "FileBoard", "Notice", "local_name", "outward_address", "random_name"]

_MARK = "allhands-meeting-1"

# Kernel start times are exact to a clock tick, and the boot time they are added to moves with clock adjustments.
_SAME_START_S = 2.0

# File systems that only this machine can see. On any other a rank elsewhere may read the file.
_LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})


class Notice(msgspec.Struct, frozen=True):
    """What rank 0 posts: how to reach its coordinator, and which process that is."""

    mark: str
    unix: str
    key: str
    host: str
    port: int
    pid: int
    started: float
    token: bytes = b""

    @classmethod
    def of(cls, unix: str, host: str, port: int, pid: int, token: bytes = b"") -> Notice:
        """Return the notice for a coordinator on this host."""
        return cls(_MARK, unix, host_key(), host, port, pid, process_start(pid) or 0.0, token)

    @property
    def here(self) -> bool:
        """Whether the coordinator shares this process's loopback."""
        return self.key == host_key()

    @property
    def dead(self) -> bool:
        """Whether the coordinator is certainly gone. One on another host is never certainly gone."""
        if not self.here:
            return False
        started = process_start(self.pid)
        return started is None or abs(started - self.started) > _SAME_START_S

    def pack(self) -> bytes:
        """Return the notice as text, so that a person who looks into the file sees what it is."""
        return msgspec.json.encode(self)


class Board(Protocol):
    """A place that every rank can read. ``wide`` says that ranks of other hosts may be among them."""

    wide: bool
    private: bool

    def describe(self) -> str:
        """Name the place for messages."""
        ...

    def read(self) -> Notice | None:
        """Return what is posted, None where nothing is; never blocks for long."""
        ...

    def prepare(self) -> None:
        """Rank 0: take what an earlier run left out of the way, or raise why that must not be done."""
        ...

    def post(self, notice: Notice) -> None:
        """Rank 0: let everyone see ``notice``."""
        ...

    def clear(self) -> None:
        """Rank 0: everyone has come; take it away."""
        ...


class FileBoard:
    """The file of ``file:///path``. Readable by its owner only, so it also carries a fresh token."""

    private = True

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.wide = _file_system(self.path.resolve().parent) not in _LOCAL_FILE_SYSTEMS
        self._posted = b""

    def describe(self) -> str:
        """Name the file."""
        return f"file://{self.path.absolute()}"

    def read(self) -> Notice | None:
        """Return the notice in the file; raise stale-file for anything else that is in it."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise self._unusable(problem) from problem
        if not content.strip():
            return None  # Made empty by the user (tempfile does that), to be filled by us.
        try:
            notice = msgspec.json.decode(content, type=Notice)
        except ValueError:  # msgspec's own errors, and UnicodeDecodeError.
            raise self._stale(content) from None
        if notice.mark != _MARK:
            raise self._stale(content)
        return notice

    def prepare(self) -> None:
        """Refuse a file that a living job uses; one whose coordinator is dead is simply replaced."""
        notice = self.read()
        if notice is not None and notice.here and not notice.dead:
            raise fail(
                "file-in-use",
                f"{self.path} belongs to a job that is running",
                who=f"rank 0 (pid {os.getpid()}) and the coordinator with pid {notice.pid} on this host",
                why="the process named in the file is alive (observed)",
                fix="use a file for each job, or end the other job: its rank 0 is the parent of that process "
                f"(ps -o ppid= -p {notice.pid})",
                ranks=(0,),
            )

    def post(self, notice: Notice) -> None:
        """Write the notice in one step, so that nobody reads half of it."""
        fresh = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}")
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                self._posted = notice.pack()
                file.write(self._posted)
            fresh.replace(self.path)
        except OSError as problem:
            fresh.unlink(missing_ok=True)
            raise self._unusable(problem) from problem

    def clear(self) -> None:
        """Remove the file if it is still the one posted here."""
        try:
            if self._posted and self.path.read_bytes() == self._posted:
                self.path.unlink()
        except OSError:
            return  # Gone already, which is what was wanted.

    def _stale(self, content: bytes) -> AllhandsError:
        age = ""
        try:
            age = f", last written {time.time() - self.path.stat().st_mtime:.0f} s ago"
        except OSError:
            age = ", removed meanwhile"
        return fail(
            "stale-file",
            f"{self.path} holds something that is not this job's meeting",
            who=f"pid {os.getpid()} on {socket.gethostname()}",
            why=f"it has {len(content)} bytes that allhands did not write{age}; probably an earlier run's file store",
            fix=f"remove it (rm {self.path}) or name a new file for each run",
            ranks=(0,),
        )

    def _unusable(self, problem: OSError) -> AllhandsError:
        return fail(
            "stale-file",
            f"{self.path} cannot be used to meet: {problem.strerror or problem}",
            who=f"pid {os.getpid()} on {socket.gethostname()}",
            why=f"the file system answered: {problem}",
            fix="name a file in a directory that every rank may read and write",
            ranks=(0,),
        )


def _file_system(folder: Path) -> str:
    """Return the type of the file system that ``folder`` is on, "" where the kernel does not tell."""
    best, kind = "", ""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    target = str(folder)
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        # A blank in a name would end the column, so the kernel writes its number.
        mount = mount.replace("\\040", " ")
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def local_name(job: str) -> str:
    """Return the socket name at which ranks on one host meet when they were given no address.

    Ranks of one job share the scheduler's job name; without one, they share the process that started them.
    """
    identity = job or f"parent:{this_process().parent}"
    digest = hashlib.sha256(f"{os.getuid()}\0{identity}".encode()).hexdigest()
    return f"allhands-{digest[:24]}"


def random_name() -> str:
    """Return a socket name that nobody else has."""
    return f"allhands-{secrets.token_hex(12)}"


def outward_address(towards: str = "") -> str:
    """Return this host's own address on the way to ``towards`` (by default: to the world). Sends nothing."""
    # Connecting a datagram socket only looks up the route. 192.0.2.1 is reserved for documentation.
    for family, target in ((socket.AF_INET, towards or "192.0.2.1"), (socket.AF_INET6, towards or "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
