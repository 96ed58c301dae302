"""What the kernel knows about a socket: who is at the other end, and how long to try before giving up."""

from __future__ import annotations

import socket
import struct

__all__ = ["keep_alive", "peer"]

_UCRED = struct.Struct("3i")

# A host that lost power or its cable answers nothing: give up after about 8 s (idle 3 s, then 5 probes)
# instead of the kernel's two hours. Only silence of the host's kernel counts, not of the process.
_IDLE_S, _INTERVAL_S, _PROBES = 3, 1, 5


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end of a Unix socket, as the kernel saw it connect."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def keep_alive(sock: socket.socket) -> None:
    """Make the kernel notice a host that vanished, and send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # Unacknowledged data must not outlive that either.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_IDLE_S + _INTERVAL_S * _PROBES) * 1000)
