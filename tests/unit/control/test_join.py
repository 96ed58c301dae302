"""Joining a group, from finding the coordinator to the membership: over real sockets of this host."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from allhands.control import handshake, join
from allhands.control.coordinator import Coordinator
from allhands.control.join import Membership, answer_roll_call
from allhands.control.messages import (
    GREETING,
    Claim,
    Closing,
    Complete,
    FromCoordinator,
    LogLine,
    Splitter,
    decode_from_member,
    decode_hello,
    encode,
    pack,
)
from allhands.control.process_identity import host_key
from allhands.control.rendezvous import Announcement, random_socket_name
from allhands.diagnosis import Diagnosis
from allhands.environments.world import Address, World
from allhands.errors import AllhandsError
from allhands.settings import Settings
from unit.control.peers import claim

# No process has this number: it is above the largest that Linux gives out.
NOBODY = 2**22 + 1


def answer(world: World, *, seconds: float = 10.0, trouble: Diagnosis | None = None, **kw: Any) -> Membership:
    """Answer the roll call as ``world.rank``."""
    claimed = claim(world.rank, trouble=trouble, pid=world.rank + 1)
    settings = kw.pop("settings", Settings())
    return answer_roll_call(world, claimed, settings=settings, deadline=time.monotonic() + seconds, **kw)


def refused(world: World, **kw: Any) -> AllhandsError:
    """Return what answering raises."""
    with pytest.raises(AllhandsError) as caught:
        answer(world, **kw).member.close()
    return caught.value


class Launcher:
    """A coordinator in a thread, as in the launcher's process."""

    def __init__(self) -> None:
        self.name = random_socket_name()
        self.address = Address("127.0.0.1", 0)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        coordinator = Coordinator(linger_s=60)
        await coordinator.listen_unix(self.name)
        self.address = Address(*await coordinator.listen_tcp("127.0.0.1", 0))
        coordinator.start()
        self._ready.set()
        await self._stop.wait()
        await coordinator.close()

    def close(self) -> None:
        """End the coordinator."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Return a coordinator that listens on a Unix socket and on a port."""
    made = Launcher()
    yield made
    made.close()


class Script:
    """A TCP server that does the handshake and then, per connection, sends the next list of messages and closes."""

    def __init__(self, *connections: list[FromCoordinator], linger_s: float = 0.0) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self.server.getsockname())
        self.claims: list[Claim] = []
        self._linger_s = linger_s
        self._thread = threading.Thread(target=self._serve, args=connections)
        self._thread.start()

    def _serve(self, *connections: list[FromCoordinator]) -> None:
        for messages in connections:
            sock, _ = self.server.accept()
            with sock:
                sock.settimeout(10)
                assert sock.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
                splitter, frames = Splitter(), list[bytes]()
                while not frames:
                    frames = splitter.feed(sock.recv(65536))
                sock.sendall(pack(encode(handshake.challenge(decode_hello(frames[0]), b""))))
                frames = frames[1:]
                while len(frames) < 2:  # the proof and the claim
                    frames += splitter.feed(sock.recv(65536))
                claimed = decode_from_member(frames[1])
                assert isinstance(claimed, Claim)
                self.claims.append(claimed)
                sock.sendall(b"".join(pack(encode(message)) for message in messages))
                time.sleep(self._linger_s)

    def close(self) -> None:
        """End the server."""
        self._thread.join(10)
        self.server.close()


def at(address: Address, rank: int = 1, world_size: int = 2) -> World:
    """Return the world of a rank whose launcher has a coordinator at ``address``."""
    return World(rank, world_size, coordinator=address, hosted=True)


