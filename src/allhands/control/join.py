"""Answering the roll call: find or start the coordinator, prove ourselves, state our claim, wait for the rest."""

from __future__ import annotations

import logging
import os
import socket
import time

import msgspec

from ..diagnosis import Diagnosis, duration
from ..environments.world import Address, World
from ..errors import AllhandsError, ConnectError, error, fail
from ..settings import Settings
from . import bind, client_handshake, connect, coordinator_process, handshake
from .frames import FrameError, Splitter, pack
from .member import BESIDE, LAUNCHER, Member
from .messages import (
    Claim,
    Closing,
    Complete,
    FromMember,
    Pong,
    Query,
    Refused,
    Remark,
    Status,
    Waiting,
    decode_from_coordinator,
    encode,
)
from .messages import Ping as _Ping
from .progress import Progress
from .rendezvous import Board, FileBoard, Notice, local_name, outward_address, random_name

__all__ = ["Seat", "answer"]

_log = logging.getLogger("allhands")

# A rank that knows its own trouble tells the others if it can reach them soon, and raises in any case.
_TROUBLE_S = 2.0

# An answer that looks like a wrong service is asked again for this long: the coordinator of the previous
# group at this address may be closing.
_AGAIN_S = 1.2

# A coordinator that has the place we want is on this host, and answers at once or not at all.
_HOLDER_S = 0.3

# Past the deadline the coordinator's own word may still be under way.
_WORD_S = 0.5


class Seat(msgspec.Struct, frozen=True):
    """This rank's place in a complete group."""

    member: Member
    complete: Complete
    beside: coordinator_process.Beside | None
    # The address by which other hosts reach this one; "" where every rank is on this host.
    own_address: str


class _Target(msgspec.Struct, frozen=True):
    """What to connect to: the local socket where there is one, else the address."""

    unix: str = ""
    address: Address | None = None
    token: bytes = b""

    def __str__(self) -> str:
        return str(self.address) if self.address is not None else "a socket of this host"


