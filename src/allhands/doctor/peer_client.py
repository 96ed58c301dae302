"""The visitor's half of the check between two machines: clock, round trip, ports both ways, throughput, packets."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from .._version import __version__
from ..diagnosis import duration, join
from . import firewall
from .finding import Finding, green, red, yellow
from .peer_protocol import (
    ANSWER_S,
    FIRST,
    Conversation,
    Knock,
    Knocked,
    Lost,
    Open,
    Opened,
    Pour,
    Rate,
    Ready,
    Tick,
    Tock,
    Told,
    Welcome,
    doors,
    enough,
    knock_at,
    pour,
    swallow,
    welcome,
)
from .screen import lines
from .versions import installed

__all__ = ["visit"]

_SECTION = "network"

# Enough questions for the quickest answer to be a good one.
_TICKS = 20

# Clocks that are kept by NTP differ by less; beyond it, log lines of two machines cannot be put in order.
_SKEW_S = 1.0

# What every network of IPv6 passes, and so nearly every tunnel; which size is the largest on the way nobody says here.
_PASSES = 1280

# The other end tries all ports at once, and waits for those that do not answer.
_KNOCKS_S = ANSWER_S + 3.0


@dataclass(frozen=True, slots=True)
class _Other:
    """The other machine, and how it is called in sentences."""

    name: str
    said: Welcome


def visit(talk: Conversation) -> list[Finding]:
    """Examine the way to the doctor at the other end and back."""
    found: list[Finding] = []
    other = None
    try:
        other = _met(talk)
        found += _versions(other)
        found += _clock(talk, other)
        found += _ports(talk, other)
        found += _sizes(talk, other)
        talk.say(Told(lines(found), red=any(each.level == "red" for each in found)))
    except Lost as problem:
        name = other.name if other is not None else "the other doctor"
        found.append(
            red(
                _SECTION,
                "conversation",
                "coordinator-silent",
                f"{name} {'fell silent' if problem.silent else 'went away'} in the middle of the check",
                why=f"{problem} (observed)",
                fix="see whether `allhands doctor --listen` still runs there, and try again",
            )
        )
    return found


def _met(talk: Conversation) -> _Other:
    hello = talk.hear()
    if not isinstance(hello, Welcome):
        raise Lost(silent=False, why="it did not say who it is")
    return _Other(hello.host, hello)


def _versions(other: _Other) -> list[Finding]:
    mine, theirs = installed().torch, other.said.torch
    if other.said.allhands == __version__ and mine == theirs:
        return []
    return [
        yellow(
            "stack",
            "versions",
            "version-mismatch",
            f"versions differ: here allhands {__version__} and torch {mine or 'none'}, on {other.name} allhands "
            f"{other.said.allhands} and torch {theirs or 'none'}",
            why="both ends said so (observed)",
            fix="install the same versions everywhere (ALLHANDS_MIXED_VERSIONS=1 allows different ones of torch)",
            commands=(f"pip install torch=={theirs.partition('+')[0]} allhands=={other.said.allhands}",)
            if theirs
            else (),
        )
    ]


# Clocks and round trip ----------------------------------------------------------------------------------------


def _clock(talk: Conversation, other: _Other) -> list[Finding]:
    best, offset = float("inf"), 0.0
    for _ in range(_TICKS):
        begun, wall = time.monotonic(), time.time()
        talk.say(Tick())
        tock = talk.hear()
        if not isinstance(tock, Tock):
            raise Lost(silent=False, why="it did not say what time it is")
        took = time.monotonic() - begun
        if took < best:
            # On a way that is as long there as back, it looked at its clock after half the time.
            best, offset = took, tock.now - (wall + took / 2)
    found = [
        green(
            _SECTION,
            "round-trip",
            f"round trip to {other.name} {best * 1000:.2f} ms",
            f"the quickest of {_TICKS}",
            round_trip_s=best,
        )
    ]
    if abs(offset) - best >= _SKEW_S:
        ahead = "ahead of" if offset > 0 else "behind"
        found.append(
            yellow(
                "resources",
                "clock",
                "clock-skewed",
                f"the clock of {other.name} is {duration(abs(offset))} {ahead} this machine's",
                why=f"it says so itself, within {duration(round(best, 3))} of a round trip (observed). Collectives do "
                "not mind; certificates, tokens that expire, and the order of log lines do",
                fix="let both machines keep their time by the same NTP server",
                commands=("timedatectl set-ntp true", "chronyc makestep"),
                details={"offset_s": offset, "host": other.name},
            )
        )
    else:
        found.append(
            green("resources", "clock", f"clocks agree within {max(abs(offset), best) * 1000:.0f} ms", offset_s=offset)
        )
    return found


# Ports --------------------------------------------------------------------------------------------------------


def _ports(talk: Conversation, other: _Other) -> list[Finding]:
    own = talk.own
    talk.say(Open())
    opened = talk.hear()
    if not isinstance(opened, Opened):
        raise Lost(silent=False, why="it did not open ports")
    there = knock_at(opened.address, opened.ports)
    with doors(own) as ports:
        talk.say(Knock(own, ports))
        answer = talk.hear(_KNOCKS_S)
        if not isinstance(answer, Knocked):
            raise Lost(silent=False, why="it did not say which ports it reached")
        back = answer.outcomes
    found = []
    here = socket.gethostname()
    for outcomes, begin, end, local in ((there, here, other.name, False), (back, other.name, here, True)):
        shut = {port: why for port, why in outcomes.items() if why}
        if shut:
            found.append(_shut(shut, outcomes, begin, end, local=local))
    if other.said.seen_as != own:
        found.append(
            yellow(
                _SECTION,
                "translation",
                "ports-filtered",
                f"{other.name} sees this machine as {other.said.seen_as}, but its address is {own}",
                why="something between them changes addresses (NAT; observed); ranks advertise the one that they have",
                fix=f"use a network on which {own} itself can be reached from {other.name}",
            )
        )
    if not found:
        found.append(
            green(
                _SECTION,
                "ports",
                f"ports open both ways ({len(there)} there, {len(back)} back)",
                f"from {min(there, default=0)} to {max(there, default=0)}",
            )
        )
    return found


def _shut(shut: dict[int, str], outcomes: dict[int, str], begin: str, end: str, *, local: bool) -> Finding:
    some = "" if len(shut) == len(outcomes) else f"{len(shut)} of {len(outcomes)} tried "
    reasons = sorted(set(shut.values()))
    own = firewall.rules() if local else None
    seen = f"; rules here: {join(own[:3])}" if own else ""
    return red(
        _SECTION,
        f"ports-{'back' if local else 'there'}",
        "ports-filtered",
        f"{begin} cannot reach {some or 'the '}ports of {end} that Gloo and NCCL will use",
        why=f"{join([f'{port}: {why}' for port, why in list(shut.items())[:4]])}"
        + (f" and {len(shut) - 4} more" if len(shut) > 4 else "")
        + f" (observed: {join(reasons)}, although {end} listens on them){seen}",
        fix=f"on {end} let {begin} in on all ports above 1023, not only on the coordinator's",
        commands=(f"nft list ruleset   # on {end}, as root",),
        details={"from": begin, "to": end, "shut": sorted(shut), "open": sorted(set(outcomes) - set(shut))},
    )


# Throughput and packet sizes ----------------------------------------------------------------------------------


def _sizes(talk: Conversation, other: _Other) -> list[Finding]:
    mine = welcome(talk, "", "")
    differ = bool(mine.mtu and other.said.mtu and mine.mtu != other.said.mtu)
    sizes = f"{mine.interface} here has MTU {mine.mtu}, {other.said.interface} on {other.name} {other.said.mtu}"
    direction = f"to {other.name}"
    try:
        there = _there(talk, enough(_there(talk, FIRST)))
        direction = f"from {other.name}"
        back = _back(talk, enough(_back(talk, FIRST)))
    except Lost as problem:
        if not problem.silent:
            raise
        return [
            red(
                _SECTION,
                "packet-size",
                "mtu-mismatch",
                f"small packets come through, large ones {direction} vanish",
                why=f"{problem} after small messages were answered at once (observed); {sizes}: probably something "
                "between the machines passes only smaller packets and does not say so",
                fix="give the interfaces of both machines the smallest MTU on the way; "
                f"{_PASSES} passes nearly everywhere",
                commands=(f"ip link set dev {mine.interface or 'eth0'} mtu {_PASSES}   # as root, on both machines",),
                certain=False,
                details={"here": mine.mtu, "there": other.said.mtu},
            )
        ]
    found = [
        green(
            _SECTION,
            "throughput",
            f"{_rate(there)} there, {_rate(back)} back",
            "one connection, a fifth of a second each",
            there=there,
            back=back,
        )
    ]
    if differ:
        found.append(
            yellow(
                _SECTION,
                "packet-size",
                "mtu-mismatch",
                f"packet sizes differ: {sizes}",
                why="large packets do come through (observed), but a switch or a tunnel between others may drop them",
                fix="give every machine of the job the same MTU",
                commands=(f"ip link set dev {mine.interface} mtu {min(mine.mtu, other.said.mtu)}   # as root",),
                details={"here": mine.mtu, "there": other.said.mtu},
            )
        )
    return found


def _there(talk: Conversation, size: int) -> float:
    talk.say(Pour(back=False, size=size))
    if not isinstance(talk.hear(), Ready):
        raise Lost(silent=False, why="it did not say that it is ready")
    return pour(talk, size)


def _back(talk: Conversation, size: int) -> float:
    talk.say(Pour(back=True, size=size))
    swallow(talk, size)
    told = talk.hear()
    return told.bytes_per_s if isinstance(told, Rate) else 0.0


def _rate(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s"
