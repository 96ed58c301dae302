"""The address that a coordinator binds: the requested one, if other hosts can connect to it."""

from __future__ import annotations

import ipaddress
import socket

from ..environments.world import Address
from ..errors import fail
from . import connect
from .wording import RANKS, Wording

__all__ = ["WARNING_OPEN", "bind_address", "is_loopback"]

# A name that does not resolve is looked up again for this long, in case the answer was a transient error.
_RETRY_S = 1.2

# Logged once if a coordinator listens on a network without a token; formatted with the host and "rank" or "node".
WARNING_OPEN = (
    "the coordinator listens on %s without a token: anyone who reaches that port can join or disturb this job. "
    "Set the same ALLHANDS_TOKEN on every %s to close it."
)


def bind_address(
    address: Address,
    deadline: float,
    *,
    who: str,
    bind: str = "",
    late_names: bool = False,
    share: tuple[int, int] | None = None,
    wording: Wording = RANKS,
    notify: connect.Notify | None = None,
) -> str:
    """Return the IP address to bind for ``address``, or ``bind`` if that is given. Raises if there is none.

    ``share`` is (ranks on this machine, all ranks). If some are elsewhere, a name that resolves to loopback is an
    error.
    """
    if bind:
        return bind
    attempts = connect.Attempts(address, wording)
    for _ in connect.retries(deadline if late_names else min(deadline, attempts.started + _RETRY_S)):
        try:
            places = connect.resolve(address.host, address.port, deadline)
            break
        except socket.gaierror as problem:
            attempts.tries += 1
            attempts.name_error = problem
        if notify is not None:
            notify(f"waiting for the name of the coordinator at {address}: {attempts.summary()}")
    else:
        raise connect.diagnose(attempts, who=who, several_hosts=False) from attempts.name_error
    # If the name has IPv4 and IPv6 addresses, bind IPv4: peers try all of them.
    host = min(places)[1]
    literal = address.host in {"localhost", host}
    if is_loopback(host) and not literal and share is not None and share[0] < share[1]:
        raise fail(
            "loopback-advertised",
            f"{address.host} resolves to {host} on {wording.noun} 0's own machine, where no other machine can reach it",
            who=who,
            why=f"only {share[0]} of {share[1]} {wording.noun}s {'is' if share[0] == 1 else 'are'} on this machine",
            fix=f"in /etc/hosts of this machine write its outer address (`ip -br addr`) in the place of {host} for "
            f"{address.host}, or set ALLHANDS_BIND to that address",
            ranks=(0,),
        )
    return host


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is an address that only this machine can connect to."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
