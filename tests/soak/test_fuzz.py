"""A hundred thousand malformed frames against one coordinator, whose group must not be affected."""

from __future__ import annotations

import asyncio
import time

import pytest

from faults.fuzz import STAGES, Attacker, Members, coordinator, descriptors, resident

pytestmark = pytest.mark.soak

FRAMES = 120_000

# The smallest thing that a connection could leave behind (a bytes object in a list) is some 80 bytes: 9 MiB for
# all of them; a whole connection is 4 KiB: 480 MiB. Half of the former is room for a heap used in another order.
MOST_GROWTH = 9 * 2**20 // 2

# The coordinator's limit for a handshake is 20 s; a client that sends single bytes may not stay much longer.
MOST_LINGER_S = 25.0


def test_a_hundred_thousand_malformed_frames_do_no_harm() -> None:
    """Members go on with their store operations; the coordinator stays the same process and keeps its size."""
    with coordinator() as beside:
        members, attacker = Members(beside), Attacker(beside, seed=3)
        try:
            members.join(0)
            asyncio.run(attacker.attack(FRAMES // 20, ("greeting", "hello", "proof")))
            members.join(1)
            members.joined()
            held = descriptors(beside.pid)
            # The heap finds its size under the same load.
            asyncio.run(attacker.attack(FRAMES // 20))
            memory, begun = resident(beside.pid), time.monotonic()
            before = attacker.sent.total()

            async def all_at_once() -> float:
                lingering = asyncio.create_task(attacker.linger(64, seconds=60))
                await attacker.attack(FRAMES - before)
                return await lingering

            tolerated = asyncio.run(all_at_once())
            seconds = time.monotonic() - begun
            growth = resident(beside.pid) - memory
            open_after = _settle(beside.pid, held)
            told = members.leave()
            beside.end(5.0)
        finally:
            members.end()
        assert beside.process.returncode == 0
    print(  # noqa: T201  # the figures are the point of a soak
        f"\n{attacker.sent.total():,} frames ({dict(attacker.sent)}), {(FRAMES - before) / seconds:,.0f}/s; "
        f"grew by {growth / 1024:,.0f} KiB; slow connections tolerated for {tolerated:.1f} s; "
        f"descriptors {held} before, {open_after} after; members' operations "
        f"{[each['done'] for each in told]}, slowest {max(each['slowest'] for each in told) * 1000:.0f} ms"
    )
    assert attacker.sent.total() == FRAMES
    assert set(attacker.sent) == set(STAGES)
    assert growth < MOST_GROWTH
    assert tolerated < MOST_LINGER_S
    assert open_after <= held
    for each in told:
        assert each["done"] > 100
        assert (each["verdict"], each["remarks"]) == ("", [])


def _settle(pid: int, held: int) -> int:
    """Return how many descriptors ``pid`` has once it is down to ``held``, or after 10 s."""
    deadline = time.monotonic() + 10
    while (found := descriptors(pid)) > held and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
