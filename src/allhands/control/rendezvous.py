"""How ranks find the coordinator: the announcement that rank 0 publishes, and the places where it does.

Ranks use an address that all were given (TCP), a socket name that all can derive (one host), or a `Rendezvous`: a file
or a torch store that all can read and rank 0 can write.
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
from .process_identity import host_key, process_start, this_process

__all__ = [
    "Announcement",
    "FileRendezvous",
    "Rendezvous",
    "local_socket_name",
    "outbound_address",
    "random_socket_name",
]

# Kernel start times are exact to a clock tick; the boot time that is added to them changes with clock adjustments.
_SAME_START_S = 2.0

# File systems that only this machine can see. On any other, ranks elsewhere may read the file.
_LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})


class Announcement(msgspec.Struct, frozen=True, tag_field="mark", tag="allhands-rendezvous-1"):
    """The address of a coordinator, and which process it is."""

    unix: str
    key: str
    host: str
    port: int
    pid: int
    started: float
    token: bytes = b""

    @classmethod
    def of(cls, unix: str, host: str, port: int, pid: int, token: bytes = b"") -> Announcement:
        """Return the announcement of a coordinator on this host."""
        return cls(unix, host_key(), host, port, pid, process_start(pid) or 0.0, token)

    @property
    def here(self) -> bool:
        """Whether the coordinator shares this process's loopback interface."""
        return self.key == host_key()

    @property
    def dead(self) -> bool:
        """Whether the coordinator has certainly ended. One on another host may always be alive."""
        if not self.here:
            return False
        started = process_start(self.pid)
        return started is None or abs(started - self.started) > _SAME_START_S

    def pack(self) -> bytes:
        """Return the announcement as JSON, so that a person who opens the file can read it."""
        return msgspec.json.encode(self)


class Rendezvous(Protocol):
    """A place that every rank can read. ``wide``: ranks on other hosts may read it; ``private``: only this user may."""

    wide: bool
    private: bool

    def describe(self) -> str:
        """Return the name of the place, for messages."""
        ...

    def read(self) -> Announcement | None:
        """Return the published announcement, None if there is none. Does not wait."""
        ...

    def prepare(self) -> None:
        """Rank 0: allow `publish` to replace what an earlier run left, or raise why it must not be replaced."""
        ...

    def publish(self, announcement: Announcement) -> None:
        """Rank 0: make ``announcement`` visible to all ranks."""
        ...

    def clear(self) -> None:
        """Rank 0: remove the announcement after the roll call."""
        ...


class FileRendezvous:
    """The file of ``file:///path``. Only its owner can read it, so it also carries a fresh token."""

    private = True

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.wide = _file_system(self.path.resolve().parent) not in _LOCAL_FILE_SYSTEMS
        self._published = b""

    def describe(self) -> str:
        """Return the file's URL."""
        return f"file://{self.path.absolute()}"

    def read(self) -> Announcement | None:
        """Return the announcement in the file; raise stale-file if the file has other content."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise self._unusable(problem) from problem
        if not content.strip():
            return None  # The user created it empty, as tempfile does.
        try:
            return msgspec.json.decode(content, type=Announcement)
        except ValueError:  # msgspec's errors, and UnicodeDecodeError
            raise self._stale(content) from None

    def prepare(self) -> None:
        """Raise file-in-use if the coordinator named in the file is alive; otherwise it may be replaced."""
        found = self.read()
        if found is not None and found.here and not found.dead:
            raise fail(
                "file-in-use",
                f"{self.path} belongs to a job that is running",
                who=f"rank 0 (pid {os.getpid()}) and the coordinator with pid {found.pid} on this host",
                why="the process named in the file is alive (observed)",
                fix="use a file for each job, or end the other job: its rank 0 is the parent of that process "
                f"(ps -o ppid= -p {found.pid})",
                ranks=(0,),
            )

    def publish(self, announcement: Announcement) -> None:
        """Write the file atomically."""
        fresh = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}")
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                self._published = announcement.pack()
                file.write(self._published)
            fresh.replace(self.path)
        except OSError as problem:
            fresh.unlink(missing_ok=True)
            raise self._unusable(problem) from problem

    def clear(self) -> None:
        """Remove the file if it still has the content published here."""
        try:
            if self._published and self.path.read_bytes() == self._published:
                self.path.unlink()
        except OSError:
            return  # It was removed already.

    def _stale(self, content: bytes) -> AllhandsError:
        try:
            age = f", last written {time.time() - self.path.stat().st_mtime:.0f} s ago"
        except OSError:
            age = ", removed meanwhile"
        return fail(
            "stale-file",
            f"{self.path} is not a rendezvous file of this job",
            who=f"pid {os.getpid()} on {socket.gethostname()}",
            why=f"it has {len(content)} bytes that allhands did not write{age}; probably an earlier run's file store",
            fix=f"remove it (rm {self.path}) or name a new file for each run",
            ranks=(0,),
        )

    def _unusable(self, problem: OSError) -> AllhandsError:
        return fail(
            "stale-file",
            f"{self.path} cannot be used as rendezvous file: {problem.strerror or problem}",
            who=f"pid {os.getpid()} on {socket.gethostname()}",
            why=f"the file system answered: {problem}",
            fix="name a file in a directory that every rank may read and write",
            ranks=(0,),
        )


def _file_system(folder: Path) -> str:
    """Return the type of the file system of ``folder``, "" if it is unknown."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    # The kernel escapes blanks in names. A later mount at the same place hides an earlier one.
    kinds = {line.split(" ")[1].replace("\\040", " "): line.split(" ")[2] for line in lines}
    mounts = [mount for mount in kinds if folder.is_relative_to(mount)]
    return kinds[max(mounts, key=len)] if mounts else ""


def local_socket_name(job: str) -> str:
    """Return the socket name that the ranks of one host derive if they were given no address.

    It depends on the scheduler's job name, or without one on the process that started the ranks.
    """
    identity = job or f"parent:{this_process().parent}"
    digest = hashlib.sha256(f"{os.getuid()}\0{identity}".encode()).hexdigest()
    return f"allhands-{digest[:24]}"


def random_socket_name() -> str:
    """Return a unique socket name."""
    return f"allhands-{secrets.token_hex(12)}"


def outbound_address() -> str:
    """Return this host's source address for packets to the internet, 127.0.0.1 without a route. Sends nothing."""
    # Connecting a datagram socket only looks up the route. Both addresses are reserved for documentation.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
