"""Connecting to the coordinator within a deadline, or the diagnosis of why that fails.

Conditions that can change while rank 0 starts are retried until the deadline; others fail at once. Each failed attempt
leaves evidence, and the evidence of the last one selects the diagnosis.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from ..diagnosis import count, duration, join
from ..environments.world import Address
from ..errors import AllhandsError, fail
from .process_identity import peer_credentials
from .wording import RANKS, Wording

__all__ = ["Attempts", "Notify", "connect_tcp", "connect_unix", "diagnose", "keep_alive", "resolve", "retries"]

# An unknown host name is looked up again for this long, in case the answer was a transient error.
_NAME_S = 1.5

# "No route" is the answer of this machine's own routing table; an interface may not be up yet.
_ROUTE_S = 1.5

# One connection attempt: longer than two retransmissions of a lost SYN (1 s, then 2 s).
_ATTEMPT_S = 3.5

# Pause between attempts; short at first because ranks usually start within a second of each other.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5

# For places on this host, where an attempt is cheap.
_LONGEST_LOCAL_PAUSE_S = 0.1

# TCP keepalive: report a host without power or network after about 8 s (idle 3 s, 5 probes) instead of two hours.
# A stopped process does not count: its kernel answers.
_IDLE_S, _INTERVAL_S, _PROBES = 3, 1, 5

Notify = Callable[[str], None]


class Attempts(msgspec.Struct):
    """The evidence of all attempts so far: the last error of each address."""

    address: Address
    wording: Wording = RANKS
    outcomes: dict[str, OSError] = msgspec.field(default_factory=dict)
    name_error: socket.gaierror | None = None
    tries: int = 0
    started: float = msgspec.field(default_factory=time.monotonic)

    def summary(self) -> str:
        """Return the errors in words, for the waiting line and the "why" of a diagnosis."""
        if self.name_error is not None:
            return f"{self.address.host} does not resolve ({self.name_error.strerror})"
        return join([f"{where}: {_describe(problem)}" for where, problem in self.outcomes.items()]) or "connecting"


def _describe(problem: OSError) -> str:
    if isinstance(problem, TimeoutError) or problem.errno == errno.ETIMEDOUT:
        return "no answer"
    if problem.errno == errno.ECONNREFUSED:
        return "refused"
    return problem.strerror or str(problem)


def retries(deadline: float, longest_pause_s: float = _LONGEST_LOCAL_PAUSE_S) -> Iterator[float]:
    """Yield the seconds since the start before each attempt, with growing pauses in between, until ``deadline``."""
    pause, started = _FIRST_PAUSE_S, time.monotonic()
    yield 0.0
    while (now := time.monotonic()) + pause < deadline:
        time.sleep(pause)
        pause = min(pause * 2, longest_pause_s)
        yield now - started


def keep_alive(sock: socket.socket) -> None:
    """Enable keepalive, and disable Nagle's algorithm because messages are small."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # Keepalive does not apply while sent data is unacknowledged; this limit does.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_IDLE_S + _INTERVAL_S * _PROBES) * 1000)


def resolve(host: str, port: int, deadline: float) -> list[tuple[int, str]]:
    """Return (family, IP address) pairs for ``host``; raises socket.gaierror, at ``deadline`` at the latest."""
    found: list[tuple[int, str]] = []
    errors: list[socket.gaierror] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as problem:
            errors.append(problem)
        except UnicodeError as problem:
            errors.append(socket.gaierror(socket.EAI_NONAME, f"not a host name: {problem}"))
        else:
            found.extend(dict.fromkeys((int(entry[0]), str(entry[4][0])) for entry in entries))

    # getaddrinfo has no timeout and can block for 30 s if the DNS server does not answer.
    thread = threading.Thread(target=look_up, name="allhands-resolve", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The limit on threads is reached: resolve without a deadline.
        look_up()
    else:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    if not found:
        raise socket.gaierror(socket.EAI_AGAIN, "no answer from the name server")
    return found


def connect_tcp(
    address: Address,
    deadline: float,
    *,
    who: str,
    late_names: bool = False,
    several_hosts: bool = False,
    notify: Notify | None = None,
    wording: Wording = RANKS,
) -> socket.socket:
    """Return a TCP socket connected to ``address``. Raises the diagnosis of the last attempt at ``deadline``."""
    attempts = Attempts(address, wording)
    for waited_s in retries(deadline, _LONGEST_PAUSE_S):
        try:
            return _try(attempts, deadline)
        except OSError as problem:
            if _final(attempts, problem, late_names=late_names):
                break
        if notify is not None:
            notify(f"waiting for the coordinator at {address}: {attempts.summary()} ({duration(waited_s)})")
    raise diagnose(attempts, who=who, several_hosts=several_hosts)


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
        timeout_s = min(_ATTEMPT_S, max(0.05, deadline - time.monotonic()))
        try:
            sock.settimeout(timeout_s)
            sock.connect((host, address.port))
        except OSError as problem:
            sock.close()
            last = problem
            # An attempt shortened by the deadline is no evidence against the result of an earlier, full one.
            shortened = isinstance(problem, TimeoutError) and timeout_s < _ATTEMPT_S
            attempts.outcomes[host] = before.get(host, problem) if shortened else problem
        else:
            keep_alive(sock)
            return sock
    raise last


def _final(attempts: Attempts, problem: OSError, *, late_names: bool) -> bool:
    """Return whether another attempt cannot succeed."""
    waited = time.monotonic() - attempts.started
    if attempts.name_error is not None:
        missing = attempts.name_error.errno in {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)}
        return missing and not late_names and waited >= _NAME_S
    if all(outcome.errno == errno.ENETUNREACH for outcome in attempts.outcomes.values()):
        return waited >= _ROUTE_S
    return problem.errno in {errno.EINVAL, errno.EACCES, errno.EPERM}


