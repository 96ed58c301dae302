"""all_reduce over two hosts in the C core, with threads as ranks and a pair of sockets for each rail."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import numpy as np
import pytest

from threads import place, segments, together

LIMIT_NS = 20_000_000_000
F4, F8, I2 = 12, 13, 4
SUM, AVG, MAX = 1, 2, 5
TIMEOUT, DEAD, ABORTED, BROKEN = 1, 2, 3, 5
KINDS = {F4: "f4", F8: "f8", I2: "i2"}


@pytest.mark.parametrize("mates", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "reduction"), [(F4, SUM), (F8, AVG), (I2, MAX), (F4, AVG)])
def test_sums_over_two_hosts(mates: int, dtype: int, reduction: int) -> None:
    """From one element for each rank to several pieces, every rank has what the rule of orders gives, bit for bit."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(segments(mates, 64 * 1024)) for _ in range(2)]
        links = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(mates)]

        def work(rank: int) -> None:
            host, mine = divmod(rank, mates)
            for count in (0, 1, 777, 70_000, 150_001):
                made = np.random.default_rng(count)
                everyone = [(made.random(count * mates) * 100).astype(KINDS[dtype]) for _ in range(2 * mates)]
                data = everyone[rank].copy()
                fd = links[mine][host].fileno()
                code = hosts[host][mine].cross(*place(data), dtype, reduction, fd, host == 0, 2 * mates, LIMIT_NS)
                assert code == 0, (count, code)
                step = np.maximum if reduction == MAX else np.add
                sums = []
                for first in (0, mates):
                    total = everyone[first]
                    for other in everyone[first + 1 : first + mates]:
                        total = step(total, other)
                    sums.append(total)
                want = step(*sums)
                if reduction == AVG:
                    want = want / want.dtype.type(2 * mates)
                assert np.array_equal(data, want), count

        together(2 * mates, work)


def test_an_end_that_closes_wakes_the_whole_host() -> None:
    """A rank whose connection ends is told that the other end is dead; the one beside it, that the group is over."""
    with ExitStack() as stack:
        views = stack.enter_context(segments(2, 64 * 1024))
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        beside = [stack.enter_context(end) for end in socket.socketpair()]
        codes = [0, 0]
        ends[1].close()

        def work(rank: int) -> None:
            data = np.ones(400_000, "f4")
            fd = (ends, beside)[rank][0].fileno()
            codes[rank] = views[rank].cross(*place(data), F4, SUM, fd, True, 4, LIMIT_NS)

        together(2, work)
        assert codes == [DEAD, ABORTED]
        assert views[0].culprit() == 0


def test_an_end_that_is_silent_is_late() -> None:
    """At the deadline a rank that waits for the other host says so; what cannot be cut evenly is refused."""
    with ExitStack() as stack:
        views = stack.enter_context(segments(1, 64 * 1024))
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        data = np.ones(1000, "f4")
        assert views[0].cross(*place(data), F4, SUM, ends[0].fileno(), True, 2, 50_000_000) == TIMEOUT
        assert views[0].cross(data.ctypes.data, 3, F4, SUM, ends[0].fileno(), True, 2, LIMIT_NS) == BROKEN
