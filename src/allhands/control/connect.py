"""Reaching the coordinator: connect within a deadline, or say what stands in the way.

Everything that may mend itself while rank 0 starts is retried until the deadline; what cannot is said at
once. A failed attempt leaves evidence, and the last evidence decides the diagnosis.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..diagnosis import Diagnosis, count, duration, join
from ..environments.world import Address
from ..errors import AllhandsError, error
from . import credentials
from .wording import RANKS, Party

__all__ = ["Attempts", "Notify", "diagnose", "reach", "reach_local", "resolve"]

# A name that does not exist is asked for again for this long, in case the answer was a hiccup.
_NAME_S = 1.5

# No route is a fact of this machine's own table; it is given a moment in case an interface is coming up.
_ROUTE_S = 1.5

# One connection attempt: longer than two retransmissions of a lost first packet (1 s, then 2 s).
_ATTEMPT_S = 3.5

# Between attempts; short at first, because ranks usually start within a second of each other.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

Notify = Callable[[str], None]


class Attempts(msgspec.Struct):
    """The evidence gathered while trying: what happened last, per address."""

    address: Address
    party: Party = RANKS
    outcomes: dict[str, OSError] = msgspec.field(default_factory=dict)
    name_error: socket.gaierror | None = None
    tries: int = 0
    started: float = msgspec.field(default_factory=time.monotonic)

    def summary(self) -> str:
        """Say what happened, for the waiting line and for "why"."""
        if self.name_error is not None:
            return f"{self.address.host} does not resolve ({self.name_error.strerror})"
        return join([f"{where}: {_words(problem)}" for where, problem in self.outcomes.items()]) or "connecting"


def _words(problem: OSError) -> str:
    if isinstance(problem, TimeoutError) or problem.errno == errno.ETIMEDOUT:
        return "no answer"
    if problem.errno == errno.ECONNREFUSED:
        return "refused"
    return problem.strerror or str(problem)


def resolve(host: str, port: int, deadline: float) -> list[tuple[int, str]]:
    """Return (family, IP address) for ``host``; raise socket.gaierror. Ends by ``deadline`` whatever DNS does."""
    found: list[tuple[int, str]] = []
    trouble: list[socket.gaierror] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as problem:
            trouble.append(problem)
        except UnicodeError as problem:
            trouble.append(socket.gaierror(socket.EAI_NONAME, f"not a host name: {problem}"))
        else:
            found.extend(dict.fromkeys((int(entry[0]), str(entry[4][0])) for entry in entries))

    # getaddrinfo takes no timeout and can sit for half a minute on a DNS server that drops packets.
    thread = threading.Thread(target=look_up, name="allhands-resolve", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The limit on processes and threads is reached. A late answer is worth more than none.
        look_up()
    else:
        thread.join(max(0.0, deadline - time.monotonic()))
    if trouble:
        raise trouble[0]
    if not found:
        raise socket.gaierror(socket.EAI_AGAIN, "no answer from the name server")
    return found


def reach(
    address: Address,
    deadline: float,
    *,
    who: str,
    late_names: bool = False,
    several_hosts: bool = False,
    notify: Notify | None = None,
    party: Party = RANKS,
) -> socket.socket:
    """Return a connected TCP socket to ``address``, or raise the diagnosis of why there is none."""
    attempts = Attempts(address, party)
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return _try(attempts, deadline)
        except OSError as problem:
            final = _final(attempts, problem, late_names=late_names)
        now = time.monotonic()
        if final or now + pause >= deadline:
            raise diagnose(attempts, who=who, several_hosts=several_hosts)
        if notify is not None:
            notify(
                f"waiting for the coordinator at {address}: {attempts.summary()} ({duration(now - attempts.started)})"
            )
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_S)


def _try(attempts: Attempts, deadline: float) -> socket.socket:
    attempts.tries += 1
    attempts.name_error = None
    before, attempts.outcomes = attempts.outcomes, {}
    address = attempts.address
    try:
        places = resolve(address.host, address.port, deadline)
    except socket.gaierror as problem:
        attempts.name_error = problem
        raise
    last: OSError = TimeoutError("nothing tried")
    for family, host in places:
        sock = socket.socket(family, socket.SOCK_STREAM)
        patience = min(_ATTEMPT_S, max(0.05, deadline - time.monotonic()))
        try:
            sock.settimeout(patience)
            sock.connect((host, address.port))
        except OSError as problem:
            sock.close()
            last = problem
            # An attempt that the deadline cut short is no evidence of silence where an earlier one was answered.
            cut_short = isinstance(problem, TimeoutError) and patience < _ATTEMPT_S
            attempts.outcomes[host] = before.get(host, problem) if cut_short else problem
        else:
            credentials.keep_alive(sock)
            return sock
    raise last


def _final(attempts: Attempts, problem: OSError, *, late_names: bool) -> bool:
    """Tell whether trying again is pointless."""
    waited = time.monotonic() - attempts.started
    if attempts.name_error is not None:
        missing = attempts.name_error.errno in {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)}
        return missing and not late_names and waited >= _NAME_S
    if all(outcome.errno == errno.ENETUNREACH for outcome in attempts.outcomes.values()):
        return waited >= _ROUTE_S
    return problem.errno in {errno.EINVAL, errno.EACCES, errno.EPERM}


def diagnose(attempts: Attempts, *, who: str, several_hosts: bool) -> AllhandsError:
    """Turn the evidence of failed attempts into the exception to raise."""
    address, party = attempts.address, attempts.party
    root = f"{party.noun} 0"
    tried = f"{count(attempts.tries, 'attempt')} in {duration(time.monotonic() - attempts.started)}"
    evidence = f"{attempts.summary()}; {tried}"
    parts: dict[str, Any] = {"who": who, "hosts": (address.host,)}
    if attempts.name_error is not None:
        if attempts.name_error.errno == socket.EAI_AGAIN:
            return error(
                Diagnosis(
                    "name-server-silent",
                    f"nobody says what the coordinator's host name {address.host!r} is: the name server does not "
                    "answer",
                    why=evidence,
                    fix=f"give the address of {root}'s machine itself as {party.address_from}, or put it into "
                    f"/etc/hosts with the name {address.host}; or name a server that answers in /etc/resolv.conf",
                    certain=False,
                    **parts,
                )
            )
        return error(
            Diagnosis(
                "address-unresolvable",
                f"the coordinator's host name {address.host!r} has no address",
                why=evidence,
                fix=f"give the right name or the address of {root}'s machine as {party.address_from}; `getent hosts "
                f"{address.host}` must print an address",
                **parts,
            )
        )
    codes = {outcome.errno for outcome in attempts.outcomes.values()}
    if errno.ECONNREFUSED in codes:
        if several_hosts and _loopback(attempts.outcomes):
            return error(_loopback_advertised(attempts, evidence, parts))
        return error(
            Diagnosis(
                "connection-refused",
                f"nothing listens on {address}",
                why=f"{evidence}: the host answers, but {root} has not opened the port (or listens on another address)",
                fix=f"start {root} on that host, with the same port everywhere ({party.port_from}); if it runs "
                f"there, a firewall may reject us: open port {address.port} on {address.host} for this machine",
                ranks=(0,),
                **parts,
            )
        )
    if codes <= {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}:
        return error(
            Diagnosis(
                "no-route",
                f"no way leads from this machine to {address.host}",
                why=evidence,
                fix=f"give an address of {root}'s machine on a network that this machine is in as "
                f"{party.address_from}, or bring up the interface or the route that leads there (`ip route get "
                f"{next(iter(attempts.outcomes), address.host)}` shows it)",
                ranks=(0,),
                **parts,
            )
        )
    if codes & {errno.EACCES, errno.EPERM}:
        why = f"{evidence}: a firewall on this machine forbids the connection"
    else:
        why = f"{evidence}: packets get no answer at all, probably a firewall drops them or the host is down"
    return error(
        Diagnosis(
            "connection-filtered",
            f"{address} does not answer",
            why=why,
            fix=f"open port {address.port} on {address.host} for this machine (and the ports of Gloo and NCCL: all "
            f"above 1023), or check the address; `allhands doctor {address}` from here says more",
            ranks=(0,),
            certain=bool(codes & {errno.EACCES, errno.EPERM}),
            **parts,
        )
    )


def _loopback(outcomes: dict[str, OSError]) -> bool:
    return all(host == "::1" or host.startswith("127.") for host in outcomes)


def _loopback_advertised(attempts: Attempts, evidence: str, parts: dict[str, Any]) -> Diagnosis:
    address, party = attempts.address, attempts.party
    return Diagnosis(
        "loopback-advertised",
        f"the coordinator's address {address} is this machine's own loopback, but {party.noun} 0 runs elsewhere",
        why=f"{evidence}; the launch environment says that {party.noun}s are on several machines",
        fix=f"as {party.address_from} give a name of {party.noun} 0's machine that other machines can reach, not "
        "localhost; remove 127.0.1.1 lines for it from /etc/hosts",
        ranks=(0,),
        certain=False,
        **parts,
    )


def reach_local(name: str, deadline: float, *, notify: Notify | None = None) -> socket.socket | None:
    """Return a socket connected to the abstract Unix socket ``name``, or None if nobody listens by ``deadline``.

    The other end must belong to this user (or root): the name alone proves nothing.
    """
    pause, started = _FIRST_PAUSE_S, time.monotonic()
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + name)
        except OSError:
            sock.close()
        else:
            _, uid = credentials.peer(sock)
            if uid in {os.getuid(), 0}:
                return sock
            sock.close()
        now = time.monotonic()
        if now + pause >= deadline:
            return None
        if notify is not None:
            notify(f"waiting for rank 0 to open the roll call on this host ({duration(now - started)})")
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_S / 5)
