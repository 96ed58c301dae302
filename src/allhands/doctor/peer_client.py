"""The client of the check between two machines: clock, round trip, ports both ways, throughput, packet sizes."""

from __future__ import annotations

import socket
import time

from .._version import __version__
from ..diagnosis import duration, join
from .engines import installed
from .finding import Finding, Section, lines
from .peer_protocol import (
    ANSWER_S,
    FIRST_BYTES,
    ClockReply,
    ClockRequest,
    ConnectionFailed,
    ConnectReply,
    ConnectRequest,
    ListenReply,
    ListenRequest,
    PeerConnection,
    PeerInfo,
    Report,
    TransferRate,
    TransferReady,
    TransferRequest,
    connect_to_ports,
    listen_on_ports,
    local_info,
    receive_bytes,
    send_bytes,
    transfer_size,
)
from .routes import firewall_rules

__all__ = ["check_peer"]

_NETWORK, _RESOURCES, _STACK = Section("network"), Section("resources"), Section("stack")

# Of so many round trips, the fastest is a good estimate.
_ROUND_TRIPS = 20

# Clocks that NTP keeps differ by less. Beyond this, log lines of two machines cannot be ordered.
_SKEW_S = 1.0

# The MTU that every network of IPv6, and so nearly every tunnel, passes.
_LEAST_MTU = 1280

# The peer connects to all ports concurrently, and waits for those that do not answer.
_CONNECTS_S = ANSWER_S + 3.0


def check_peer(connection: PeerConnection) -> list[Finding]:
    """Check the way to the doctor at the other end of ``connection``, and back."""
    found: list[Finding] = []
    name = "the other doctor"
    try:
        peer = connection.expect(PeerInfo)
        name = peer.host
        found += _versions(peer)
        found += _clock(connection, name)
        found += _ports(connection, peer)
        found += _throughput(connection, peer)
        connection.send(Report(lines(found), red=any(each.level == "red" for each in found)))
    except ConnectionFailed as problem:
        found.append(
            _NETWORK.red(
                "conversation",
                "coordinator-silent",
                f"{name} {'stopped answering' if problem.silent else 'disconnected'} in the middle of the check",
                why=f"{problem} (observed)",
                fix="check that `allhands doctor --listen` still runs there, and try again",
            )
        )
    return found


def _versions(peer: PeerInfo) -> list[Finding]:
    torch = installed().torch
    if peer.allhands == __version__ and torch == peer.torch:
        return []
    install = f"pip install torch=={peer.torch.partition('+')[0]} allhands=={peer.allhands}"
    return [
        _STACK.yellow(
            "versions",
            "version-mismatch",
            f"versions differ: here allhands {__version__} and torch {torch or 'none'}, on {peer.host} allhands "
            f"{peer.allhands} and torch {peer.torch or 'none'}",
            why="reported by both ends (observed)",
            fix="install the same versions everywhere (ALLHANDS_MIXED_VERSIONS=1 allows different ones of torch)",
            commands=(install,) if peer.torch else (),
        )
    ]


def _clock(connection: PeerConnection, name: str) -> list[Finding]:
    best, offset = float("inf"), 0.0
    for _ in range(_ROUND_TRIPS):
        started, wall = time.monotonic(), time.time()
        connection.send(ClockRequest())
        reply = connection.expect(ClockReply)
        took = time.monotonic() - started
        if took < best:
            # If both directions take as long, the peer read its clock after half the time.
            best, offset = took, reply.now - (wall + took / 2)
    what = f"round trip to {name} {best * 1000:.2f} ms"
    found = [_NETWORK.green("round-trip", what, f"the fastest of {_ROUND_TRIPS}", round_trip_s=best)]
    if abs(offset) - best < _SKEW_S:
        what = f"clocks agree within {max(abs(offset), best) * 1000:.0f} ms"
        return [*found, _RESOURCES.green("clock", what, offset_s=offset)]
    found.append(
        _RESOURCES.yellow(
            "clock",
            "clock-skewed",
            f"the clock of {name} is {duration(abs(offset))} {'ahead of' if offset > 0 else 'behind'} this machine's",
            why=f"from its own report, within {duration(round(best, 3))} of a round trip (observed). Collectives work; "
            "certificates, tokens that expire, and the order of log lines are affected",
            fix="let both machines keep their time by the same NTP server",
            commands=("timedatectl set-ntp true", "chronyc makestep"),
            details={"offset_s": offset, "host": name},
        )
    )
    return found


# Ports --------------------------------------------------------------------------------------------------------


