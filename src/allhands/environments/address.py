"""Reading HOST:PORT, with or without tcp:// and with IPv6 in brackets."""

from __future__ import annotations

from ..errors import fail
from .base import me, port
from .world import Address

__all__ = ["parse"]


def parse(written: str, where: str) -> Address:
    """Return the address that is ``written`` as HOST:PORT; ``where`` names its origin in errors."""
    host, colon, number = written.removeprefix("tcp://").strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    # An IPv6 address without brackets is ambiguous: its last group looks like a port.
    if not colon or not host or (":" in host and not bracketed) or not (number.isascii() and number.isdecimal()):
        raise fail(
            "invalid-argument",
            f"{where} is not an address",
            who=me(),
            why="an address is HOST:PORT, with an IPv6 address in brackets: [fe80::1]:29500",
            fix="give the host and the port of rank 0",
        )
    return Address(host, port(int(number), where))
