"""One question to Google's metadata server, with one deadline for all of it."""

from __future__ import annotations

import ipaddress
import socket
import time

__all__ = ["DEADLINE_S", "ask"]

# The server is on the machine itself and answers in milliseconds; where it is filtered, this is all it costs.
DEADLINE_S = 0.5
# A whole instance's metadata is some ten kilobytes; more is not a metadata server.
_MOST = 1 << 20
# Names are not looked up, because a resolver keeps no deadline. These are known without one.
_KNOWN = {"": "169.254.169.254", "metadata.google.internal": "169.254.169.254", "localhost": "127.0.0.1"}


def ask(server: str, path: str, deadline_s: float = DEADLINE_S) -> str | None:
    """Return what the metadata server says at ``path``; None where it does not answer well within the deadline."""
    host, _, number = server.partition(":")
    host = _KNOWN.get(host, host)
    try:
        ipaddress.IPv4Address(host)
        where = (host, int(number or 80))
    except ValueError:
        return None
    end = time.monotonic() + deadline_s
    # HTTP/1.0, so that the end of the answer is the end of the connection.
    request = f"GET /computeMetadata/v1/{path} HTTP/1.0\r\nHost: {host}\r\nMetadata-Flavor: Google\r\n\r\n"
    answer = b""
    try:
        with socket.create_connection(where, timeout=deadline_s) as link:
            link.sendall(request.encode())
            while len(answer) <= _MOST:
                # A socket's timeout is for one call; a slow dribble would pass it again and again.
                left = end - time.monotonic()
                if left <= 0:
                    return None
                link.settimeout(left)
                chunk = link.recv(65536)
                if not chunk:
                    break
                answer += chunk
    except (OSError, OverflowError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *fields = head.decode("latin-1").lower().split("\r\n")
    # Some other service on this address would not carry the flavour.
    if first.split()[1:2] != ["200"] or "metadata-flavor: google" not in fields:
        return None
    return body.decode("utf-8", "replace")