def _ports(connection: PeerConnection, peer: PeerInfo) -> list[Finding]:
    own, here = connection.own, socket.gethostname()
    connection.send(ListenRequest())
    listening = connection.expect(ListenReply)
    there = connect_to_ports(listening.address, listening.ports)
    with listen_on_ports(own) as ports:
        connection.send(ConnectRequest(own, ports))
        back = connection.expect(ConnectReply, _CONNECTS_S).outcomes
    found = []
    if any(there.values()):
        found.append(_filtered("ports-there", there, here, peer.host))
    if any(back.values()):
        found.append(_filtered("ports-back", back, peer.host, here, firewall_rules()))
    if peer.seen_as != own:
        found.append(
            _NETWORK.yellow(
                "translation",
                "ports-filtered",
                f"{peer.host} sees this machine as {peer.seen_as}, but its address is {own}",
                why="addresses are translated between them (NAT; observed); ranks advertise their own address",
                fix=f"use a network on which {own} itself can be reached from {peer.host}",
            )
        )
    if not found:
        what = f"ports open both ways ({len(there)} there, {len(back)} back)"
        found.append(_NETWORK.green("ports", what, f"from {min(there, default=0)} to {max(there, default=0)}"))
    return found


def _filtered(
    check: str, outcomes: dict[int, str], source: str, destination: str, rules: list[str] | None = None
) -> Finding:
    shut = {port: problem for port, problem in outcomes.items() if problem}
    some = "the" if len(shut) == len(outcomes) else f"{len(shut)} of {len(outcomes)} tried"
    return _NETWORK.red(
        check,
        "ports-filtered",
        f"{source} cannot reach {some} ports of {destination} that Gloo and NCCL will use",
        why=join([f"{port}: {problem}" for port, problem in list(shut.items())[:4]])
        + (f" and {len(shut) - 4} more" if len(shut) > 4 else "")
        + f" (observed: {join(sorted(set(shut.values())))}, although {destination} listens on them)"
        + (f"; rules here: {join(rules[:3])}" if rules else ""),
        fix=f"on {destination} accept connections from {source} on all ports above 1023, not only the coordinator's",
        commands=(f"nft list ruleset   # on {destination}, as root",),
        details={"from": source, "to": destination, "shut": sorted(shut), "open": sorted(set(outcomes) - set(shut))},
    )


# Throughput and packet sizes ----------------------------------------------------------------------------------


def _throughput(connection: PeerConnection, peer: PeerInfo) -> list[Finding]:
    here = local_info(connection, "", "")
    mtus = f"{here.interface} here has MTU {here.mtu}, {peer.interface} on {peer.host} {peer.mtu}"
    details = {"here": here.mtu, "there": peer.mtu}
    direction = f"to {peer.host}"
    try:
        there = _send(connection, transfer_size(_send(connection, FIRST_BYTES)))
        direction = f"from {peer.host}"
        back = _receive(connection, transfer_size(_receive(connection, FIRST_BYTES)))
    except ConnectionFailed as problem:
        if not problem.silent:
            raise
        return [
            _NETWORK.red(
                "packet-size",
                "mtu-mismatch",
                f"small packets arrive, large ones {direction} are lost",
                why=f"{problem} after small messages were answered at once (observed); {mtus}: probably a device "
                "between the machines passes only smaller packets and does not report it",
                fix="give the interfaces of both machines the smallest MTU on the way; "
                f"{_LEAST_MTU} passes nearly everywhere",
                commands=(
                    f"ip link set dev {here.interface or 'eth0'} mtu {_LEAST_MTU}   # as root, on both machines",
                ),
                certain=False,
                details=details,
            )
        ]
    what = f"{_rate(there)} there, {_rate(back)} back"
    why = "one connection, a fifth of a second each"
    found = [_NETWORK.green("throughput", what, why, there=there, back=back)]
    if here.mtu and peer.mtu and here.mtu != peer.mtu:
        found.append(
            _NETWORK.yellow(
                "packet-size",
                "mtu-mismatch",
                f"packet sizes differ: {mtus}",
                why="large packets do arrive (observed), but a switch or a tunnel between others may drop them",
                fix="give every machine of the job the same MTU",
                commands=(f"ip link set dev {here.interface} mtu {min(here.mtu, peer.mtu)}   # as root",),
                details=details,
            )
        )
    return found


def _send(connection: PeerConnection, size: int) -> float:
    connection.send(TransferRequest(back=False, size=size))
    connection.expect(TransferReady)
    return send_bytes(connection, size)


def _receive(connection: PeerConnection, size: int) -> float:
    connection.send(TransferRequest(back=True, size=size))
    receive_bytes(connection, size)
    return connection.expect(TransferRate).bytes_per_s


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