def connect_unix(name: str, deadline: float, *, notify: Notify | None = None) -> socket.socket | None:
    """Return a socket connected to the abstract Unix socket ``name``; None if nothing listens there by ``deadline``.

    A listener of another user (except root) is ignored: any user can bind an abstract name.
    """
    for waited_s in retries(deadline):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + name)
            if peer_credentials(sock)[1] in {os.getuid(), 0}:
                return sock
        except OSError:
            pass
        sock.close()
        if notify is not None:
            notify(f"waiting for rank 0 to open the roll call on this host ({duration(waited_s)})")
    return None


def diagnose(attempts: Attempts, *, who: str, several_hosts: bool) -> AllhandsError:
    """Return the exception for the evidence of failed attempts."""
    address, wording = attempts.address, attempts.wording
    host, root = address.host, f"{wording.noun} 0"
    tried = f"{count(attempts.tries, 'attempt')} in {duration(time.monotonic() - attempts.started)}"
    why = f"{attempts.summary()}; {tried}"
    codes = {outcome.errno for outcome in attempts.outcomes.values()}
    certain, unresolved = True, attempts.name_error is not None
    if attempts.name_error is not None and attempts.name_error.errno == socket.EAI_AGAIN:
        slug, certain = "name-server-silent", False
        what = f"the coordinator's host name {host!r} cannot be resolved: the name server does not answer"
        fix = (
            f"give the IP address of {root}'s machine as {wording.address_from}, or add it to /etc/hosts with the name "
            f"{host}; or name a server that answers in /etc/resolv.conf"
        )
    elif unresolved:
        slug, what = "address-unresolvable", f"the coordinator's host name {host!r} has no address"
        fix = (
            f"give the right name or the address of {root}'s machine as {wording.address_from}; `getent hosts {host}` "
            "must print an address"
        )
    elif (
        errno.ECONNREFUSED in codes
        and several_hosts
        and all(host == "::1" or host.startswith("127.") for host in attempts.outcomes)
    ):
        slug, certain = "loopback-advertised", False
        what = f"the coordinator's address {address} is this machine's own loopback, but {root} runs elsewhere"
        why += f"; the launch environment says that {wording.noun}s are on several machines"
        fix = (
            f"as {wording.address_from} give a name of {root}'s machine that other machines can reach, not localhost; "
            "remove 127.0.1.1 lines for it from /etc/hosts"
        )
    elif errno.ECONNREFUSED in codes:
        slug, what = "connection-refused", f"nothing listens on {address}"
        why += f": the host answers, but {root} has not opened the port (or listens on another address)"
        fix = (
            f"start {root} on that host, with the same port everywhere ({wording.port_from}); if it runs there, a "
            f"firewall may reject us: open port {address.port} on {host} for this machine"
        )
    elif codes <= {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}:
        slug, what = "no-route", f"this machine has no route to {host}"
        fix = (
            f"give an address of {root}'s machine on a network that this machine is in as {wording.address_from}, or "
            "bring up the interface or the route that leads there (`ip route get "
            f"{next(iter(attempts.outcomes), host)}` shows it)"
        )
    else:
        slug, what = "connection-filtered", f"{address} does not answer"
        certain = bool(codes & {errno.EACCES, errno.EPERM})
        if certain:
            why += ": a firewall on this machine forbids the connection"
        else:
            why += ": packets get no answer at all, probably a firewall drops them or the host is down"
        fix = (
            f"open port {address.port} on {host} for this machine (and the ports of Gloo and NCCL: all above 1023), or "
            f"check the address; `allhands doctor {address}` from this machine gives details"
        )
    ranks = () if unresolved else (0,)
    return fail(slug, what, who=who, why=why, fix=fix, ranks=ranks, hosts=(host,), certain=certain)