# With a launcher -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_all_ranks_get_a_membership(launcher: Launcher, transport: str) -> None:
    """Each rank gets a member of the same group; with one host there is no address for others."""
    if transport == "unix":
        worlds = [World(rank, 3, socket=launcher.name) for rank in range(3)]
    else:
        worlds = [at(launcher.address, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(answer, worlds))
    try:
        assert [each.member.rank for each in found] == [0, 1, 2]
        assert len({each.complete.session for each in found}) == 1
        assert all(each.complete.one_host and not each.own_address for each in found)
        assert all(each.coordinator_process is None for each in found)
        found[0].member.store_request("set", ["key"], [b"value"])
        assert found[2].member.store_request("get", ["key"], wait_s=5).values == [b"value"]
    finally:
        for each in found:
            each.member.leave("exit", 0)
            each.member.close()


def test_every_rank_raises_the_refusal(launcher: Launcher) -> None:
    """Ranks that disagree about the world size raise the same diagnosis."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(refused, [World(0, 2, socket=launcher.name), World(1, 3, socket=launcher.name)]))
    assert found[0].diagnosis == found[1].diagnosis
    assert found[0].slug == "world-size-mismatch"


def test_a_ranks_own_error_reaches_the_others(launcher: Launcher) -> None:
    """A rank that found an error on its side raises it, and so does the other rank."""
    trouble = Diagnosis("nccl-missing", "this torch has no NCCL")
    with ThreadPoolExecutor() as pool:
        other = pool.submit(refused, World(0, 2, socket=launcher.name))
        mine = refused(World(1, 2, socket=launcher.name), trouble=trouble)
    assert (mine.slug, mine.ranks) == ("nccl-missing", (1,))
    assert other.result().diagnosis == mine.diagnosis


def test_a_missing_rank_is_named(launcher: Launcher) -> None:
    """At the deadline the rank that is present learns which one is missing."""
    found = refused(World(0, 2, socket=launcher.name), seconds=0.3)
    assert (found.slug, found.ranks) == ("missing-ranks", (1,))


# Without a coordinator -------------------------------------------------------------------------------------------


def test_no_coordinator_on_this_host() -> None:
    """A rank whose rank 0 never starts raises missing-ranks for rank 0 at its deadline."""
    found = refused(World(1, 2, socket=random_socket_name()), seconds=0.2)
    assert (found.slug, found.ranks) == ("missing-ranks", (0,))


def test_no_coordinator_at_an_address() -> None:
    """An address at which nothing listens is connection-refused, with the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
    found = refused(World(1, 2, coordinator=address), seconds=0.2)
    assert (found.slug, str(address) in found.diagnosis.what) == ("connection-refused", True)


def test_an_own_error_is_raised_without_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with an error of its own raises that one if there is no coordinator, long before its deadline."""
    monkeypatch.setattr(join, "_TROUBLE_S", 0.1)
    begun = time.monotonic()
    found = refused(World(1, 2, socket=random_socket_name()), seconds=60, trouble=Diagnosis("fd-limit", "too few"))
    assert found.slug == "fd-limit"
    assert time.monotonic() - begun < 30


def test_ranks_on_several_hosts_need_an_address() -> None:
    """If the environment states that ranks are on other hosts too, a missing address is reported at once."""
    found = refused(World(1, 4, local_world_size=2, source="slurm"))
    assert (found.slug, found.ranks) == ("incomplete-environment", (1,))


# A coordinator that ends or is silent ----------------------------------------------------------------------------


def test_closing_means_connect_again() -> None:
    """Closing is sent by the coordinator of an earlier group: the rank connects again."""
    server = Script([Closing()], [LogLine("x"), Complete(one_host=False, session="s")], linger_s=0.2)
    membership = answer(at(server.address))
    assert (membership.complete.session, membership.own_address) == ("s", "127.0.0.1")
    assert len(server.claims) == 2
    membership.member.leave("exit", 0)
    membership.member.close()
    server.close()


def test_a_coordinator_that_closes_without_a_decision_is_lost() -> None:
    """The end of the connection after the claim is coordinator-lost, with the place where it runs."""
    server = Script([])
    found = refused(at(server.address))
    assert (found.slug, found.ranks) == ("coordinator-lost", (0,))
    assert "the launcher of node 0" in found.diagnosis.why
    server.close()


def test_a_coordinator_that_does_not_decide_is_silent() -> None:
    """A coordinator that has the claim and sends nothing by the deadline is reported as silent, not as lost."""
    server = Script([], linger_s=2.0)
    found = refused(at(server.address), seconds=0.2)
    assert (found.slug, found.diagnosis.certain) == ("coordinator-silent", False)
    server.close()


def test_the_claim_states_the_time_that_is_left() -> None:
    """The coordinator ends the roll call at the deadline of each rank, so the claim counts from when it is sent."""
    server = Script([Complete(one_host=True, session="s")], linger_s=0.1)
    membership = answer(at(server.address), seconds=30)
    assert 0 < server.claims[0].timeout_s <= 30
    membership.member.leave("exit", 0)
    membership.member.close()
    server.close()


# A rendezvous ----------------------------------------------------------------------------------------------------


class Place:
    """A rendezvous whose content the test decides."""

    wide = private = False

    def __init__(self, *found: Announcement | None) -> None:
        self.found = list(found)

    def describe(self) -> str:
        """Return its name."""
        return "the place"

    def read(self) -> Announcement | None:
        """Return the next thing that is found; the last one for good."""
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    def prepare(self) -> None:
        """Nothing is in the way."""

    def publish(self, announcement: Announcement) -> None:
        """Keep it."""
        self.found = [announcement]

    def clear(self) -> None:
        """Nothing is to be removed."""


def test_the_announced_coordinator_is_used(launcher: Launcher) -> None:
    """A rank waits for an announcement of a living coordinator and connects to it."""
    dead = Announcement.of("", "", 0, NOBODY)
    alive = Announcement.of(launcher.name, "", 0, join.os.getpid())
    with ThreadPoolExecutor() as pool:
        other = pool.submit(answer, World(0, 2, socket=launcher.name))
        membership = answer(World(1, 2), rendezvous=Place(None, dead, alive))
    for each in (membership, other.result()):
        each.member.leave("exit", 0)
        each.member.close()
    assert membership.complete == other.result().complete


@pytest.mark.parametrize("left", [None, Announcement.of("x", "", 0, NOBODY)], ids=["nothing", "a dead coordinator"])
def test_a_rank_0_that_announces_nothing_is_missing(left: Announcement | None) -> None:
    """Without a living coordinator's announcement rank 0 is missing, and the place is named."""
    found = refused(World(1, 2), seconds=0.1, rendezvous=Place(left))
    assert (found.slug, found.ranks) == ("missing-ranks", (0,))
    assert "waited at the place" in found.diagnosis.who


def test_a_coordinator_that_only_its_own_host_reaches() -> None:
    """An announcement from another host without a port is no-route, with ALLHANDS_BIND as the fix."""
    elsewhere = Announcement("x", f"not {host_key()}", "", 0, 1, 1.0)
    found = refused(World(1, 2), rendezvous=Place(elsewhere))
    assert (found.slug, "ALLHANDS_BIND" in found.diagnosis.fix) == ("no-route", True)
