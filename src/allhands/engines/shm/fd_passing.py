"""Share anonymous memory among ranks: descriptors over Unix sockets, with the peer's credentials checked.

`FdPassing` sends memory from rank 0 of a group to the others. `hosts` finds which ranks can share memory: ranks on one
machine may be in containers that cannot reach each other, or belong to different users.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch.distributed.distributed_c10d import Store

from ...control.process_identity import host_key, peer_credentials
from ...diagnosis import Diagnosis
from ...errors import AllhandsError, error, fail

__all__ = ["Apart", "FdPassing", "Handover", "allocate", "hosts", "no_room", "pid_namespace", "require_room"]

# How often a wait for a peer checks whether the group is over.
_POLL_S = 0.1

# In the store a diagnosis with this prefix replaces the name of the socket.
_REFUSED = "!"

# Allocating more pages than the machine has makes the kernel kill some process, not always ours. So allocation is
# refused where less than this part of the free memory would be left.
_MIN_FREE = 0.05

_NONCE_BYTES = 16


# Creates memory for as many ranks, with a nonce in it, and returns its descriptor; raises shm-too-small.
_Create = Callable[[int, bytes], int]


class Apart(ConnectionError):
    """Some ranks of a group cannot share memory with its rank 0, though all are on one machine. All ranks raise it."""


class _Hello(msgspec.Struct):
    """What a rank sends to the rank that owns the memory."""

    rank: int
    namespace: int


class Handover(msgspec.Struct):
    """Sent with the memory: its size and nonce, and each rank's pid in the sender's pid namespace."""

    size: int
    nonce: bytes
    pids: list[int]
    namespace: int


def pid_namespace() -> int:
    """Return the number of this process's pid namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def require_room(size: int, purpose: str) -> None:
    """Raise shm-too-small where there is no room for ``size`` bytes."""
    free = sys.maxsize
    # psutil reads the same, but importing it would delay every rank by a tenth of a second. Kernels before 3.14 have no
    # such line; they refuse the pages.
    if found := re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii")):
        free = int(found[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # Not in a cgroup, or one without a limit.
        here = Path("/sys/fs/cgroup")
        free = min(free, int((here / "memory.max").read_text()) - int((here / "memory.current").read_text()))
    if size > free * (1 - _MIN_FREE):
        raise no_room(size, purpose, f"{free / 2**20:.0f} MiB are free (observed)")


def no_room(size: int, purpose: str, why: str) -> AllhandsError:
    """Return shm-too-small."""
    return fail(
        "shm-too-small",
        f"there is no room for {size / 2**20:,.0f} MiB: {purpose}",
        who=f"rank 0 of the group ({socket.gethostname()}, pid {os.getpid()})",
        why=why,
        fix="free memory, or raise the memory limit of the container or cgroup",
        ranks=(0,),
    )


def allocate(name: str, size: int, purpose: str) -> int:
    """Return a file without a path that has all its ``size`` bytes; raise shm-too-small where there is no room."""
    require_room(size, purpose)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as problem:
        os.close(descriptor)
        raise no_room(size, purpose, f"the kernel refused the pages: {problem.strerror}") from problem
    return descriptor


class FdPassing:
    """Creates memory that the ranks of one group share. Each of them calls `share` with the same key."""

    def __init__(self, store: Store, rank: int, ranks: int, check: Callable[[], None]) -> None:
        """Meet through ``store``; ``check`` is called now and then and raises where the group is over."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._check = check

    def share(self, key: str, create: _Create, timeout_s: float) -> tuple[int, Handover]:
        """Have rank 0 ``create`` memory and send it to all. Return its descriptor, to be closed by the caller.

        A failure to create it is raised on every rank, and so is Apart where a rank cannot connect.
        """
        deadline = time.monotonic() + timeout_s
        if self._rank == 0:
            return self._send(key, create, deadline)
        return self._fetch(key, deadline)

    def _send(self, key: str, create: _Create, deadline: float) -> tuple[int, Handover]:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            descriptor = create(self._ranks, nonce)
        except AllhandsError as problem:
            self._store.set(key, _REFUSED + msgspec.json.encode(problem.diagnosis).decode())
            raise
        pids = [os.getpid()] + [0] * (self._ranks - 1)
        handover = Handover(os.fstat(descriptor).st_size, nonce, pids, pid_namespace())
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as opened:
            undo.callback(os.close, descriptor)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            # A new name in the abstract namespace.
            name = f"allhands-shm-{secrets.token_hex(12)}"
            listener.bind("\0" + name)
            listener.listen(self._ranks)
            self._store.set(key, name)
            clients: dict[int, socket.socket] = {}
            while len(clients) < self._ranks - 1:
                client = self._accept(listener, key, deadline)
                pid, uid = peer_credentials(client)
                client.settimeout(max(0.01, deadline - time.monotonic()))
                hello = _hello(client) if uid in {os.getuid(), 0} else None
                if hello is None or not 0 < hello.rank < self._ranks or hello.rank in clients:
                    client.close()  # A stranger, or a rank that ended, which the coordinator reports.
                    continue
                clients[hello.rank] = opened.enter_context(client)
                pids[hello.rank] = pid if hello.namespace == handover.namespace else 0
            for client in clients.values():
                with contextlib.suppress(ConnectionError):  # It ended: no reason for the others to wait.
                    socket.send_fds(client, [msgspec.msgpack.encode(handover)], [descriptor])
            undo.pop_all()
        return descriptor, handover

    def _accept(self, listener: socket.socket, key: str, deadline: float) -> socket.socket:
        while True:
            self._check()
            listener.settimeout(max(0.01, min(_POLL_S, deadline - time.monotonic())))
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self._store.check([f"{key}/apart"]):
                    # Ranks that are connected see their connection end without the memory.
                    raise Apart("a rank cannot connect to fetch the memory") from None
                if time.monotonic() >= deadline:
                    raise

    def _fetch(self, key: str, deadline: float) -> tuple[int, Handover]:
        name = self._store.get(key).decode()
        if name.startswith(_REFUSED):
            raise error(msgspec.json.decode(name.removeprefix(_REFUSED), type=Diagnosis))
        try:
            with _connect(name, deadline) as sock:
                sock.send(msgspec.msgpack.encode(_Hello(self._rank, pid_namespace())))
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


def _hello(client: socket.socket) -> _Hello | None:
    """Return the message of ``client``, None where it ended before it sent one or sent something else."""
    try:
        return msgspec.msgpack.decode(client.recv(256), type=_Hello)
    except (ConnectionError, msgspec.DecodeError):
        return None
    except BaseException:
        client.close()
        raise


def _connect(name: str, deadline: float) -> socket.socket:
    """Connect to the socket ``name``; raise OSError where that fails or another user's process listens."""
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        sock.connect("\0" + name)
        if peer_credentials(sock)[1] not in {os.getuid(), 0}:
            raise PermissionError("the memory is offered by another user's process")
        undo.pop_all()
    return sock


def hosts(store: Store, rank: int, size: int) -> list[list[int]]:
    """Return the ranks of each host of a group, ordered by their lowest rank. Every rank of the group calls this.

    A host is the processes of one user on one machine and in one network namespace: they can connect to each other's
    sockets. Where something else forbids it, `FdPassing.share` raises Apart.
    """
    store.set(f"machine/{rank}", f"{host_key()} {os.getuid()}")
    found: dict[bytes, list[int]] = {}
    for each, machine in enumerate(store.multi_get([f"machine/{each}" for each in range(size)])):
        found.setdefault(machine, []).append(each)
    return list(found.values())
