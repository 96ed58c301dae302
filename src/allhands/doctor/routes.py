"""The route to the coordinator: interfaces, those chosen for Gloo and NCCL, and this machine's own firewall."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from ..diagnosis import join
from .finding import Finding, Section
from .proc_status import run_tool
from .request import Interface, Request

__all__ = ["check", "check_firewall", "firewall_rules", "select_interfaces"]

_NETWORK = Section("network")


def select_interfaces(value: str, present: list[Interface], *, prefixes: bool) -> tuple[list[Interface], list[str]]:
    """Return the interfaces that a variable such as GLOO_SOCKET_IFNAME selects, and its words that select none.

    NCCL (``prefixes``) accepts prefixes of names, ``=NAME`` for exactly that one, and ``^`` for all but these.
    """
    exclude = prefixes and value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^").lstrip("=").split(",") if word]

    def matches(word: str, name: str) -> bool:
        return name.startswith(word) if prefixes and not exact else name == word

    found = [each for each in present if any(matches(word, each.name) for word in words) != exclude]
    return found, [] if exclude else [word for word in words if not any(matches(word, each.name) for each in present)]


def check(request: Request) -> Iterator[Finding]:
    """Check the interfaces, the route, and the interfaces that variables select."""
    # The source address and the interface of the kernel's route to the first place that has one.
    own, route = "", None
    for family, host in request.places:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            # Connecting a datagram socket looks up the route and sends nothing, so any port will do.
            sock.connect((host, 9))
            own = str(sock.getsockname()[0]).partition("%")[0]
            route = next((each for each in request.interfaces if own in each.addresses), None)
            break
    yield _interfaces(request, own, route)
    # NCCL accepts prefixes of names.
    for name, prefixes in (("GLOO_SOCKET_IFNAME", False), ("NCCL_SOCKET_IFNAME", True), ("TP_SOCKET_IFNAME", False)):
        if value := request.env.get(name, "").strip():
            yield _variable(name, value, route, request, prefixes=prefixes)


def _interfaces(request: Request, own: str, route: Interface | None) -> Finding:
    present, places = request.interfaces, request.places
    usable = [each for each in present if each.up and each.outer]
    shown = join([f"{each.name} {each.outer[0]} (MTU {each.mtu})" for each in usable]) or "no outer interface"
    loopback = next((each for each in present if "127.0.0.1" in each.addresses), None)
    if loopback is None or not loopback.up:
        return _NETWORK.red(
            "interfaces",
            "interface-mismatch",
            "there is no loopback interface: ranks of one machine cannot reach each other",
            why=f"the interfaces that are up: {shown}",
            fix="bring it up",
            commands=("ip link set lo up",),
        )
    known = {each.name: {"addresses": list(each.addresses), "mtu": each.mtu, "up": each.up} for each in present}
    details: dict[str, Any] = {"interfaces": known}
    what, why = shown, ""
    if places and route is None and not own:
        # The check of the port reports this with its diagnosis.
        what = f"{shown}; none leads to {places[0][1]}"
    elif places and route is not None and route.loopback and request.target_is_here:
        why = f"{places[0][1]} is this machine"
    elif places:
        details["route"] = route.name if route is not None else "an interface without that address"
        what, why = f"{details['route']} ({own}) leads to {places[0][1]}", f"all: {shown}"
    return _NETWORK.green("interfaces", what, why, **details)


def _variable(name: str, value: str, route: Interface | None, request: Request, *, prefixes: bool) -> Finding:
    selected, unknown = select_interfaces(value, request.interfaces, prefixes=prefixes)
    there = join(sorted(each.name for each in request.interfaces))
    best = route.name if route is not None and not route.loopback else ""
    unset = f"unset {name}"
    commands = (unset, *((f"export {name}={best}",) if best else ()))

    def red(what: str, why: str, fix: str) -> Finding:
        text = f"{unset}, or {fix}" + (f": {best}" if best and fix.startswith("use") else "")
        return _NETWORK.red(name, "interface-mismatch", f"{name}={value}{what}", why=why, fix=text, commands=commands)

    if unknown:
        return red(
            f": there is no interface {join(unknown)} here",
            f"this machine has {there}",
            "use the one that leads to the other machines",
        )
    useless = [each for each in selected if not each.up or not each.addresses]
    if len(useless) == len(selected):
        state = join([f"{each.name} {'is down' if not each.up else 'has no address'}" for each in useless])
        why = state or f"it selects none of {there}"
        return red(" chooses no interface that works", why, "bring the interface up and give it an address")
    if request.several_hosts and all(each.loopback for each in selected):
        why = request.nodes or f"{request.target} is another machine"
        return red(" is loopback, but the job is on several machines", why, "use the interface that leads there")
    if best and best not in {each.name for each in selected}:
        return _NETWORK.yellow(
            name,
            "interface-mismatch",
            f"{name}={value}, but {best} leads to the coordinator",
            why=f"the kernel sends to {request.target} by {best}; {value} must lead to every machine of the job too",
            fix=f"{unset}, unless {value} is a separate network between all machines",
            commands=commands,
        )
    return _NETWORK.green(name, f"{name}={value} is there" + (" and leads there" if best else ""))


def firewall_rules() -> list[str] | None:
    """Return the rules by which this machine drops or rejects incoming packets; None if they cannot be read."""
    if os.geteuid() != 0:
        return None
    readable = False
    found: list[str] = []
    for command, parse in ((["nft", "list", "ruleset"], _parse_nft), (["iptables-save"], _parse_iptables)):
        output, problem = run_tool(*command, timeout_s=1.0)
        readable = readable or not problem
        found += parse(output)
    return found if readable else None


def _parse_nft(text: str) -> list[str]:
    found: list[str] = []
    incoming, chain = False, ""
    for line in (each.strip() for each in text.splitlines()):
        if line.startswith("chain "):
            chain, incoming = line.split()[1], False
        elif "hook " in line:
            incoming = "hook input" in line or "hook prerouting" in line
            if incoming and "policy drop" in line:
                found.append(f"chain {chain}: policy drop")
        elif incoming and {"drop", "reject"} & set(line.split()):
            found.append(f"chain {chain}: {line}")
    return found


def _parse_iptables(text: str) -> list[str]:
    return [
        line.strip()
        for line in text.splitlines()
        if line.startswith(":INPUT DROP") or (line.startswith("-A INPUT") and line.split()[-1] in {"DROP", "REJECT"})
    ]


def check_firewall(request: Request) -> Iterator[Finding]:
    """Report the rules that drop incoming packets; yellow only if other machines have to connect."""
    found = firewall_rules()
    if found is None:
        return
    shown = join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    if not found or not request.several_hosts:
        what = f"a firewall with {len(found)} rules that drop packets" if found else "no firewall of its own"
        yield _NETWORK.green("firewall", what, shown)
        return
    yield _NETWORK.yellow(
        "firewall",
        "ports-filtered",
        "this machine's own firewall drops some packets",
        why=f"{shown} (observed); Gloo and NCCL listen on ports that the kernel chooses",
        fix="accept connections from the other machines of the job on all ports above 1023; `allhands doctor "
        "--listen` here and `allhands doctor HOST:PORT` there shows whether they arrive",
        commands=("nft list ruleset",),
        certain=False,
    )
