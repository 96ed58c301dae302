"""Joining a group: find or start the coordinator, authenticate, send the claim, wait for the end of the roll call."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import closing

import msgspec

from ..environments.world import Address, World
from ..errors import AllhandsError, ConnectError, error, fail
from ..settings import Settings
from . import bind, connect, coordinator_process, handshake, messages
from .member import IN_LAUNCHER, IN_OWN_PROCESS, Member
from .rendezvous import (
    Announcement,
    FileRendezvous,
    Rendezvous,
    local_socket_name,
    outbound_address,
    random_socket_name,
)
from .waiting_line import WaitingLine

__all__ = ["Membership", "answer_roll_call"]

_log = logging.getLogger("allhands")

# A rank with an error of its own reports it to the others if it can connect within this time, and raises in any case.
_TROUBLE_S = 2.0

# "wrong-service" is retried for this long: the coordinator of the previous group at this address may be closing.
_AGAIN_S = 1.2

# A coordinator that already listens at our address is on this host: it answers at once or not at all.
_EARLIER_S = 0.3

# How long after the deadline the coordinator's own decision may still arrive.
_DECISION_S = 0.5


class Membership(msgspec.Struct, frozen=True):
    """This rank's membership in a complete group."""

    member: Member
    complete: messages.Complete
    # On a rank 0 that started the coordinator.
    coordinator_process: coordinator_process.CoordinatorProcess | None
    # The address at which other hosts reach this one; "" if every rank is on this host.
    own_address: str


class _Target(msgspec.Struct, frozen=True):
    """Where to connect to: the Unix socket if there is one, else the address."""

    unix: str = ""
    address: Address | None = None
    token: bytes = b""

    def __str__(self) -> str:
        return str(self.address) if self.address is not None else "a socket of this host"


