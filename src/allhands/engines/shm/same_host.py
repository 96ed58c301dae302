"""Which ranks of a group can share memory: found by trying, because no name and no number tells.

Ranks on one machine may be in containers that cannot reach each other, or belong to different users. Those that can
fetch a page of memory from one another are on one *host*; whoever cannot is on another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from ...control.process_identity import host_key, peer_credentials
from .fd_passing import connect, name_socket

__all__ = ["find"]

# What a rank says of its attempt.
_CAN, _CANNOT = "can", "cannot"

# How often the one that offers the page looks whether everyone has tried, where nobody wakes it.
_LOOK_S = 0.1

# A page comes at once or not at all; on a machine whose cores all have other work it may take a while.
_TRIAL_S = 10.0

_NONCE_BYTES = 16


def find(store: Store, rank: int, size: int) -> list[list[int]]:
    """Return the hosts of a group, each with its ranks, in the order of their lowest. Every rank of it calls this."""
    store.set(f"machine/{rank}", host_key())
    machines = store.multi_get([f"machine/{each}" for each in range(size)])
    home = _home(store, rank, [each for each in range(size) if machines[each] == machines[rank]])
    store.set(f"home/{rank}", str(home))
    hosts: dict[int, list[int]] = {}
    for each, found in enumerate(store.multi_get([f"home/{each}" for each in range(size)])):
        hosts.setdefault(int(found), []).append(each)
    return [hosts[lowest] for lowest in sorted(hosts)]


def _home(store: Store, rank: int, near: Sequence[int]) -> int:
    """Return the lowest rank that ``rank`` can share memory with, of those that are on its machine."""
    while True:
        first, *others = near
        if not others:
            return first
        key = f"trial/{first}"
        if rank == first:
            answers = _offer(store, key, others)
        else:
            store.set(f"{key}/{rank}", _CAN if _fetch(store.get(key).decode()) else _CANNOT)
            answers = store.multi_get([f"{key}/{each}" for each in others])
        near = [each for each, answer in zip(others, answers, strict=True) if answer.decode() == _CANNOT]
        if rank not in near:
            return first


def _offer(store: Store, key: str, others: Sequence[int]) -> list[bytes]:
    """Let ``others`` fetch a page; return what each says of it."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    page = os.memfd_create("allhands-trial", os.MFD_CLOEXEC)
    over = threading.Event()
    try:
        os.write(page, nonce.ljust(mmap.PAGESIZE, b"\0"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = name_socket()
            listener.bind("\0" + name)
            listener.listen(len(others))
            serving = threading.Thread(target=_serve, args=(listener, page, over), daemon=True)
            serving.start()
            store.set(key, f"{name} {nonce.hex()}")
            try:
                return list(store.multi_get([f"{key}/{each}" for each in others]))
            finally:
                over.set()
                # Wakes it at once where the kernel does so.
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                serving.join()
    finally:
        os.close(page)


def _serve(listener: socket.socket, page: int, over: threading.Event) -> None:
    listener.settimeout(_LOOK_S)
    while not over.is_set():
        with contextlib.suppress(OSError):  # Nobody came, or whoever came is gone again.
            guest, _ = listener.accept()
            with guest:
                if peer_credentials(guest)[1] in {os.getuid(), 0}:
                    socket.send_fds(guest, [b"."], [page])


def _fetch(offer: str) -> bool:
    """Tell whether the page of ``offer`` can be had and holds what it should."""
    name, _, nonce = offer.partition(" ")
    try:
        with connect(name, time.monotonic() + _TRIAL_S) as sock:
            _, descriptors, _, _ = socket.recv_fds(sock, 16, 1)
        if not descriptors:
            return False
        try:
            # Mapped as the segment will be, to write too.
            with mmap.mmap(descriptors[0], mmap.PAGESIZE) as memory:
                return memory[:_NONCE_BYTES].hex() == nonce
        finally:
            os.close(descriptors[0])
    except OSError:
        return False
