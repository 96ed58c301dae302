"""A small DNS server for the laboratory, with given names, which may be added late."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator

from hosts.machine import within

__all__ = ["Names", "serving"]

# RFC 1035 and 3596: types A and AAAA, class IN; flags of an authoritative answer, without and with "no such name".
A, AAAA, IN = 1, 28, 1
FOUND, NO_SUCH_NAME = 0x8580, 0x8583


class Names:
    """The names of the server, and the queries that it received."""

    def __init__(self, *, silent: bool = False, slow_s: float = 0.0) -> None:
        self.known: dict[str, str] = {}
        self.asked: list[str] = []
        self.silent, self.slow_s = silent, slow_s

    def answer(self, question: bytes) -> bytes:
        """Return the answer to one packet: the address, nothing (none of that kind), or that there is no such name."""
        labels, at = [], 12
        while length := question[at]:
            labels.append(question[at + 1 : at + 1 + length].decode())
            at += 1 + length
        kind, _ = struct.unpack("!HH", question[at + 1 : at + 5])
        name = ".".join(labels)
        self.asked.append(name)
        address = self.known.get(name)
        records = b""
        if address is not None and kind == (AAAA if ":" in address else A):
            packed = ipaddress.ip_address(address).packed
            # 0xC00C points at the question's name; the answer is good for no time at all.
            records = struct.pack("!HHHIH", 0xC00C, kind, IN, 0, len(packed)) + packed
        flags = FOUND if address is not None else NO_SUCH_NAME
        head = question[:2] + struct.pack("!HHHHH", flags, 1, 1 if records else 0, 0, 0)
        return head + question[12 : at + 5] + records


@contextlib.contextmanager
def serving(namespace: str, address: str, *, silent: bool = False, slow_s: float = 0.0) -> Iterator[Names]:
    """Answer on port 53 of ``address`` in ``namespace``, as long as the block lasts; not at all, or each time late."""
    names = Names(silent=silent, slow_s=slow_s)

    def listen() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((address, 53))
        return made

    link = within(namespace, listen)
    link.settimeout(0.1)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                packet, peer = link.recvfrom(4096)
                answer = names.answer(packet)
                over.wait(names.slow_s)
                if not names.silent:
                    link.sendto(answer, peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield names
    finally:
        over.set()
        thread.join()
        link.close()