class _Joining:
    """One roll call as seen by this rank."""

    def __init__(
        self, world: World, claim: messages.Claim, settings: Settings, deadline: float, rendezvous: Rendezvous | None
    ) -> None:
        self.world = world
        self.claim = claim
        self.settings = settings
        self.rendezvous = rendezvous
        self.token = settings.secret()
        self.deadline = deadline if claim.trouble is None else min(deadline, time.monotonic() + _TROUBLE_S)
        self.who = f"rank {world.rank} ({claim.identity})"
        shown = world.local_rank in {None, 0} or world.rank == 0
        self.waiting_line = WaitingLine(f"allhands rank {world.rank}", shown=shown)
        self.process: coordinator_process.CoordinatorProcess | None = None
        self.runs = IN_LAUNCHER if world.socket or world.hosted else IN_OWN_PROCESS

    # Finding or starting the coordinator -------------------------------------------------------------------------

    def target(self) -> _Target:
        """Return where the coordinator is; start it first if this rank must."""
        world = self.world
        if world.socket or world.hosted:
            return _Target(world.socket, world.coordinator, self.token)
        if self.rendezvous is not None:
            return self._announce(self.rendezvous) if world.rank == 0 else self._look_up(self.rendezvous)
        if world.coordinator is not None:
            if world.rank == 0:
                host = bind.bind_address(
                    world.coordinator,
                    self.deadline,
                    bind=self.settings.bind,
                    late_names=world.late_names,
                    share=(world.local_world_size, world.world_size) if world.local_world_size is not None else None,
                    who=self.who,
                    notify=self.waiting_line,
                )
                return self._start(host=host, port=world.coordinator.port)
            return _Target(address=world.coordinator, token=self.token)
        if world.local_world_size is not None and not world.one_host:
            raise fail(
                "incomplete-environment",
                f"{world.source} says that ranks are on several hosts, but not where rank 0 is",
                who=self.who,
                why=f"{world.local_world_size} of {world.world_size} ranks are on this host, and no address was given",
                fix="set MASTER_ADDR and MASTER_PORT, or pass init_method='tcp://HOST:PORT'",
                ranks=(world.rank,),
            )
        if world.world_size == 1:
            # A random name: several worlds of one rank may have the same parent.
            return self._start()
        name = local_socket_name(self.settings.job or world.job)
        return self._start(name) if world.rank == 0 else _Target(name, token=self.token)

    def _start(self, unix: str = "", host: str = "", port: int = 0, token: bytes | None = None) -> _Target:
        secret = self.token if token is None else token
        path = str(self.rendezvous.path.absolute()) if isinstance(self.rendezvous, FileRendezvous) else ""
        options = coordinator_process.Options(
            unix=unix or random_socket_name(),
            host=host,
            port=port,
            token=secret,
            world_size=self.world.world_size,
            tls_cert=self.settings.tls_cert,
            tls_key=self.settings.tls_key,
            derived=bool(unix),
            path=path,
        )
        if host and not secret and not bind.is_loopback(host):
            _log.warning(bind.WARNING_OPEN, host, "rank")
        self.process = coordinator_process.start(options, self.deadline, lambda: self._ask_earlier(options))
        return _Target(options.unix, token=secret)

    def _ask_earlier(self, options: coordinator_process.Options) -> None:
        """Answer the roll call of the coordinator that has our address.

        It refuses every rank if this rank is a duplicate, and exits if its job is over.
        """
        soon = min(self.deadline, time.monotonic() + _EARLIER_S)
        address = Address(options.host, options.port) if options.host else None
        target = _Target("" if address else options.unix, address, options.token)
        try:
            sock = self._connect(target, soon)
        except ConnectError:
            return  # It has just exited.
        if sock is None:
            return
        with closing(sock):
            try:
                membership = self._answer(sock, target)
            except ConnectError as problem:
                if problem.slug not in {"wrong-service", "not-authorised"}:
                    raise
                return  # It belongs to another job.
            if membership is not None:
                membership.member.close()

    def _announce(self, rendezvous: Rendezvous) -> _Target:
        rendezvous.prepare()
        token = self.token or (os.urandom(32).hex().encode() if rendezvous.private else b"")
        wide = rendezvous.wide and not self.world.one_host
        host = self.settings.bind or (outbound_address() if wide else "")
        target = self._start(host=host, token=token)
        if self.process is None:
            raise ValueError("no coordinator was started")
        fresh = token if rendezvous.private and not self.token else b""
        rendezvous.publish(Announcement.of(target.unix, self.process.host, self.process.port, self.process.pid, fresh))
        return target

    def _look_up(self, rendezvous: Rendezvous) -> _Target:
        for _ in connect.retries(self.deadline):
            found = rendezvous.read()
            if found is not None and not found.dead:
                token = self.token or found.token
                if found.here:
                    return _Target(found.unix, token=token)
                if found.port:
                    return _Target(address=Address(found.host, found.port), token=token)
                raise fail(
                    "no-route",
                    f"rank 0 announced itself at {rendezvous.describe()} but listens on its own host only",
                    who=self.who,
                    why="rank 0 is on another host or in another network namespace, and that place looked local to it",
                    fix="set ALLHANDS_BIND on rank 0 to an address that this host can reach, or use tcp://HOST:PORT",
                    ranks=(0,),
                )
            self.waiting_line(f"waiting for rank 0 to open the roll call at {rendezvous.describe()}")
        raise self._rank_0_missing(rendezvous.describe())

    def _rank_0_missing(self, place: str) -> AllhandsError:
        return fail(
            "missing-ranks",
            "rank 0 never opened the roll call",
            who=f"{self.who} waited at {place}",
            why="no living rank 0 announced itself there",
            fix="start rank 0 with the same address (`allhands whoami` there), or correct the error in its own output; "
            "or raise timeout=",
            ranks=(0,),
        )

    # The roll call -----------------------------------------------------------------------------------------------

    def _connect(self, target: _Target, deadline: float) -> socket.socket | None:
        """Return a connection to the coordinator; None if nothing listens on its Unix socket by ``deadline``."""
        if target.unix or target.address is None:
            return connect.connect_unix(target.unix, deadline, notify=self.waiting_line)
        sock = connect.connect_tcp(
            target.address,
            deadline,
            who=self.who,
            late_names=self.world.late_names,
            several_hosts=self.world.local_world_size is not None and not self.world.one_host,
            notify=self.waiting_line,
        )
        if self.settings.tls_ca:
            # Its certificate has the name that the ranks were given, if any, not the address that it binds.
            named = target.address if self.rendezvous is not None else self.world.coordinator or target.address
            return handshake.wrap_tls(sock, self.settings.tls_ca, named.host, deadline)
        return sock

    def run(self) -> Membership:
        """Answer until the group is complete or refused."""
        target = self.target()
        retry_until: float | None = None
        while True:
            sock = self._connect(target, self.deadline)
            if sock is None:
                place = self.settings.job or self.world.job or f"the parent process {os.getppid()} that they share"
                raise self._rank_0_missing(f"the local socket of {place}")
            asked = time.monotonic()
            try:
                membership = self._answer(sock, target)
            except BaseException as problem:
                sock.close()
                if not isinstance(problem, ConnectError) or problem.slug != "wrong-service":
                    raise
                now = time.monotonic()
                retry_until = retry_until or now + _AGAIN_S
                # A coordinator that is closing answers at once; a silent service is not asked again.
                if now >= min(retry_until, self.deadline) or now - asked > _AGAIN_S:
                    raise
            else:
                if membership is not None:
                    return membership
                sock.close()
                if time.monotonic() >= self.deadline:
                    raise self._rank_0_missing(str(target))
            time.sleep(0.05)

    def _answer(self, sock: socket.socket, target: _Target) -> Membership | None:
        """Authenticate, and claim the rank. None: the coordinator was that of an earlier group; connect again."""
        world = self.world
        opening = handshake.hello(
            job=self.settings.job or world.job,
            attempt=self.settings.attempt,
            rank=world.rank,
            world_size=world.world_size,
            token=target.token,
        )
        splitter, frames = handshake.authenticate(sock, opening, target.token, str(target), self.deadline)
        left_s = max(0.0, self.deadline - time.monotonic())
        claim = msgspec.structs.replace(self.claim, timeout_s=left_s)
        member = Member(sock, splitter, rank=world.rank, world_size=world.world_size, place=str(target), runs=self.runs)
        member.show_waiting = self.waiting_line
        membership = None
        try:
            complete = member.claim(claim, frames, left_s + _DECISION_S)
            if complete is not None:
                membership = Membership(member, complete, self.process, self._own_address(sock, complete))
        finally:
            if membership is None:
                member.close()
        return membership

    def _own_address(self, sock: socket.socket, complete: messages.Complete) -> str:
        if complete.one_host:
            return ""
        if self.process is not None:
            return self.process.host
        if sock.family == socket.AF_UNIX:
            # Connected through the launcher, which knows this node's address.
            return self.settings.node_address or outbound_address()
        return str(sock.getsockname()[0])


def answer_roll_call(
    world: World, claim: messages.Claim, *, settings: Settings, deadline: float, rendezvous: Rendezvous | None = None
) -> Membership:
    """Answer the roll call as ``world.rank``; return the membership in the complete group, or raise the refusal.

    Every rank calls this. Blocks until the group is complete, at most until ``deadline`` (time.monotonic).
    """
    joining = _Joining(world, claim, settings, deadline, rendezvous)
    try:
        membership = joining.run()
    except AllhandsError as problem:
        if joining.process is not None:
            joining.process.detach()
        if claim.trouble is not None and problem.slug != claim.trouble.slug:
            # The coordinator could not be informed; this rank's own error is still the cause.
            raise error(claim.trouble) from problem
        raise
    except BaseException:
        if joining.process is not None:
            joining.process.kill()
        raise
    finally:
        joining.waiting_line.done()
        if rendezvous is not None and world.rank == 0:
            rendezvous.clear()
    return membership