class _Call:
    """One attempt to answer the roll call, with everything it needs on the way."""

    def __init__(self, world: World, claim: Claim, settings: Settings, deadline: float, board: Board | None) -> None:
        self.world = world
        self.claim = claim
        self.settings = settings
        self.board = board
        self.token = settings.secret()
        self.deadline = deadline if claim.trouble is None else min(deadline, time.monotonic() + _TROUBLE_S)
        self.who = f"rank {world.rank} ({claim.identity})"
        self.progress = Progress(f"allhands rank {world.rank}", shown=world.local_rank in {None, 0} or world.rank == 0)
        self.beside: coordinator_process.Beside | None = None
        self.keeper = LAUNCHER if world.socket or world.hosted else BESIDE

    # Where -------------------------------------------------------------------------------------------------

    def target(self) -> _Target:
        """Find where the coordinator is, starting it if this is rank 0's to do."""
        world = self.world
        if world.socket or world.hosted:
            return _Target(world.socket, world.coordinator, self.token)
        if self.board is not None:
            return self._host_behind(self.board) if world.rank == 0 else self._find_behind(self.board)
        if world.coordinator is not None:
            if world.rank == 0:
                return self._start(host=self._bind_address(world.coordinator), port=world.coordinator.port)
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
            # Nobody has to find it, and other programs of the same shell may be worlds of one too.
            return self._start()
        name = local_name(self.settings.job or world.job)
        return self._start(name) if world.rank == 0 else _Target(name, token=self.token)

    def _start(self, unix: str = "", host: str = "", port: int = 0, token: bytes | None = None) -> _Target:
        secret = self.token if token is None else token
        order = coordinator_process.Order(
            unix=unix or random_name(),
            host=host,
            port=port,
            token=secret,
            world_size=self.world.world_size,
            tls_cert=self.settings.tls_cert,
            tls_key=self.settings.tls_key,
            derived=bool(unix),
            path=str(self.board.path.absolute()) if isinstance(self.board, FileBoard) else "",
        )
        if host and not secret and not bind.is_loopback(host):
            _log.warning(bind.OPEN, host, "rank")
        self.beside = coordinator_process.start(order, self.deadline, lambda: self._ask_holder(order))
        return _Target(order.unix, token=secret)

    def _ask_holder(self, order: coordinator_process.Order) -> None:
        """Answer at the coordinator that has our place. It tells everyone if we are double, and goes if it is done."""
        soon = min(self.deadline, time.monotonic() + _HOLDER_S)
        sock: socket.socket | None
        if order.host:
            target = _Target(address=Address(order.host, order.port), token=order.token)
            try:
                sock = connect.reach(Address(order.host, order.port), soon, who=self.who)
                if self.settings.tls_ca and self.world.coordinator is not None:
                    sock = client_handshake.secure(sock, self.settings.tls_ca, self.world.coordinator.host, soon)
            except ConnectError:
                return  # It is just gone.
        else:
            target = _Target(order.unix, token=order.token)
            sock = connect.reach_local(order.unix, soon)
            if sock is None:
                return
        try:
            seat = self._answer(sock, target)
        except ConnectError as problem:
            sock.close()
            if problem.slug not in {"wrong-service", "not-authorised"}:
                raise
            return  # Another job's, which tells strangers nothing.
        except BaseException:
            sock.close()
            raise
        if seat is None:
            sock.close()
        else:
            seat.member.close()

    def _bind_address(self, address: Address) -> str:
        local = self.world.local_world_size
        return bind.bind_address(
            address,
            self.deadline,
            bind=self.settings.bind,
            late_names=self.world.late_names,
            # How many of how many are on this machine, where that is known.
            share=(local, self.world.world_size) if local is not None else None,
            who=self.who,
            notify=self.progress,
        )

    def _host_behind(self, board: Board) -> _Target:
        board.prepare()
        token = self.token or (os.urandom(32).hex().encode() if board.private else b"")
        host = ""
        if self.settings.bind:
            host = self.settings.bind
        elif board.wide and not self.world.one_host:
            host = outward_address()
        target = self._start(host=host, token=token)
        if self.beside is None:
            raise ValueError("no coordinator was started")
        made = token if board.private and not self.token else b""
        board.post(Notice.of(target.unix, self.beside.host, self.beside.port, self.beside.pid, made))
        return target

    def _find_behind(self, board: Board) -> _Target:
        pause = 0.01
        while True:
            notice = board.read()
            if notice is not None and not notice.dead:
                token = self.token or notice.token
                if notice.here:
                    return _Target(notice.unix, token=token)
                if notice.port:
                    return _Target(address=Address(notice.host, notice.port), token=token)
                raise fail(
                    "no-route",
                    f"rank 0 met at {board.describe()} but listens on its own host only",
                    who=self.who,
                    why="rank 0 is on another host or in another network namespace, and the meeting place looked local",
                    fix="set ALLHANDS_BIND on rank 0 to an address that this host can reach, or use tcp://HOST:PORT",
                    ranks=(0,),
                )
            if time.monotonic() + pause >= self.deadline:
                raise self._rank_0_missing(board.describe())
            self.progress(f"waiting for rank 0 to open the roll call at {board.describe()}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    def _rank_0_missing(self, place: str) -> AllhandsError:
        return fail(
            "missing-ranks",
            "rank 0 never opened the roll call",
            who=f"{self.who} waited at {place}",
            why="nothing was posted there by a living rank 0",
            fix="start rank 0 with the same address (`allhands whoami` there), or mend what its own output says; "
            "or raise timeout=",
            ranks=(0,),
        )

    # Connecting --------------------------------------------------------------------------------------------

    def connect(self, target: _Target) -> socket.socket:
        """Return a connection to the coordinator."""
        if target.unix:
            sock = connect.reach_local(target.unix, self.deadline, notify=self.progress)
            if sock is None:
                place = self.settings.job or self.world.job or f"the parent process {os.getppid()} that they share"
                raise self._rank_0_missing(f"the local socket of {place}")
            return sock
        if target.address is None:
            raise ValueError("nowhere to connect to")
        several = self.world.local_world_size is not None and not self.world.one_host
        sock = connect.reach(
            target.address,
            self.deadline,
            who=self.who,
            late_names=self.world.late_names,
            several_hosts=several,
            notify=self.progress,
        )
        if self.settings.tls_ca:
            return client_handshake.secure(sock, self.settings.tls_ca, target.address.host, self.deadline)
        return sock

    def call(self) -> Seat:
        """Answer until the group is complete or refused."""
        target = self.target()
        again_until: float | None = None
        while True:
            sock = self.connect(target)
            asked = time.monotonic()
            try:
                seat = self._answer(sock, target)
            except BaseException as problem:
                sock.close()
                if not isinstance(problem, ConnectError) or problem.slug != "wrong-service":
                    raise
                now = time.monotonic()
                again_until = again_until or now + _AGAIN_S
                # One that is closing says so at once; long silence is no reason to ask for more of it.
                if now >= min(again_until, self.deadline) or now - asked > _AGAIN_S:
                    raise
            else:
                if seat is not None:
                    return seat
                sock.close()
                if time.monotonic() >= self.deadline:
                    raise self._rank_0_missing(str(target))
            time.sleep(0.05)

    def _answer(self, sock: socket.socket, target: _Target) -> Seat | None:
        """Greet, claim, wait. None: the coordinator was that of an earlier group; connect again."""
        world = self.world
        opening = handshake.hello(
            job=self.settings.job or world.job,
            attempt=self.settings.attempt,
            rank=world.rank,
            world_size=world.world_size,
            token=target.token,
        )
        splitter, frames = client_handshake.greet(sock, opening, target.token, str(target), self.deadline)
        left = max(0.0, self.deadline - time.monotonic())
        claimed = self._say(sock, msgspec.structs.replace(self.claim, timeout_s=left))
        return self._wait(sock, splitter, frames, target, claimed=claimed)

    def _say(self, sock: socket.socket, message: FromMember) -> bool:
        """Send; False where the coordinator has closed. What it said before that is still to be read."""
        try:
            client_handshake.send(sock, pack(encode(message)), self.deadline + _WORD_S)
        except OSError:
            return False
        return True

    def _wait(
        self, sock: socket.socket, splitter: Splitter, frames: list[bytes], target: _Target, *, claimed: bool
    ) -> Seat | None:
        while True:
            for index, frame in enumerate(frames):
                message = decode_from_coordinator(frame)
                match message:
                    case Complete():
                        return self._seat(sock, splitter, frames[index + 1 :], message, target)
                    case Refused(diagnosis):
                        raise error(diagnosis)
                    case Waiting(line):
                        self.progress(line)
                    case Remark(text):
                        _log.warning("the coordinator reports: %s", text)
                    case Closing():
                        return None
                    case _Ping():
                        self._say(sock, Pong())
                    case Query():
                        self._say(sock, Status(self.world.rank, "busy", "in the roll call"))
                    case _:
                        raise FrameError(f"a {type(message).__name__} during the roll call")
            try:
                received = client_handshake.receive(sock, splitter, self.deadline + _WORD_S)
            except OSError:
                received = []
            if received is None:
                raise self._no_word(target)
            if not received and not claimed:
                return None  # It was about to end when we came, so it was not ours.
            if not received:
                raise error(self._lost(target))
            frames = received

    def _seat(
        self, sock: socket.socket, splitter: Splitter, rest: list[bytes], complete: Complete, target: _Target
    ) -> Seat:
        own = ""
        if not complete.one_host:
            if self.beside is not None:
                own = self.beside.host
            elif sock.family == socket.AF_UNIX:
                # Through the launcher on this node, which knows by what address the others reach it.
                own = self.settings.node_address or outward_address()
            else:
                own = str(sock.getsockname()[0])
        world = self.world
        member = Member(
            sock, splitter, rank=world.rank, world_size=world.world_size, place=str(target), keeper=self.keeper
        )
        member.start(rest)
        return Seat(member, complete, self.beside, own)

    def _lost(self, target: _Target) -> Diagnosis:
        return Diagnosis(
            "coordinator-lost",
            f"the coordinator at {target} went away during the roll call",
            who=self.who,
            why=f"it closed the connection without a word (observed); it runs {self.keeper}",
            fix="look at rank 0's output and host, and run the job again",
            ranks=(0,),
        )

    def _no_word(self, target: _Target) -> AllhandsError:
        return fail(
            "coordinator-silent",
            f"the coordinator at {target} gave no word by the deadline",
            who=self.who,
            why=f"it took our answer and did not decide within {duration(self.claim.timeout_s)} (observed)",
            fix=f"look at the coordinator's process, {self.keeper}: it may be stopped or starved",
            ranks=(0,),
            certain=False,
        )


def answer(world: World, claim: Claim, *, settings: Settings, deadline: float, board: Board | None = None) -> Seat:
    """Answer the roll call as ``world.rank``; return the seat in the complete group or raise why there is none.

    Every rank calls this. Blocks until the group is complete, at most until ``deadline`` (time.monotonic).
    """
    call = _Call(world, claim, settings, deadline, board)
    try:
        seat = call.call()
    except AllhandsError as problem:
        if call.beside is not None:
            call.beside.forget()
        if claim.trouble is not None and problem.slug != claim.trouble.slug:
            # Nobody could be told, but what is wrong here is known.
            raise error(claim.trouble) from problem
        raise
    except BaseException:
        if call.beside is not None:
            call.beside.kill()
        raise
    finally:
        call.progress.done()
        if board is not None and world.rank == 0:
            board.clear()
    return seat
