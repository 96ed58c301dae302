"""A rail: the TCP connections between ranks that carry the same slices, one rank on each host.

Not a Gloo group, which hands each message through three threads: most of the 0.7 ms that an exchange of 512 bytes
between two hosts was measured to take there is waking up. Here whoever waits does the work itself. Bytes of several
exchanges may be under way on a connection, in the order in which they were begun; every rank of a rail begins the same
ones in the same order.
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

from ...errors import fail

__all__ = ["Exchange", "Rail", "join"]

# How often to look for more before sleeping: a wake-up takes ten times as long as a look.
_LOOKS = 30

# Nothing but an answer, the deadline or `end` wakes a wait; should a wake-up be lost, it is looked again after this.
_NAP_S = 0.5

# How long whoever connects has to say the word; anyone may connect.
_WORD_S = 2.0

# How often to look whether the group is over while waiting for the others to connect.
_LOOK_S = 0.1

# The word that each end of a connection says; the job's store has told it to both.
_WORD_BYTES = 16

_Buffers = Sequence[memoryview | None]


class Exchange:
    """Buffers that are on their way; ``left`` counts those that are not there yet."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 0


class Rail:
    """One rank's end of a rail. Used by one thread at a time, but for `end`."""

    def __init__(self, links: list[socket.socket | None], ranks: Sequence[int]) -> None:
        """``links`` has a connection for each host, None for our own; ``ranks`` says who is at its other end."""
        self._links = links
        self._ranks = ranks
        self._out: list[deque[tuple[memoryview, Exchange]]] = [deque() for _ in links]
        self._in: list[deque[tuple[memoryview, Exchange]]] = [deque() for _ in links]
        self._over = False

    def begin(self, gives: _Buffers, takes: _Buffers) -> Exchange:
        """Begin to give each host its buffer and to take from each what fills ours; None or empty means nothing."""
        made = Exchange()
        for host, link in enumerate(self._links):
            if link is None:
                continue
            for queue, buffer in ((self._out[host], gives[host]), (self._in[host], takes[host])):
                if buffer:
                    queue.append((buffer, made))
                    made.left += 1
        self._pump()
        return made

    def finish(self, exchange: Exchange, until: float) -> None:
        """Wait for the end of an exchange. Raises RuntimeError, in a transport's words, where it has none."""
        looks = 0
        while exchange.left:
            if self._pump():
                looks = 0
            elif looks < _LOOKS:
                looks += 1
                os.sched_yield()
            else:
                self._sleep(until)

    def end(self) -> None:
        """The group is over: whoever waits here raises. From any thread."""
        self._over = True
        for link in self._links:
            if link is not None:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connections back."""
        for link in self._links:
            if link is not None:
                link.close()

    def _pump(self) -> bool:
        """Move what can be moved without waiting; tell whether there was anything."""
        moved = False
        for host, link in enumerate(self._links):
            if link is None:
                continue
            try:
                while self._out[host]:
                    _advance(self._out[host], link.send(self._out[host][0][0]))
                    moved = True
            except BlockingIOError:
                pass
            except OSError as problem:
                raise self._closed(host) from problem
            try:
                while self._in[host]:
                    got = link.recv_into(self._in[host][0][0])
                    if not got:
                        raise self._closed(host)
                    _advance(self._in[host], got)
                    moved = True
            except BlockingIOError:
                pass
            except OSError as problem:
                raise self._closed(host) from problem
        return moved

    def _sleep(self, until: float) -> None:
        if self._over:
            raise RuntimeError("connection closed: the group ended in the middle of this call")
        waiting = select.poll()
        late = -1
        for host, link in enumerate(self._links):
            events = (select.POLLOUT if self._out[host] else 0) | (select.POLLIN if self._in[host] else 0)
            if link is not None and events:
                waiting.register(link, events)
                late = self._ranks[host]
        left = until - time.monotonic()
        if left <= 0:
            raise RuntimeError(f"Timed out waiting for rank {late}")
        # Runs the handlers of signals that come meanwhile.
        waiting.poll(min(left, _NAP_S) * 1e3)

    def _closed(self, host: int) -> RuntimeError:
        return RuntimeError(f"connection closed by rank {self._ranks[host]}")


def _advance(queue: deque[tuple[memoryview, Exchange]], done: int) -> None:
    buffer, exchange = queue.popleft()
    if done < len(buffer):
        queue.appendleft((buffer[done:], exchange))
    else:
        exchange.left -= 1


def join(
    store: Store, host: int, ranks: Sequence[int], *, address: str, deadline: float, check: Callable[[], None]
) -> Rail:
    """Connect to the ranks of a rail, which are named by host; ``address`` is ours on the network between them.

    Each of them calls this; ends by ``deadline`` (time.monotonic), and where ``check`` raises.
    """
    links: list[socket.socket | None] = [None] * len(ranks)
    word = secrets.token_bytes(2 * _WORD_BYTES)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(ranks)) as listener:
        store.set(f"{host}", f"{address} {listener.getsockname()[1]} {word.hex()}")
        try:
            for lower in range(host):
                links[lower] = _connect(store.get(f"{lower}").decode(), host, ranks[lower], deadline)
            while None in links[host + 1 :]:
                number, link = _accept(listener, word, deadline, check)
                if host < number < len(links) and links[number] is None:
                    links[number] = link
                elif link is not None:
                    link.close()
        except BaseException:
            for link in links:
                if link is not None:
                    link.close()
            raise
    for link in links:
        if link is not None:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)
    return Rail(links, ranks)


def _connect(notice: str, host: int, rank: int, deadline: float) -> socket.socket:
    address, port, text = notice.split()
    word = bytes.fromhex(text)
    try:
        link = socket.create_connection((address, int(port)), timeout=max(0.1, deadline - time.monotonic()))
        try:
            link.sendall(word[:_WORD_BYTES] + host.to_bytes(4, "big"))
            known = hmac.compare_digest(_read(link, _WORD_BYTES), word[_WORD_BYTES:])
        except BaseException:
            link.close()
            raise
        if known:
            return link
        link.close()
        why = "something else answers there"
    except OSError as problem:
        why = str(problem.strerror or problem)
    raise fail(
        "engine-failed",
        f"every rank answered the roll call, but port {port} of rank {rank} on {address} cannot be reached",
        who=f"{socket.gethostname()} (pid {os.getpid()})",
        why=f"connecting to {address}:{port}: {why}; probably a firewall",
        fix="open the ports above 1023 between the hosts; or name the interface that leads to them with "
        "GLOO_SOCKET_IFNAME; or set ALLHANDS_ENGINE=gloo",
        hosts=(address,),
        certain=False,
    )


def _accept(
    listener: socket.socket, word: bytes, deadline: float, check: Callable[[], None]
) -> tuple[int, socket.socket | None]:
    """Return who connected; -1 for nobody, or a stranger."""
    check()
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("Timed out waiting for the ranks of the other hosts to connect")
    listener.settimeout(min(left, _LOOK_S))
    try:
        link, _ = listener.accept()
    except TimeoutError:
        return -1, None
    link.settimeout(_WORD_S)
    try:
        said = _read(link, _WORD_BYTES + 4)
        if hmac.compare_digest(said[:_WORD_BYTES], word[:_WORD_BYTES]):
            link.sendall(word[_WORD_BYTES:])
            return int.from_bytes(said[_WORD_BYTES:], "big"), link
    except OSError:
        pass
    return -1, link


def _read(link: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes; raises OSError where they do not come."""
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return data
