"""Handing memory without a name from rank 0 of a group to the others, over a Unix socket that checks who they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from torch.distributed.distributed_c10d import Store

from ...control.process_identity import peer_credentials
from ...diagnosis import Diagnosis
from ...errors import AllhandsError, error, fail

__all__ = [
    "Apart",
    "Handing",
    "Handover",
    "allocate",
    "connect",
    "name_socket",
    "no_room",
    "pid_namespace",
    "require_room",
]

# How often to look whether the group is over while waiting for a rank to fetch the memory.
_LOOK_S = 0.1

# What stands before a diagnosis where otherwise the name of the socket stands.
_REFUSED = "!"

# Giving a file more pages than the machine has ends some process, and not always ours: so it is not tried when less
# than this part of the free memory would be left.
_LEFT = 0.05


class Apart(ConnectionError):
    """Some ranks of a group cannot share memory with its rank 0, though all are on one machine. All ranks raise it."""


class _Make(Protocol):
    """Make memory for ``ranks`` ranks; return its descriptor and size."""

    def __call__(self, ranks: int, nonce: bytes, /) -> tuple[int, int]:
        """Raise shm-too-small where there is no room."""


class _Greeting(msgspec.Struct):
    """What a rank tells the one that hands out the memory."""

    rank: int
    namespace: int


class Handover(msgspec.Struct):
    """What comes with the memory: its size, its nonce, and everyone's process as this namespace numbers them."""

    size: int
    nonce: bytes
    pids: list[int]
    namespace: int


def pid_namespace() -> int:
    """Return the number of this process's pid namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def require_room(size: int, what: str) -> None:
    """Raise shm-too-small where there is plainly no room for ``size`` bytes."""
    free = _available()
    with contextlib.suppress(OSError, ValueError):  # Not in a cgroup, or one without a limit.
        here = Path("/sys/fs/cgroup")
        free = min(free, int((here / "memory.max").read_text()) - int((here / "memory.current").read_text()))
    if size > free * (1 - _LEFT):
        raise no_room(size, what, f"{free / 2**20:.0f} MiB are free (observed)")


def _available() -> int:
    """Return how many bytes the kernel could give without swapping, from its own books.

    psutil reads the same line, and its import would take a tenth of a second that every rank waits for.
    """
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize  # A kernel older than 3.14 does not say; it will refuse the pages.


def no_room(size: int, what: str, why: str) -> AllhandsError:
    """Return shm-too-small."""
    return fail(
        "shm-too-small",
        f"there is no room for {size / 2**20:,.0f} MiB: {what}",
        who=f"rank 0 of the group ({socket.gethostname()}, pid {os.getpid()})",
        why=why,
        fix="free memory, or raise the memory limit of the container or cgroup",
        ranks=(0,),
    )


def allocate(name: str, size: int, what: str) -> int:
    """Return a file without a path that has all its ``size`` bytes; raise shm-too-small where there is no room."""
    require_room(size, what)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as problem:
        os.close(descriptor)
        raise no_room(size, what, f"the kernel refused the pages: {problem.strerror}") from problem
    return descriptor


class Handing:
    """How the ranks of one group get memory that they share. Each of them calls `share` with the same key."""

    def __init__(self, store: Store, rank: int, ranks: int, check: Callable[[], None]) -> None:
        """Meet through ``store``; ``check`` is called now and then and raises where the group is over."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._check = check

    def share(self, key: str, make: _Make, timeout_s: float) -> tuple[int, Handover]:
        """Let rank 0 ``make`` memory and give it to everyone. Return its descriptor, to be closed by the caller.

        What keeps rank 0 from making it is raised on every rank; so is Apart, where someone cannot come to fetch it.
        """
        deadline = time.monotonic() + timeout_s
        if self._rank == 0:
            return self._hand_out(key, make, deadline)
        return self._fetch(key, deadline)

    def _hand_out(self, key: str, make: _Make, deadline: float) -> tuple[int, Handover]:
        nonce = secrets.token_bytes(16)
        try:
            descriptor, size = make(self._ranks, nonce)
        except AllhandsError as problem:
            self._store.set(key, _REFUSED + msgspec.json.encode(problem.diagnosis).decode())
            raise
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        name = name_socket()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + name)
            listener.listen(self._ranks)
            self._store.set(key, name)
            guests: dict[int, socket.socket] = {}
            pids = [0] * self._ranks
            pids[0] = os.getpid()
            own = pid_namespace()
            try:
                while len(guests) < self._ranks - 1:
                    guest = self._accept(listener, key, deadline)
                    pid, uid = peer_credentials(guest)
                    if uid not in {os.getuid(), 0}:
                        guest.close()
                        continue
                    guest.settimeout(max(0.01, deadline - time.monotonic()))
                    greeting = _greeting(guest)
                    if greeting is None:
                        continue  # The coordinator tells of its end, if it was one of us.
                    guests[greeting.rank] = guest
                    pids[greeting.rank] = pid if greeting.namespace == own else 0
                handover = Handover(size, nonce, pids, own)
                for guest in guests.values():
                    with contextlib.suppress(ConnectionError):  # It has ended: nothing that the others wait for here.
                        socket.send_fds(guest, [msgspec.msgpack.encode(handover)], [descriptor])
            except BaseException:
                os.close(descriptor)
                raise
            finally:
                for guest in guests.values():
                    guest.close()
        return descriptor, handover

    def _accept(self, listener: socket.socket, key: str, deadline: float) -> socket.socket:
        while True:
            self._check()
            listener.settimeout(max(0.01, min(_LOOK_S, deadline - time.monotonic())))
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self._store.check([f"{key}/apart"]):
                    # Whoever has come already sees that its connection ends without the memory.
                    raise Apart("a rank cannot come to fetch the memory") from None
                if time.monotonic() >= deadline:
                    raise

    def _fetch(self, key: str, deadline: float) -> tuple[int, Handover]:
        name = self._store.get(key).decode()
        if name.startswith(_REFUSED):
            raise error(msgspec.json.decode(name.removeprefix(_REFUSED), type=Diagnosis))
        try:
            with connect(name, deadline) as sock:
                sock.send(msgspec.msgpack.encode(_Greeting(self._rank, pid_namespace())))
                body, descriptors, _, _ = socket.recv_fds(sock, 65536, 1)
        except TimeoutError:
            raise
        except OSError as problem:
            body, descriptors, why = b"", [], str(problem)
        else:
            why = "rank 0 of the group ended the connection"
        if not body:
            self._check()
            self._store.set(f"{key}/apart", why)
            raise Apart(why)
        if not descriptors:
            raise ConnectionError("the memory of the group was lost on its way")
        return descriptors[0], msgspec.msgpack.decode(body, type=Handover)


def _greeting(guest: socket.socket) -> _Greeting | None:
    """Return what ``guest`` says of itself; None, and its connection is closed, where it ended before it did."""
    try:
        return msgspec.msgpack.decode(guest.recv(256), type=_Greeting)
    except (ConnectionError, msgspec.DecodeError):
        guest.close()
        return None
    except BaseException:
        guest.close()
        raise


def name_socket() -> str:
    """Return a fresh name for a socket from which memory is fetched."""
    return f"allhands-shm-{secrets.token_hex(12)}"


def connect(name: str, deadline: float) -> socket.socket:
    """Connect to the socket called ``name``; raise OSError where that cannot be done, or where it is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        sock.connect("\0" + name)
        _, uid = peer_credentials(sock)
    except BaseException:
        sock.close()
        raise
    if uid not in {os.getuid(), 0}:
        sock.close()
        raise PermissionError("the memory is offered by another user's process")
    return sock
