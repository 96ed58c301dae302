"""A rail: the TCP connections of the ranks with one local index, one rank per host, which carry the same slices.

Gloo would pass each message through three threads: most of the 0.7 ms that an exchange of 512 bytes between two hosts
took there was wake-ups. Here the waiting thread does the I/O. Bytes of several exchanges may be under way on a
connection, in the order in which they began; every rank of a rail begins the same ones in the same order.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import Store

from ..base import EngineAborted, EngineTimeout, TransportFailure
from ..gloo.connections import unreachable

__all__ = ["Exchange", "Rail", "join"]

# How often a wait polls before it sleeps: a wake-up takes ten times as long as a poll.
_POLLS = 30

# The answer, the deadline and `abort` end a wait; this bounds the effect of a lost wake-up.
_MAX_SLEEP_S = 0.5

# How long a client has to send the token; any process may connect.
_TOKEN_S = 2.0

# How often a wait for connections checks whether the group is over.
_CHECK_S = 0.1

# Each end of a connection sends the other half of a token from the job's store.
_TOKEN_BYTES = 16

_Queue = deque[tuple[memoryview, "Exchange"]]


class Exchange:
    """Buffers under way; ``left`` counts those that are not complete."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 0


class Rail:
    """One rank's end of a rail. Used by one thread at a time, except `abort`."""

    def __init__(self, links: dict[int, socket.socket], ranks: Sequence[int]) -> None:
        """``links`` has a connection to each other host; ``ranks`` are the group ranks, one per host."""
        self._links = links
        self._ranks = ranks
        self._out: dict[int, _Queue] = {host: deque() for host in links}
        self._in: dict[int, _Queue] = {host: deque() for host in links}
        self._aborted = False

    def begin(self, gives: Sequence[memoryview], takes: Sequence[memoryview]) -> Exchange:
        """Begin to send each host its buffer and to fill ours from each; an empty buffer means nothing."""
        made = Exchange()
        for host in self._links:
            for queue, buffer in ((self._out[host], gives[host]), (self._in[host], takes[host])):
                if buffer:
                    queue.append((buffer, made))
                    made.left += 1
        self._pump()
        return made

    def finish(self, exchange: Exchange, until: float) -> None:
        """Wait until an exchange is complete; raise an EngineFailure where it cannot be."""
        polls = 0
        while exchange.left:
            if self._pump():
                polls = 0
            elif polls < _POLLS:
                polls += 1
                os.sched_yield()
            else:
                self._sleep(until)

    def abort(self) -> None:
        """End every wait here, now and later. From any thread."""
        self._aborted = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()

    def _pump(self) -> bool:
        """Move what can be moved without blocking; return whether there was anything."""
        moved = False
        for host, link in self._links.items():
            for queue, move in ((self._out[host], link.send), (self._in[host], link.recv_into)):
                try:
                    while queue:
                        done = move(queue[0][0])
                        if not done:
                            raise ConnectionError("the connection ended")
                        _advance(queue, done)
                        moved = True
                except BlockingIOError:
                    pass
                except OSError as problem:
                    raise TransportFailure("the connection was closed", self._ranks[host]) from problem
        return moved

    def _sleep(self, until: float) -> None:
        if self._aborted:
            raise EngineAborted("the group ended during this call")
        waiting = select.poll()
        late = -1
        for host, link in self._links.items():
            events = (select.POLLOUT if self._out[host] else 0) | (select.POLLIN if self._in[host] else 0)
            if events:
                waiting.register(link, events)
                late = self._ranks[host]
        left = until - time.monotonic()
        if left <= 0:
            raise EngineTimeout(culprit=late)
        # Signal handlers run here.
        waiting.poll(min(left, _MAX_SLEEP_S) * 1e3)


def _advance(queue: _Queue, done: int) -> None:
    buffer, exchange = queue.popleft()
    if done < len(buffer):
        queue.appendleft((buffer[done:], exchange))
    else:
        exchange.left -= 1


def join(
    store: Store,
    host: int,
    ranks: Sequence[int],
    names: Sequence[int],
    *,
    address: str,
    deadline: float,
    check: Callable[[], None],
) -> Rail:
    """Connect the ranks of a rail; each of them calls this. ``address`` is the own one on the network between them.

    ``ranks`` are those of the group, one per host, and ``names`` their global ranks. Ends by ``deadline``
    (time.monotonic), and where ``check`` raises.
    """
    links: dict[int, socket.socket] = {}
    token = secrets.token_bytes(2 * _TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family, backlog=len(ranks)) as listener,
        contextlib.ExitStack() as opened,
    ):
        store.set(f"{host}", f"{address} {listener.getsockname()[1]} {token.hex()}")
        for lower in range(host):
            links[lower] = opened.enter_context(_connect(store.get(f"{lower}").decode(), host, names[lower], deadline))
        while len(links) < len(ranks) - 1:
            number, link = _accept(listener, token, deadline, check)
            if link is not None and host < number < len(ranks) and number not in links:
                links[number] = opened.enter_context(link)
            elif link is not None:
                link.close()
        opened.pop_all()
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setblocking(False)
    return Rail(links, ranks)


def _connect(published: str, host: int, name: int, deadline: float) -> socket.socket:
    address, port, text = published.split()
    token = bytes.fromhex(text)
    try:
        with contextlib.ExitStack() as opened:
            left_s = max(0.1, deadline - time.monotonic())
            link = opened.enter_context(socket.create_connection((address, int(port)), timeout=left_s))
            link.sendall(token[:_TOKEN_BYTES] + host.to_bytes(4, "big"))
            if hmac.compare_digest(_read(link, _TOKEN_BYTES), token[_TOKEN_BYTES:]):
                opened.pop_all()
                return link
            raise ConnectionError("something else answers there")
    except OSError as problem:
        what, fix = f"port {port} of rank {name} on {address}", "; or set ALLHANDS_ENGINE=gloo"
        raise unreachable(what, (address, int(port)), problem, fix) from problem


def _accept(
    listener: socket.socket, token: bytes, deadline: float, check: Callable[[], None]
) -> tuple[int, socket.socket | None]:
    """Return the host that connected; -1 for none, or a stranger."""
    check()
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("Timed out waiting for the ranks of the other hosts to connect")
    listener.settimeout(min(left, _CHECK_S))
    try:
        link, _ = listener.accept()
    except TimeoutError:
        return -1, None
    link.settimeout(_TOKEN_S)
    try:
        sent = _read(link, _TOKEN_BYTES + 4)
        if hmac.compare_digest(sent[:_TOKEN_BYTES], token[:_TOKEN_BYTES]):
            link.sendall(token[_TOKEN_BYTES:])
            return int.from_bytes(sent[_TOKEN_BYTES:], "big"), link
    except OSError:
        pass
    return -1, link


def _read(link: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes; raise OSError where the connection ends before."""
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return data
