"""The way to the coordinator: interfaces, the one that leads there, and those that Gloo and NCCL were told to use."""

from __future__ import annotations

from ..diagnosis import join
from .finding import Finding, green, red, yellow
from .interfaces import Interface, chosen, leads_to
from .request import Case

__all__ = ["check"]

_SECTION = "network"

# Variable, and whether it takes beginnings of names as NCCL does.
_VARIABLES = (("GLOO_SOCKET_IFNAME", False), ("NCCL_SOCKET_IFNAME", True), ("TP_SOCKET_IFNAME", False))


def check(case: Case) -> list[Finding]:
    """Look at the interfaces, the route, and what was chosen by variables."""
    present = case.interfaces
    places = case.places
    own, route = leads_to(places, present)
    found = [_listed(present, places, own, route, case)]
    for name, prefixes in _VARIABLES:
        value = case.env.get(name, "").strip()
        if value:
            found.append(_chosen(name, value, present, route, case, prefixes=prefixes))
    return found


def _listed(
    present: list[Interface], places: list[tuple[int, str]], own: str, route: Interface | None, case: Case
) -> Finding:
    usable = [each for each in present if each.up and each.outer]
    shown = join([f"{each.name} {each.outer[0]} (MTU {each.mtu})" for each in usable]) or "no outer interface"
    details = {each.name: {"addresses": list(each.addresses), "mtu": each.mtu, "up": each.up} for each in present}
    loopback = next((each for each in present if "127.0.0.1" in each.addresses), None)
    if loopback is None or not loopback.up:
        return red(
            _SECTION,
            "interfaces",
            "interface-mismatch",
            "there is no loopback interface: ranks of one machine cannot reach each other",
            why=f"the interfaces that are up: {shown}",
            fix="bring it up",
            commands=("ip link set lo up",),
        )
    if not places:
        return green(_SECTION, "interfaces", shown, interfaces=details)
    if route is None and not own:
        # Whoever connects says it too, with its diagnosis; here only that the kernel has no way at all.
        return green(_SECTION, "interfaces", f"{shown}; none leads to {places[0][1]}", interfaces=details)
    if route is not None and route.loopback and case.target_is_here:
        return green(_SECTION, "interfaces", shown, f"{places[0][1]} is this machine", interfaces=details)
    by = route.name if route is not None else "an interface without that address"
    return green(
        _SECTION, "interfaces", f"{by} ({own}) leads to {places[0][1]}", f"all: {shown}", interfaces=details, route=by
    )


def _chosen(
    name: str, value: str, present: list[Interface], route: Interface | None, case: Case, *, prefixes: bool
) -> Finding:
    meant, unknown = chosen(value, present, prefixes=prefixes)
    there = join(sorted(each.name for each in present))
    best = route.name if route is not None and not route.loopback else ""
    unset = f"unset {name}"
    commands = (unset, *((f"export {name}={best}",) if best else ()))
    if unknown:
        return red(
            _SECTION,
            name,
            "interface-mismatch",
            f"{name}={value}: there is no interface {join(unknown)} here",
            why=f"this machine has {there}",
            fix=f"{unset}, or name the one that leads to the other machines" + (f": {best}" if best else ""),
            commands=commands,
        )
    useless = [each for each in meant if not each.up or not each.addresses]
    if not meant or len(useless) == len(meant):
        state = join([f"{each.name} {'is down' if not each.up else 'has no address'}" for each in useless])
        return red(
            _SECTION,
            name,
            "interface-mismatch",
            f"{name}={value} chooses no interface that works",
            why=state or f"none of {there} is chosen by it",
            fix=f"{unset}, or bring the interface up and give it an address",
            commands=commands,
        )
    if case.several_hosts and all(each.loopback for each in meant):
        return red(
            _SECTION,
            name,
            "interface-mismatch",
            f"{name}={value} is loopback, but the job is on several machines",
            why=case.nodes or f"{case.target} is another machine",
            fix=f"{unset}, or name the interface that leads there" + (f": {best}" if best else ""),
            commands=commands,
        )
    if best and best not in {each.name for each in meant}:
        return yellow(
            _SECTION,
            name,
            "interface-mismatch",
            f"{name}={value}, but {best} leads to the coordinator",
            why=f"the kernel sends to {case.target} by {best}; {value} must lead to every machine of the job too",
            fix=f"{unset}, unless {value} is a network of its own between all machines",
            commands=commands,
        )
    return green(_SECTION, name, f"{name}={value} is there" + (" and leads there" if best else ""))
