"""Whether the coordinator's port can be reached, what listens there, and who holds it on this machine."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time

from .. import settings
from ..control.connect import Attempts, diagnose
from ..control.process_identity import port_owner
from ..diagnosis import duration, join
from ..environments.world import Address
from .finding import Finding, green, of, red, yellow
from .port_probe import STORE, Service, identify
from .request import Case

__all__ = ["check", "knock"]

_SECTION = "network"

# Longer than one retransmission of a lost first packet (after 1 s), so that a single loss is not taken for a firewall.
_KNOCK_S = 2.2


def knock(places: list[tuple[int, str, int]], seconds: float = _KNOCK_S) -> dict[tuple[str, int], OSError | float]:
    """Connect to every (family, address, port) at once; return how many seconds each took, or what stood in the way."""
    found: dict[tuple[str, int], OSError | float] = {}
    started = time.monotonic()
    with selectors.DefaultSelector() as selector:
        links: list[socket.socket] = []
        for family, host, port in places:
            link = socket.socket(family, socket.SOCK_STREAM)
            links.append(link)
            link.setblocking(False)
            code = link.connect_ex((host, port))
            if code in {0, errno.EINPROGRESS}:
                selector.register(link, selectors.EVENT_WRITE, (host, port))
            else:
                found[host, port] = OSError(code, os.strerror(code))
        while selector.get_map() and (left := started + seconds - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj
                if isinstance(sock, socket.socket):
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    found[key.data] = OSError(code, os.strerror(code)) if code else time.monotonic() - started
                    selector.unregister(sock)
        for key in list(selector.get_map().values()):
            found[key.data] = TimeoutError(errno.ETIMEDOUT, "no answer")
        for link in links:
            link.close()
    return found


def check(case: Case) -> tuple[list[Finding], Service | None]:
    """Look at the coordinator's port. A doctor that listens there is returned too, its connection open."""
    target, places = case.target, case.places
    if target is None or not places:
        return [], None
    knocked = knock([(family, host, target.port) for family, host in places])
    outcomes = {host: outcome for (host, _), outcome in knocked.items()}
    open_at = [host for _, host in places if isinstance(outcomes.get(host), float)]
    if not open_at:
        return [
            _closed(case, target, {host: each for host, each in outcomes.items() if isinstance(each, OSError)})
        ], None
    family, host = next((family, host) for family, host in places if host in open_at)
    service = identify(family, (host, target.port), target.host, settings.read(case.env))
    found = [_open(case, target, host, float(outcomes[host]), service)]  # type: ignore[arg-type]  # open_at are floats
    shut = {each: problem for each, problem in outcomes.items() if isinstance(problem, OSError)}
    # "Refused" at the other kind of address is how a service that listens on one of them looks.
    deaf = {each: problem for each, problem in shut.items() if problem.errno != errno.ECONNREFUSED}
    if deaf and not case.target_is_here:
        words = join([f"{each}: {problem.strerror}" for each, problem in deaf.items()])
        found.append(
            yellow(
                _SECTION,
                "families",
                "no-route",
                f"{target.host} has an address that cannot be reached: {join(list(deaf))}",
                why=f"{words}; {host} answers. Whoever tries the other address first waits for nothing",
                fix=f"give ranks the address that works: MASTER_ADDR={host}",
                commands=(f"export MASTER_ADDR={host}",),
            )
        )
    return found, service


def _closed(case: Case, target: Address, outcomes: dict[str, OSError]) -> Finding:
    """Say what stands in the way, in the words that a rank would get."""
    refused = any(problem.errno == errno.ECONNREFUSED for problem in outcomes.values())
    if refused and case.target_is_here and not (case.nodes and _only_loopback(outcomes)):
        return green(_SECTION, "port", f"port {target.port} is free here: rank 0 can listen on it")
    attempts = Attempts(target)
    attempts.outcomes, attempts.tries = outcomes, 1
    diagnosis = diagnose(
        attempts, who=f"{socket.gethostname()} (allhands doctor)", several_hosts=bool(case.nodes)
    ).diagnosis
    commands: tuple[str, ...] = ()
    if diagnosis.slug == "connection-refused":
        commands = (f"allhands doctor --listen {target}   # on {target.host}, then again here",)
    elif diagnosis.slug == "no-route":
        commands = (f"ip route get {next(iter(outcomes))}",)
    elif diagnosis.slug == "connection-filtered":
        commands = (f"nft list ruleset   # on {target.host}, as root",)
    # Before a job nobody listens, and where the address only comes from the environment that is no fault yet.
    level = "yellow" if diagnosis.slug == "connection-refused" and not case.asked else "red"
    return of(_SECTION, "port", level, diagnosis, commands=commands)  # type: ignore[arg-type]  # one of the two


def _only_loopback(outcomes: dict[str, OSError]) -> bool:
    return all(host == "::1" or host.startswith("127.") for host in outcomes)


def _open(case: Case, target: Address, host: str, seconds: float, service: Service) -> Finding:
    took = f"{host} let us in after {duration(round(seconds, 3)) if seconds >= 0.1 else f'{seconds * 1000:.1f} ms'}"
    held = port_owner(target.port) if case.target_is_here else None
    by = f"; held by {held}" if held is not None else ""
    if service.trouble is not None:
        return of(_SECTION, "port", "red", service.trouble.diagnosis)
    if service.kind == "coordinator":
        return green(_SECTION, "port", f"a coordinator of allhands listens on {target}", f"{took}{by}")
    if service.kind == "doctor":
        return green(_SECTION, "port", f"a doctor listens on {target}", took)
    if service.kind == STORE:
        if case.world is not None and case.world.agent_store:
            return green(_SECTION, "port", f"torchrun's store listens on {target}", f"{took}{by}")
        return yellow(
            _SECTION,
            "port",
            "wrong-service",
            f"what listens on {target} is {STORE}: a job of torch's own has this address",
            why=f"{took}; {service.said}{by}. Ranks of that job are right there; ranks of allhands are not",
            fix="for a job of allhands choose another port (MASTER_PORT, tcp://HOST:PORT, --coordinator)",
            commands=(f"ss -ltnp 'sport = :{target.port}'   # on {target.host}",),
        )
    end = (f"kill {held.pid}",) if held is not None and held.pid and held.pid != os.getpid() else ()
    if service.kind == "silent":
        return yellow(
            _SECTION,
            "port",
            "wrong-service",
            f"what listens on {target} says nothing",
            why=f"{took}; {service.said}{by}. Probably another service, or a process that is stopped",
            fix="see who it is; if it is not yours choose another port (MASTER_PORT, tcp://HOST:PORT, --coordinator)",
            commands=(f"ss -ltnp 'sport = :{target.port}'   # on {target.host}", *end),
            certain=False,
        )
    slug = "port-in-use" if held is not None else "wrong-service"
    return red(
        _SECTION,
        "port",
        slug,
        f"what listens on {target} is {service.kind}, not a coordinator of allhands",
        why=f"{took}; {service.said}{by}",
        fix="choose another port (MASTER_PORT, tcp://HOST:PORT, --coordinator)"
        + (", or end that process" if end else ""),
        commands=(f"ss -ltnp 'sport = :{target.port}'   # on {target.host}", *end),
    )
