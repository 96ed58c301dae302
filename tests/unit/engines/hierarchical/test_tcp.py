"""Rails: exchanges complete in order, and every wait ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from allhands.engines.base import EngineAborted, EngineTimeout, TransportFailure
from allhands.engines.hierarchical.tcp import Rail, join

LATER_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[Rail, Rail]]:
    """Yield the two ends of a rail between two hosts, with group ranks 10 and 20."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    first, second = Rail({1: ends[0]}, [10, 20]), Rail({0: ends[1]}, [10, 20])
    yield first, second
    first.close()
    second.close()


def soon() -> float:
    """Return a deadline that no test comes to."""
    return time.monotonic() + LATER_S


def test_exchanges_keep_their_order(pair: tuple[Rail, Rail]) -> None:
    """Several exchanges under way, larger than any buffer of the kernel, arrive whole and in their order."""
    given = [bytes([number]) * (1_000_000 * number) for number in (1, 2, 3)]

    def work(host: int) -> list[bytes]:
        rail, other = pair[host], 1 - host
        takes = [bytearray(len(each)) for each in given]
        begun = []
        for each, take in zip(given, takes, strict=True):
            gives = [memoryview(b"")] * 2
            room = [memoryview(b"")] * 2
            gives[other], room[other] = memoryview(each), memoryview(take)
            begun.append(rail.begin(gives, room))
        for exchange in begun:
            rail.finish(exchange, soon())
        return [bytes(take) for take in takes]

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(work, (0, 1))) == [given, given]


def test_every_wait_ends_with_a_typed_failure(pair: tuple[Rail, Rail]) -> None:
    """A deadline, an abort from another thread and a closed connection end a wait; each names the culprit it knows."""
    first, second = pair
    nothing = [memoryview(b"")] * 2
    room = [memoryview(b""), memoryview(bytearray(8))]
    waiting = first.begin(nothing, room)
    with pytest.raises(EngineTimeout) as late:
        first.finish(waiting, time.monotonic() + 0.01)
    assert late.value.culprit == 20
    threading.Timer(0.05, first.abort).start()
    with pytest.raises((EngineAborted, TransportFailure)):
        first.finish(waiting, soon())
    with pytest.raises(TransportFailure) as closed:
        second.finish(second.begin(nothing, list(reversed(room))), soon())
    assert closed.value.culprit == 10


def test_strangers_do_not_join() -> None:
    """A client that sends a wrong token, or none, is not accepted as a rank."""
    store = dist.HashStore()
    began = threading.Event()

    def first() -> Rail:
        began.set()
        return join(store, 0, [0, 1], [0, 1], address="127.0.0.1", deadline=soon(), check=lambda: None)

    def second() -> Rail:
        return join(store, 1, [0, 1], [0, 1], address="127.0.0.1", deadline=soon(), check=lambda: None)

    with ThreadPoolExecutor(2) as both:
        one = both.submit(first)
        began.wait()
        port = int(store.get("0").decode().split()[1])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"?" * 20)
            assert stranger.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)):
            other = both.submit(second)
            rails = one.result(), other.result()
    take = bytearray(3)
    sent = rails[0].begin([None, memoryview(b"yes")], [None, None])
    came = rails[1].begin([None, None], [memoryview(take), None])
    rails[0].finish(sent, soon())
    rails[1].finish(came, soon())
    assert take == b"yes"
    for rail in rails:
        rail.close()


def test_an_unreachable_peer_is_named() -> None:
    """A port that nobody listens on, as behind a firewall: engine-failed with the address."""
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    store.set("0", f"127.0.0.1 {port} {'00' * 32}")
    with pytest.raises(Exception, match="engine-failed") as caught:
        join(store, 1, [0, 1], [4, 5], address="127.0.0.1", deadline=soon(), check=lambda: None)
    assert f"port {port} of rank 4 on 127.0.0.1" in str(caught.value)
